"""speculators 0.9.0 in an environment of its own. Nothing is installed when pip would pull CUDA packages onto a machine without a GPU."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# speculators and its connector are installed without their own requirements: these name torchvision and torchaudio, which speculators never
# imports and whose default builds do not load beside a CPU build of torch.
PINS = ("torch==2.13.0", "transformers==5.19.0", "datasets==5.1.0")
WITHOUT_REQUIREMENTS = ("speculators==0.9.0", "hs-connectors==0.9.0")
REQUIREMENTS = (
    "aiohttp",
    "click",
    "httpx",
    "loguru<=0.7.3",
    "numpy<=2.5.4",
    "openai",
    "protobuf",
    "psutil",
    "pydantic",
    "pydantic-settings",
)
REQUIREMENTS += ("rich", "safetensors", "tqdm<=4.70.1", "typer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="folder of the environment; created if it is absent")
    args = parser.parse_args()
    python = args.venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.venv], check=True)
    if installed(python) is None:
        install(python)
        write_bytecode(python)
    (args.venv / "installed.json").write_text(json.dumps(installed(python), indent=1) + "\n")


def install(python: Path) -> None:
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    wanted = [*PINS, *REQUIREMENTS]
    plan = subprocess.run([*pip, "--dry-run", "--report", "-", *wanted], check=True, stdout=subprocess.PIPE).stdout
    foreign = cuda_packages(json.loads(plan))
    if foreign and not shutil.which("nvidia-smi"):
        sys.exit(
            f"vs_speculators: pip would install {foreign[0]} and {len(foreign) - 1} more CUDA packages; set PIP_EXTRA_INDEX_URL to "
            "https://download.pytorch.org/whl/cpu, where torch has CPU builds."
        )
    subprocess.run([*pip, "--no-compile", *wanted], check=True)
    subprocess.run([*pip, "--no-compile", "--no-deps", *WITHOUT_REQUIREMENTS], check=True)


def write_bytecode(python: Path) -> None:
    """Of the modules that are used, once; where Python is told not to write it, each start would otherwise compile them again."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = "import speculators.cli, speculators.train.cli, typer.testing, transformers.models.llama.modeling_llama"
    subprocess.run([python, "-W", "ignore", "-c", code], env=env, check=False)


def installed(python: Path) -> dict[str, str] | None:
    """Versions of the pinned packages; None unless all are as pinned (a local build tag such as +cpu does not count)."""
    names = [pin.split("==")[0] for pin in (*PINS, *WITHOUT_REQUIREMENTS)]
    ask = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {names!r}}}))"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    if answer.returncode:
        return None
    found = json.loads(answer.stdout)
    return found if as_pinned(found) else None


def as_pinned(found: dict[str, str]) -> bool:
    pins = dict(pin.split("==") for pin in (*PINS, *WITHOUT_REQUIREMENTS))
    return all(found.get(name, "").split("+")[0] == version for name, version in pins.items())


def cuda_packages(plan: dict) -> list[str]:
    """Names in a `pip install --report` that only a GPU can use."""
    names = [item["metadata"]["name"].lower() for item in plan["install"]]
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


if __name__ == "__main__":
    main()
