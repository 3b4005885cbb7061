"""Runs the steps of a pipeline as subprocesses, one after the other, and leaves out those whose output is already up to date.

A stage is up to date when its outputs exist and its key is the one they were made with. The key covers the command, the stage's own sources
and input files by content, and the keys of all stages before it: whatever changes, everything that depends on it runs again.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from train.paths import write_whole

STOP_PATIENCE_S = 20.0


class StageError(RuntimeError):
    """A stage that failed or cannot run. `str()` is one sentence."""


@dataclass(frozen=True)
class Stage:
    """One step.

    sources, inputs: files whose content decides whether the outputs are still valid
    outputs: what the command writes; every one must exist afterwards. They are deleted before a run under a new key, and kept when a run
        under the same key was interrupted, because the commands themselves continue where they were.
    scratch: what the command may write besides; deleted together with the outputs
    replay: command that shows again what a cached stage had shown
    shared: the outputs belong to other pipelines too; the command itself decides whether they are still good, and they are never deleted
    """

    name: str
    what: str
    command: Sequence[str | Path]
    outputs: Sequence[Path]
    sources: Sequence[Path] = ()
    inputs: Sequence[Path] = ()
    scratch: Sequence[Path] = ()
    replay: Sequence[str | Path] = ()
    shared: bool = False


@dataclass(frozen=True)
class Outcome:
    stage: str
    cached: bool
    elapsed_s: float


class Pipeline:
    """Stages with a memory (`<folder>/stages.json`) of the keys they ran under; their commands run in `working_dir`."""

    def __init__(self, folder: Path, stages: Sequence[Stage], console: Console, working_dir: Path):
        self.folder, self.stages, self.console, self.working_dir = folder, stages, console, working_dir
        self.memory_path = folder / "stages.json"
        self.memory: dict[str, dict] = json.loads(self.memory_path.read_text()) if self.memory_path.exists() else {}

    def run(self, *, only: str | None = None, start: str | None = None) -> list[Outcome]:
        """Runs what is out of date. only: exactly this stage, even if up to date; start: this stage and all behind it, even if up to date.

        Raises StageError at the first stage that fails, KeyboardInterrupt on Ctrl-C; both leave finished stages finished.
        """
        outcomes, key, forced = [], "", False
        for number, stage in enumerate(self.stages, start=1):
            forced = forced or stage.name == start
            if only is None or stage.name == only:
                key = self._key(stage, key)
                self.console.rule(f"[bold]{number}/{len(self.stages)} {stage.name}[/]: {stage.what}", align="left")
                outcomes.append(self._run_or_skip(stage, key, forced or only is not None))
            elif not all(path.exists() for path in stage.outputs):
                if self._comes_before(stage.name, only):
                    raise StageError(f"Stage {only} needs the output of stage {stage.name}, which has not run; run all stages first.")
            else:
                key = self._key(stage, key)
        return outcomes

    def _run_or_skip(self, stage: Stage, key: str, forced: bool) -> Outcome:
        known = self.memory.get(stage.name, {})
        if not forced and known.get("done") == key and all(path.exists() for path in stage.outputs):
            self.console.print(f"up to date (took {clock(known['elapsed_s'])} when it ran)", style="dim")
            started = time.monotonic()
            if stage.replay:
                self._call(stage, stage.replay)
            return Outcome(stage.name, True, time.monotonic() - started)
        if not stage.shared and (known.get("started") != key or known.get("done") == key):
            remove([*stage.outputs, *stage.scratch])
        # A run that continues an interrupted one adds to the time that one had used.
        spent_s = known.get("spent_s", 0.0) if known.get("started") == key and known.get("done") != key else 0.0
        started = time.monotonic()
        try:
            self._remember(stage, started=key, done=None, spent_s=spent_s)
            self._call(stage, stage.command)
        except BaseException:
            self._remember(stage, started=key, done=None, spent_s=spent_s + time.monotonic() - started)
            raise
        elapsed_s = spent_s + time.monotonic() - started
        missing = [path for path in stage.outputs if not path.exists()]
        if missing:
            raise StageError(f"Stage {stage.name} ended without error but did not write {missing[0]}; run it with --only {stage.name}.")
        self._remember(stage, started=key, done=key, elapsed_s=elapsed_s)
        self._forget_after(stage)  # a second run need not write the same bytes
        self.console.print(f"{stage.name}: {clock(elapsed_s)}", style="green")
        return Outcome(stage.name, False, elapsed_s)

    def _call(self, stage: Stage, command: Sequence[str | Path]) -> None:
        """Runs a command on this terminal; Ctrl-C reaches it directly, and its own clean-up is waited for."""
        words = [str(word) for word in command]
        env = dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        process = subprocess.Popen(words, env=env, cwd=self.working_dir)
        try:
            code = process.wait()
        except BaseException:
            end(process)
            raise
        if code != 0:
            raise StageError(f"Stage {stage.name} failed with exit code {code}; its command was: {shlex.join(words)}")

    def _key(self, stage: Stage, key_before: str) -> str:
        digest = hashlib.sha256(f"{key_before}\0{shlex.join(map(str, stage.command))}\0".encode())
        for path in [*stage.sources, *stage.inputs]:
            digest.update(f"{path.name}\0".encode() + (path.read_bytes() if path.is_file() else b"absent") + b"\0")
        return digest.hexdigest()

    def _comes_before(self, name: str, other: str | None) -> bool:
        names = [stage.name for stage in self.stages]
        return other is not None and names.index(name) < names.index(other)

    def _forget_after(self, stage: Stage) -> None:
        for later in self.stages[self.stages.index(stage) + 1 :]:
            self.memory.pop(later.name, None)
        self._save()

    def _remember(self, stage: Stage, **facts) -> None:
        self.memory[stage.name] = facts
        self._save()

    def _save(self) -> None:
        write_whole(self.memory_path, json.dumps(self.memory, indent=1) + "\n")


def run_command(folder: Path, make_stages: Callable[[], Sequence[Stage]], args, console: Console, working_dir: Path, done: str = "") -> int:
    """What a pipeline's command line does -> exit status. `args` has `list` (show the commands only), `only` and `start`.

    `done` is said last. `make_stages` may write files that the stages read, and raise StageError.
    """
    try:
        stages = make_stages()
        if args.list:
            list_commands(stages, console)
            return 0
        outcomes = Pipeline(folder, stages, console, working_dir).run(only=args.only, start=args.start)
    except KeyboardInterrupt:
        return stop("Interrupted; finished stages are kept, and the same command continues from there.", console)
    except StageError as error:
        return stop(str(error), console)
    print_outcomes(outcomes, console)
    if done:
        console.print(done, soft_wrap=True)
    return 0


def list_commands(stages: Iterable[Stage], console: Console) -> None:
    for stage in stages:
        console.print(f"# {stage.name}: {stage.what}", style="dim", markup=False)
        console.print(shlex.join(map(str, stage.command)), markup=False, highlight=False, soft_wrap=True)


def stop(sentence: str, console: Console) -> int:
    """Say why a command ends early -> exit status."""
    console.print(sentence, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1


def end(process: subprocess.Popen) -> None:
    """Ends a child that may be cleaning up already: Ctrl-C reaches the whole terminal, SIGTERM only us."""
    for ask in (lambda: None, process.terminate, process.kill):
        ask()
        try:
            process.wait(timeout=STOP_PATIENCE_S)
            return
        except subprocess.TimeoutExpired:
            continue


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table(title="Stages", title_justify="left")
    table.add_column("stage")
    table.add_column("elapsed", justify="right")
    table.add_column("")
    for one in outcomes:
        table.add_row(one.stage, clock(one.elapsed_s), "cached" if one.cached else "")
    table.add_section()
    table.add_row("total", clock(sum(one.elapsed_s for one in outcomes)), "")
    console.print(table)


def clock(seconds: float) -> str:
    """83.4 -> '1 min 23 s'."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
