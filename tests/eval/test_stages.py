"""Stages run when something they depend on changed, and only then; interrupted ones keep what they had."""

import io
import sys

import pytest
from rich.console import Console

from eval.stages import Pipeline, Stage, StageError, clock, print_outcomes

# Each stage appends its name to a log and copies its input; `fail` in a file makes it stop half-way with a partial file.
PROGRAM = """
import pathlib, sys
name, source, out, log, fail = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
log.open("a").write(name + " ")
partial = out.with_name(out.name + ".partial")
if partial.exists():
    log.open("a").write("(continued) ")
partial.write_text("half")
if fail.exists() and fail.read_text() == name:
    sys.exit(3)
partial.unlink()
out.write_text(source.read_text() + name)
"""


class Rig:
    """A pipeline source -> a -> b -> c in a temporary folder."""

    def __init__(self, folder):
        self.folder, self.log, self.fail = folder, folder / "log", folder / "fail"
        self.source, self.program, self.other = folder / "source.txt", folder / "program.py", folder / "other.py"
        self.source.write_text("s")
        self.program.write_text(PROGRAM)
        self.other.write_text("1")

    def stage(self, name, before, **kwargs):
        out = self.folder / name
        command = [sys.executable, self.program, name, before, out, self.log, self.fail]
        return Stage(name, "", command, outputs=[out], scratch=[self.folder / f"{name}.partial"], **kwargs)

    def run(self, **kwargs):
        """Runs the pipeline afresh, as a new process would; returns what ran and the names of the cached stages."""
        replay = [sys.executable, "-c", f"open({str(self.log)!r}, 'a').write('shown ')"]
        stages = [
            self.stage("a", self.source, inputs=[self.source]),
            self.stage("b", self.folder / "a", sources=[self.other]),
            self.stage("c", self.folder / "b", replay=replay),
        ]
        self.log.write_text("")
        outcomes = Pipeline(self.folder, stages, Console(file=io.StringIO()), self.folder).run(**kwargs)
        return self.log.read_text().split(), [one.stage for one in outcomes if one.cached]

    def read(self, name):
        return (self.folder / name).read_text()


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_the_second_run_only_shows_again(rig):
    assert rig.run() == (["a", "b", "c"], [])
    assert rig.read("c") == "sabc"
    assert rig.run() == (["shown"], ["a", "b", "c"])


def test_a_change_runs_its_stage_and_all_behind_it(rig):
    rig.run()
    rig.other.write_text("2")
    assert rig.run() == (["b", "c"], ["a"])
    rig.source.write_text("S")
    assert rig.run() == (["a", "b", "c"], [])
    assert rig.read("c") == "Sabc"


def test_a_lost_output_is_made_again_and_what_came_from_it_too(rig):
    rig.run()
    (rig.folder / "b").unlink()
    assert rig.run() == (["b", "c"], ["a"])


def test_a_failed_stage_stops_the_run_and_continues_where_it_was(rig):
    rig.fail.write_text("b")
    with pytest.raises(StageError, match="Stage b failed with exit code 3; its command was: "):
        rig.run()
    assert rig.log.read_text().split() == ["a", "b"]
    rig.fail.unlink()
    assert rig.run() == (["b", "(continued)", "c"], ["a"])


def test_what_a_failed_stage_left_is_not_continued_under_another_input(rig):
    rig.fail.write_text("b")
    with pytest.raises(StageError):
        rig.run()
    rig.fail.unlink()
    rig.other.write_text("2")
    assert rig.run() == (["b", "c"], ["a"])


def test_from_runs_up_to_date_stages_again(rig):
    rig.run()
    assert rig.run(start="b") == (["b", "c"], ["a"])


def test_only_runs_one_stage_and_outdates_what_was_made_from_it(rig):
    with pytest.raises(StageError, match="Stage b needs the output of stage a, which has not run"):
        rig.run(only="b")
    rig.run()
    assert rig.run(only="b") == (["b"], [])
    assert rig.run() == (["c"], ["a", "b"])


def test_a_stage_that_writes_nothing_is_reported(rig):
    stage = Stage("quiet", "", [sys.executable, "-c", ""], outputs=[rig.folder / "absent"])
    with pytest.raises(StageError, match="ended without error but did not write"):
        Pipeline(rig.folder, [stage], Console(file=io.StringIO()), rig.folder).run()


def test_shared_outputs_are_never_deleted(rig):
    out = rig.folder / "kept"
    out.write_text("from another pipeline")
    stage = Stage("a", "", [sys.executable, "-c", ""], outputs=[out], shared=True)
    Pipeline(rig.folder, [stage], Console(file=io.StringIO()), rig.folder).run()
    assert out.read_text() == "from another pipeline"


def test_the_summary_names_every_stage(rig):
    text = io.StringIO()
    stages = [rig.stage("a", rig.source)]
    print_outcomes(Pipeline(rig.folder, stages, Console(file=io.StringIO()), rig.folder).run(), Console(file=text, width=80))
    assert "a" in text.getvalue()
    assert "total" in text.getvalue()
    assert (clock(5.4), clock(83.4)) == ("5 s", "1 min 23 s")
