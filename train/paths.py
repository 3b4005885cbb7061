"""Where things live on disk."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def cache_dir() -> Path:
    """The folder for downloads and intermediate files: $TALON_CACHE, or `.cache` in the clone."""
    return Path(os.environ.get("TALON_CACHE") or REPO / ".cache").resolve()
