"""The results file of eval/serve.py: what was measured, under which settings, by which versions; written after every prompt set.

Layout: {settings, versions, machine, command, specs: {run: {...}}, runs: {run: {set: SetResult}}, summary: {run: {set or "all": Figures}}}.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from eval.servers import ServerSpec
from eval.stats import Run, SetResult, figures, time_ratio

PLAIN = "plain"


class ResultsError(RuntimeError):
    """A results file that cannot be continued. `str()` is one sentence."""


class ResultsFile:
    """Finished prompt sets by run, saved at once (temporary name, then renamed), so that an interrupted evaluation continues where it was.

    Raises ResultsError when `path` exists but holds other settings or is no results file.
    """

    def __init__(self, path: Path, settings: dict, command: str):
        self.path = path
        self.head = {"settings": settings, "versions": versions(), "machine": machine(), "command": command}
        self.specs: dict[str, dict] = {}
        self.runs: dict[str, dict[str, SetResult]] = {}
        if path.exists():
            self._load(settings)

    def get(self, run: str, set_name: str) -> SetResult | None:
        return self.runs.get(run, {}).get(set_name)

    def add(self, spec: ServerSpec, set_name: str, result: SetResult) -> None:
        self.specs[spec.name] = spec_settings(spec)
        self.runs.setdefault(spec.name, {})[set_name] = result
        self.save()

    def body(self) -> dict:
        return {
            **self.head,
            "specs": self.specs,
            "runs": {run: {name: result.to_json() for name, result in sets.items()} for run, sets in self.runs.items()},
            "summary": summary(self.runs, self.specs),
        }

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text(json.dumps(self.body(), indent=1) + "\n")
        temporary.replace(self.path)

    def _load(self, settings: dict) -> None:
        try:
            body = json.loads(self.path.read_text())
            found = body["settings"]
            runs = {run: {name: SetResult.from_json(data) for name, data in sets.items()} for run, sets in body["runs"].items()}
            self.specs, self.runs = dict(body["specs"]), runs
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{self.path} is not a results file of eval/serve.py ({error!r}); choose another --out.") from error
        for key in sorted(settings.keys() | found.keys()):
            if settings.get(key) != found.get(key):
                raise ResultsError(
                    f"{self.path} was measured with {key} = {_short(found.get(key))}, this call has {_short(settings.get(key))}; "
                    "choose another --out, or pass --fresh to measure again."
                )


def summary(runs: dict[str, Run], specs: dict[str, dict]) -> dict:
    """Figures by run and prompt set, and over all sets; for each TALON run also how much faster it is than each comparable EAGLE3 run."""
    plain = runs.get(PLAIN)
    table: dict[str, dict] = {}
    for run, sets in runs.items():
        groups = {**{name: [name] for name in sets}, "all": list(sets)}
        table[run] = {name: asdict(figures(sets, plain, group)) for name, group in groups.items()}
        for base in comparable(run, specs):
            for name, group in groups.items():
                shared = [one for one in group if one in runs[base]]
                if shared:
                    table[run][name].setdefault("faster_than_eagle3", {})[base] = asdict(time_ratio(sets, runs[base], shared))
    return table


def comparable(run: str, specs: dict[str, dict]) -> list[str]:
    """The EAGLE3 runs that a TALON run is held against: those with the same verify width N; all of them when none has it."""
    if specs[run]["algorithm"] != "TALON":
        return []
    eagle3 = [name for name, spec in specs.items() if spec["algorithm"] == "EAGLE3"]
    same = [name for name in eagle3 if specs[name]["nodes"] == specs[run]["nodes"]]
    return same or eagle3


def spec_settings(spec: ServerSpec) -> dict:
    """The part of a spec that matters to a reader of the results, without paths."""
    fields = ("algorithm", "nodes", "width", "steps", "gate", "dtype", "threads")
    return {**{name: getattr(spec, name) for name in fields}, "extra": list(spec.extra)}


def fingerprint(model_dir: Path) -> str:
    """Equal for folders that hold the same model: sha256 over names, sizes and the first and last MiB of config and weight files."""
    digest = hashlib.sha256()
    for path in sorted([*model_dir.glob("*.json"), *model_dir.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("talon-sglang", "sglang", "torch", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict:
    """Processor, usable cores, memory and GPU: enough to judge a timing, nothing that names the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {"cpu": models[0] if models else platform.machine(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory_gib, 1)}
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
        found["gpus"] = [line.strip() for line in listing.stdout.splitlines() if line.strip()]
    return found


def command_without_paths(words: list[str]) -> str:
    """A command line fit for publication: absolute paths are cut to their last part."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
