"""The results file: continues what was measured under the same settings, refuses what was not, and is fit for publication."""

import json
from pathlib import Path

import pytest

from eval.results import Load, ResultsError, ResultsFile, command_without_paths, comparable, fingerprint, read_results, spec_settings
from eval.servers import ServerSpec
from eval.stats import AnswerRow, Block

PLAIN = ServerSpec(Path("target"))
EAGLE3 = ServerSpec(Path("target"), Path("head"), "EAGLE3", nodes=16, width=4, steps=4)
WIDE_EAGLE3 = ServerSpec(Path("target"), Path("head"), "EAGLE3", nodes=60, width=10, steps=8)
TALON = ServerSpec(Path("target"), Path("head"), "TALON", nodes=16, width=4)
SETTINGS = {"dtype": "float32", "max_new_tokens": 4}


ONE, FOUR = Load(1), Load(4, 0.5)
BAD_LOAD = {"concurrency": 1, "temperature": 0, "runs": {"plain": {"a": [{}]}}}


def measured(latency_s, rounds=0, prompt="p", session=1):
    counters = {"draft_forwards": 2.0 * rounds, "rounds": rounds} if rounds else None
    return Block(session, latency_s, counters, [AnswerRow(prompt, 4, rounds, latency_s, [1, 2, 3, 4])])


def test_a_second_file_continues_the_first(tmp_path):
    path = tmp_path / "results.json"
    first = ResultsFile(path, SETTINGS, "command")
    first.add(ONE, PLAIN, "chat", measured(2.0))
    first.add(ONE, TALON, "chat", measured(1.0, rounds=2, session=3))
    first.add(FOUR, TALON, "chat", measured(1.0, rounds=2))
    first.save()
    second = ResultsFile(path, SETTINGS, "another command")
    assert [second.finished(load, TALON.name, name) for load in (ONE, FOUR) for name in ("chat", "code")] == [1, 0, 1, 0]
    assert second.loads == first.loads
    assert second.sessions == 3
    assert second.body()["loads"] == json.loads(path.read_text())["loads"] == first.body()["loads"]
    assert second.body()["commands"] == ["command", "another command"]
    assert second.body()["loads"]["c=1 T=0"]["summary"]["TALON N=16 K=4"]["all"]["faster_than_plain"]["value"] == pytest.approx(2.0)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_cut_off_before_its_summary_is_read_with_one(tmp_path):
    results = ResultsFile(tmp_path / "r.json", SETTINGS, "command")
    results.add(ONE, PLAIN, "chat", measured(2.0))
    results.save(with_summary=False)
    assert json.loads((tmp_path / "r.json").read_text())["loads"]["c=1 T=0"]["summary"] == {}
    results.save()
    whole = json.loads((tmp_path / "r.json").read_text())
    results.save(with_summary=False)
    assert read_results(tmp_path / "r.json") == whole


def test_other_settings_are_refused_by_name(tmp_path):
    results = ResultsFile(tmp_path / "r.json", SETTINGS, "command")
    results.add(ONE, PLAIN, "chat", measured(1.0))
    results.save()
    with pytest.raises(ResultsError, match=r"max_new_tokens = 4, this call has 8; choose another --out, or pass --fresh"):
        ResultsFile(tmp_path / "r.json", {**SETTINGS, "max_new_tokens": 8}, "command")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"settings": {}, "specs": {}, "commands": [], "loads": {"c=1 T=0": BAD_LOAD}}),
    ],
)
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ResultsError, match="is not a results file"):
        ResultsFile(tmp_path / "r.json", {}, "command")
    with pytest.raises(ResultsError, match="is not a results file"):
        read_results(tmp_path / "r.json")


def test_talon_is_held_against_eagle3_of_the_same_verify_width():
    specs = {spec.name: spec_settings(spec) for spec in (PLAIN, EAGLE3, WIDE_EAGLE3, TALON)}
    assert comparable(TALON.name, specs, specs) == [EAGLE3.name]
    assert comparable(EAGLE3.name, specs, specs) == comparable(PLAIN.name, specs, specs) == []
    measured_here = [name for name in specs if name != EAGLE3.name]
    assert comparable(TALON.name, specs, measured_here) == [WIDE_EAGLE3.name]


def test_figures_over_all_sets_of_a_half_finished_comparison(tmp_path):
    results = ResultsFile(tmp_path / "r.json", SETTINGS, "command")
    for name in ("chat", "code"):
        results.add(ONE, PLAIN, name, measured(2.0))
    results.add(ONE, EAGLE3, "chat", measured(1.0, rounds=2))
    results.add(ONE, TALON, "chat", measured(0.5, rounds=2))
    results.add(ONE, TALON, "code", measured(0.5, rounds=2))
    figure = results.body()["loads"]["c=1 T=0"]["summary"][TALON.name]
    assert figure["all"]["faster_than_eagle3"][EAGLE3.name] == {"value": 2.0, "low": 2.0, "high": 2.0, "count": 1, "in_turn": True}
    assert "faster_than_eagle3" not in figure["code"]


def test_a_command_line_loses_its_absolute_paths():
    words = ["eval/serve.py", "--target", "/some/where/target", "--prompts", "prompts/chat.jsonl", "--limit", "4"]
    assert command_without_paths(words) == "eval/serve.py --target target --prompts prompts/chat.jsonl --limit 4"


def test_the_fingerprint_sees_weights_and_config_but_not_the_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3 << 20))
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").write_bytes(bytes((3 << 20) - 1) + b"\1")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")
