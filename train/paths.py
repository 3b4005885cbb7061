"""Where things live on disk."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is never seen half-written: under a temporary name in the same folder, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def cache_dir() -> Path:
    """The folder for downloads and intermediate files: $TALON_CACHE, or `.cache` in the clone."""
    return Path(os.environ.get("TALON_CACHE") or REPO / ".cache").resolve()
