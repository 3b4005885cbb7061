"""The results file of eval/serve.py: what was measured, under which settings, by which versions.

Layout: {settings, versions, machine, commands, specs: {run: {...}}, loads: {"c=1 T=0": {concurrency, temperature,
runs: {run: {set: [Block]}}, summary: {run: {set or "all": Figures}}}}}.
"""

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from eval.servers import ServerSpec
from eval.stats import Block, Run, SetResult, figures, pairs, throughput_ratio, time_ratio

PLAIN = "plain"
SAVE_EVERY_S = 5.0


class ResultsError(RuntimeError):
    """A results file that cannot be continued. `str()` is one sentence."""


@dataclass(frozen=True)
class Load:
    """How a server is asked: `concurrency` requests in flight, at `temperature`."""

    concurrency: int = 1
    temperature: float = 0.0

    @property
    def key(self) -> str:
        return f"c={self.concurrency} T={self.temperature:g}"


class ResultsFile:
    """Finished blocks by load, run and prompt set; an interrupted evaluation continues behind them.

    `save` writes under a temporary name and renames, so the file on disk is whole at any time.
    Raises ResultsError when `path` exists but holds other settings or is no results file.
    """

    def __init__(self, path: Path, settings: dict, command: str):
        self.path = path
        self.head = {"settings": settings, "versions": versions(), "machine": machine(), "commands": [command]}
        self.specs: dict[str, dict] = {}
        self.loads: dict[Load, dict[str, dict[str, list[Block]]]] = {}
        self.saved_at = time.monotonic()
        if path.exists():
            self._load(settings)

    @property
    def empty(self) -> bool:
        return not self.loads

    @property
    def sessions(self) -> int:
        """How often servers had been started for what is in the file."""
        found = [block.session for runs in self.loads.values() for sets in runs.values() for blocks in sets.values() for block in blocks]
        return max(found, default=0)

    def finished(self, load: Load, run: str, set_name: str) -> int:
        """Number of finished blocks."""
        return len(self.loads.get(load, {}).get(run, {}).get(set_name, ()))

    def add(self, load: Load, spec: ServerSpec, set_name: str, block: Block) -> None:
        """Keeps a block; it is on disk after the next `save`."""
        self.specs[spec.name] = spec_settings(spec)
        self.loads.setdefault(load, {}).setdefault(spec.name, {}).setdefault(set_name, []).append(block)

    def body(self, with_summary: bool = True) -> dict:
        loads = {}
        for load in sorted(self.loads, key=lambda load: (load.temperature, load.concurrency)):
            runs = self.loads[load]
            table = {run: {name: [block.to_json() for block in blocks] for name, blocks in sets.items()} for run, sets in runs.items()}
            loads[load.key] = {**asdict(load), "runs": table, "summary": {}}
        body = {**self.head, "specs": self.specs, "loads": loads}
        return summarised(body) if with_summary else body

    def save(self, with_summary: bool = True) -> None:
        """Raises ResultsError when the disk is full or the folder cannot be written; what was on disk before stays."""
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self.body(with_summary)) + "\n")
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise ResultsError(f"{self.path} cannot be written ({error.strerror}); make room, and the same command continues.") from error
        self.saved_at = time.monotonic()

    def save_now_and_then(self) -> None:
        """`save`, but at most every few seconds and without the summary, since both take a while on a large file."""
        if time.monotonic() - self.saved_at > SAVE_EVERY_S:
            self.save(with_summary=False)

    def save_unfinished(self) -> None:
        if not self.empty:
            self.save(with_summary=False)

    def _load(self, settings: dict) -> None:
        try:
            body = json.loads(self.path.read_text())
            found, self.specs = body["settings"], dict(body["specs"])
            self.loads = read_loads(body)
            self.head["commands"] = list(dict.fromkeys([*body["commands"], *self.head["commands"]]))
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{self.path} is not a results file of eval/serve.py ({error!r}); choose another --out.") from error
        for key in sorted(settings.keys() | found.keys()):
            if settings.get(key) != found.get(key):
                raise ResultsError(
                    f"{self.path} was measured with {key} = {_short(found.get(key))}, this call has {_short(settings.get(key))}; "
                    "choose another --out, or pass --fresh to measure again."
                )


def read_results(path: Path) -> dict:
    """A parsed results file, its summaries filled in where the evaluation was cut off before it wrote them.

    Raises ResultsError when the file cannot be read or is none of eval/serve.py.
    """
    try:
        return summarised(json.loads(path.read_text()))
    except OSError as error:
        raise ResultsError(f"{path} cannot be read ({error.strerror}); pass the JSON that eval/serve.py --out named.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is not a results file of eval/serve.py ({error!r}); pass the JSON that --out named.") from error


def summarised(body: dict) -> dict:
    for load, runs in read_loads(body).items():
        found = body["loads"][load.key]
        found["summary"] = found["summary"] or summary(results_of(runs), body["specs"], load.temperature == 0)
    return body


def read_loads(body: dict) -> dict[Load, dict[str, dict[str, list[Block]]]]:
    """The measurements of a parsed results file. Raises KeyError or TypeError when it is none."""
    return {
        Load(found["concurrency"], found["temperature"]): {
            run: {name: [Block.from_json(data) for data in blocks] for name, blocks in sets.items()} for run, sets in found["runs"].items()
        }
        for found in body["loads"].values()
    }


def results_of(runs: dict[str, dict[str, list[Block]]]) -> dict[str, Run]:
    return {run: {name: SetResult(blocks) for name, blocks in sets.items()} for run, sets in runs.items()}


def summary(runs: dict[str, Run], specs: dict[str, dict], greedy: bool = True) -> dict:
    """Figures by run and prompt set, and over all sets; for each TALON run also how much faster it is than each comparable EAGLE3 run."""
    plain = runs.get(PLAIN)
    table: dict[str, dict] = {}
    for run, sets in runs.items():
        groups = {**{name: [name] for name in sets}, "all": list(sets)}
        table[run] = {name: asdict(figures(sets, plain, group, greedy)) for name, group in groups.items()}
        for base in comparable(run, specs, runs):
            for name, group in groups.items():
                shared = [one for one in group if one in runs[base]]
                if pairs(sets, runs[base], shared):
                    table[run][name].setdefault("faster_than_eagle3", {})[base] = asdict(time_ratio(sets, runs[base], shared))
                    table[run][name].setdefault("more_than_eagle3", {})[base] = asdict(throughput_ratio(sets, runs[base], shared))
    return table


def comparable(run: str, specs: dict[str, dict], runs: Iterable[str]) -> list[str]:
    """Those of `runs` that a TALON run is held against: EAGLE3 with the same verify width N; all EAGLE3 when none has it."""
    if specs[run]["algorithm"] != "TALON":
        return []
    eagle3 = [name for name in runs if specs[name]["algorithm"] == "EAGLE3"]
    same = [name for name in eagle3 if specs[name]["nodes"] == specs[run]["nodes"]]
    return same or eagle3


def spec_settings(spec: ServerSpec) -> dict:
    """The part of a spec that matters to a reader of the results, without paths."""
    fields = ("algorithm", "nodes", "width", "steps", "gate", "batch_budget", "dtype", "threads")
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
