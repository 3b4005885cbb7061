"""eval/ablate.py: the grid, paired differences, and the command as a whole on toy models."""

import json
import random

import pytest
import torch

from eval import ablate
from eval.ablate_tables import table_json, times_plain
from eval.ablations import ABLATIONS, Ablation, Row
from eval.accept import Models
from eval.accept_file import AcceptFile
from eval.cost_model import PARTS, CostModel, Line
from eval.policies import parse_policy
from eval.rounds import Tally, acceptance, paired_difference, ratio_error
from tests.train.toy import VOCAB, toy_head, toy_target

PROMPTS = {"one": [("a", [5, 9, 3, 7]), ("b", [4, 4, 8])], "two": [("c", [10, 3]), ("d", [12, 6, 3])]}
LAYERS = [Row(f"talon-layers:8,3,{k}", "toy", k, "talon-layers:8,3,1") for k in range(3)]
TOY = {
    "layers": Ablation("layers", "Layers?", "layers", tuple(LAYERS)),
    "versus": Ablation("versus", "Which?", "policy", (Row("talon:8,3", "t", "t", "chain:3"), Row("chain:3", "c", "c", "chain:3"))),
}


@pytest.mark.parametrize("ablation", ABLATIONS.values(), ids=list(ABLATIONS))
def test_every_row_of_the_grid_can_be_measured_against_its_base(ablation):
    names = [parse_policy(row.policy).name for row in ablation.rows]
    assert len(set(names)) == len(names)
    assert {parse_policy(row.base).name for row in ablation.rows} <= set(names)
    places = [(row.series, row.value) for row in ablation.rows]
    assert len(set(places)) == len(places)


def test_the_grid_covers_what_the_paper_varies():
    values = {name: {row.value for row in one.rows} for name, one in ABLATIONS.items()}
    assert {0.001, 0.03, 0.3} <= values["gate"] and {8, 60, 96} <= values["budget"] and values["layers"] == {0, 1, 2, 3}
    assert {"2", "10", "none"} <= values["cap"]


def tally(tokens: float, rounds: int) -> Tally:
    return Tally(rounds=rounds, emitted=tokens - 1)


def test_the_error_of_a_paired_difference_matches_repeated_draws():
    """Prompts differ a lot, the two policies on one prompt little."""
    rng = random.Random(0)

    def sample():
        pairs = []
        for _ in range(60):
            ease, rounds = rng.uniform(1.2, 3.5), (rng.randrange(12, 30), rng.randrange(12, 30))
            pairs.append([tally(ease * count * (1.1 if i else 1.0) + rng.gauss(0, 1), count) for i, count in enumerate(rounds)])
        return [list(side) for side in zip(*pairs)]

    found = [paired_difference(*sample()) for _ in range(500)]
    mean = sum(value for value, _ in found) / len(found)
    spread = (sum((value - mean) ** 2 for value, _ in found) / (len(found) - 1)) ** 0.5
    assert sum(error for _, error in found) / len(found) == pytest.approx(spread, rel=0.1)
    ours, theirs = sample()
    alone = [ratio_error([1 + t.emitted for t in side], [t.rounds for t in side]) for side in (ours, theirs)]
    assert paired_difference(ours, theirs)[1] < 0.7 * (alone[0] ** 2 + alone[1] ** 2) ** 0.5


def test_a_policy_does_not_differ_from_itself():
    side = [tally(20, 9), tally(30, 11)]
    assert paired_difference(side, side) == (0.0, 0.0)
    assert paired_difference(side[:1], side[1:]) == (pytest.approx(20 / 9 - 30 / 11), None)


def test_predicted_speed_is_that_of_tune():
    costs = CostModel({part: Line(10.0, 0.0) if part == "plain" else Line(2.0, 0.1) for part in PARTS})
    figure = {"emitted": 2.0, "lanes": [4.0], "forwarded": [1.0], "accepts": [0.6]}
    # plain: 10 + 2.1 ms; a round: draft 2 + 0.4, verify 2 + 1.6, extend of 1.6 rows 2 + 0.16, overhead 2.1
    assert times_plain(costs, parse_policy("talon:16,4"), figure) == pytest.approx(2 * 12.1 / (2.4 + 3.6 + 2.16 + 2.1))
    assert times_plain(costs, parse_policy("opt-tree:16"), figure) is None


@pytest.fixture
def command(monkeypatch, tmp_path):
    target, ids = toy_target(), torch.arange(VOCAB)
    models = Models(target, toy_head(target, ids), ids, {2})
    monkeypatch.setattr(ablate, "ABLATIONS", TOY)
    monkeypatch.setattr(ablate, "check_folders", lambda args: None)
    monkeypatch.setattr(ablate, "check_draft_head", lambda head, target: None)
    monkeypatch.setattr(ablate, "load_sets", lambda args: PROMPTS)
    monkeypatch.setattr("eval.accept.load_models", lambda args: models)
    monkeypatch.setattr("eval.accept.fingerprint", lambda folder: folder.name)

    def run(*words):
        return ablate.main(["--target", "t", "--head", "h", "--prompts", "p", "--max-new-tokens", "10", "--out", str(tmp_path), *words])

    return run, tmp_path


def test_tables_and_pictures(command, capsys, monkeypatch):
    run, folder = command
    assert run() == 0
    text = (folder / "tables.md").read_text()
    assert text in capsys.readouterr().out
    body, whole = (json.loads((folder / name).read_text()) for name in ("tables.json", "accept.json"))
    for name, ablation in TOY.items():
        rows = body["ablations"][name]
        assert [row["policy"] for row in rows] == [parse_policy(row.policy).name for row in ablation.rows]
        (base,) = [row for row in rows if row["difference"] is None]
        for row in rows:
            assert row["accept"] == pytest.approx(whole["summary"][row["policy"]]["all"]["accept_length"])
            assert f"{row['accept']:.3f}" in text
            assert row["difference"] is None or row["difference"] == pytest.approx(row["accept"] - base["accept"])
            for set_name, found in row["by_set"].items():
                tallies = whole["tallies"][row["policy"]][set_name].values()
                assert found[0] == pytest.approx(acceptance(Tally.from_json(one) for one in tallies).accept_length)
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(folder.glob("*.tmp"))

    monkeypatch.setattr("eval.accept.load_models", None)  # would fail
    assert run("--only", "layers") == 0
    assert "Which?" not in (folder / "tables.md").read_text()


def test_a_stopped_grid_keeps_what_it_has(command, monkeypatch, capsys):
    run, folder = command
    calls = []

    def stop_at_the_third(*args, tallies=ablate.measure.__globals__["tallies"]):
        calls.append(args[3].name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return tallies(*args)

    monkeypatch.setattr("eval.accept.tallies", stop_at_the_third)
    assert run() == 1
    assert "the same command continues from there" in capsys.readouterr().out.replace("\n", " ")
    assert len(json.loads((folder / "accept.json").read_text())["tallies"]) == 2
    assert "Layers?" not in (folder / "tables.md").read_text()  # one of its policies has no prompt yet
    assert run() == 0
    assert calls[3:] == [*dict.fromkeys(calls[2:])]  # the two that were done are not measured again


def test_tables_of_a_stopped_grid_are_over_the_prompts_that_all_have(command):
    run, folder = command
    assert run() == 0
    body = json.loads((folder / "accept.json").read_text())
    del body["tallies"]["talon-layers:8,3,2,10,0.03"]["two"]["d"]
    (folder / "accept.json").write_text(json.dumps(body))
    rows = table_json(TOY["layers"], AcceptFile.read(folder / "accept.json"), None)
    for row in rows:
        assert row.prompts == 3 and set(row.by_set) == {"one", "two"}
        tallies = [one for rows in body["tallies"][row.policy].values() for prompt, one in rows.items() if prompt != "d"]
        assert row.accept == pytest.approx(acceptance(map(Tally.from_json, tallies)).accept_length)


def test_an_unknown_cost_file_is_one_sentence(command, capsys, tmp_path):
    run, _ = command
    (tmp_path / "cost.json").write_text("{}")
    assert run("--cost", str(tmp_path / "cost.json")) == 1
    assert "is not a file of eval/cost.py" in capsys.readouterr().out.replace("\n", " ")
