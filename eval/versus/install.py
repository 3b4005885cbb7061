"""speculators 0.9.0 in an environment of its own. Nothing is installed when pip would pull CUDA packages onto a machine without a GPU."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

# What was measured. torchvision and torchaudio are imported by nothing here, but speculators requires them.
PINS = ("torch==2.13.0", "torchvision==0.28.0", "torchaudio==2.11.1", "transformers==5.19.0", "datasets==5.1.0", "speculators==0.9.0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="folder of the environment; created if it is absent")
    args = parser.parse_args()
    python = args.venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.venv], check=True)
    if installed(python) is None:
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        plan = subprocess.run([*pip, "install", "--dry-run", "--quiet", "--report", "-", *PINS], check=True, stdout=subprocess.PIPE).stdout
        foreign = cuda_packages(json.loads(plan))
        if foreign and not shutil.which("nvidia-smi"):
            sys.exit(
                f"vs_speculators: pip would install {foreign[0]} and {len(foreign) - 1} more CUDA packages; set PIP_EXTRA_INDEX_URL to "
                "https://download.pytorch.org/whl/cpu, where torch has CPU builds."
            )
        subprocess.run([*pip, "install", "--quiet", "--no-compile", *PINS], check=True)
    (args.venv / "installed.json").write_text(json.dumps(installed(python), indent=1) + "\n")


def installed(python: Path) -> dict[str, str] | None:
    """Versions of the pinned packages; None unless all are as pinned (a local build tag such as +cpu does not count)."""
    names = [pin.split("==")[0] for pin in PINS]
    ask = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {names!r}}}))"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    if answer.returncode:
        return None
    found = json.loads(answer.stdout)
    return found if as_pinned(found) else None


def as_pinned(found: dict[str, str]) -> bool:
    return all(found.get(pin.split("==")[0], "").split("+")[0] == pin.split("==")[1] for pin in PINS)


def cuda_packages(plan: dict) -> list[str]:
    """Names in a `pip install --report` that only a GPU can use."""
    names = [item["metadata"]["name"].lower() for item in plan["install"]]
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


if __name__ == "__main__":
    main()
