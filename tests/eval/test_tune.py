"""The choice of settings, on made-up measurements whose best answer is plain."""

import json
from argparse import Namespace

import pytest

from eval.cost_model import PARTS
from eval.policies import Chain, Eagle, LaneTalon, OptTree, Talon, TalonLayers
from eval.policies.served import served_as
from eval.tune import launch_command, main

ARGS = Namespace(target="T", head="H")


def figure(emitted: float, lanes: list[float]) -> dict:
    return {"emitted": emitted, "lanes": lanes, "forwarded": [1.0] * len(lanes), "accepts": [0.6, 0.3]}


@pytest.fixture
def files(tmp_path):
    """Verifying costs 10 ms and 0.5 ms a node, a plain step 10 ms whatever the batch: trees pay for few sequences, and not for many."""
    lines = {part: {"fixed": 0.0, "slope": 0.0} for part in PARTS}
    lines |= {"plain": {"fixed": 10.0, "slope": 0.0}, "verify": {"fixed": 10.0, "slope": 0.5}, "draft": {"fixed": 1.0, "slope": 0.0}}
    settings = {name: {"name": name, "fingerprint": name} for name in ("target", "head")}
    summary = {
        "talon:8,2,10,0.03": {"all": figure(1.8, [2.0])},
        "talon:60,10,10,0.03": {"all": figure(2.5, [10.0, 20.0]), "code": figure(9.0, [10.0])},
        "sglang-eagle3:4,4,16": {"all": figure(2.0, [4.0, 4.0, 4.0])},
        "opt-tree:16,0.5,10": {"all": figure(50.0, [15.0])},  # cannot be served, however good
    }
    accept, cost = tmp_path / "accept.json", tmp_path / "cost.json"
    accept.write_text(json.dumps({"settings": settings, "summary": summary}))
    cost.write_text(json.dumps({"settings": settings, "lines": lines}))
    return accept, cost


def tuned(files, capsys, *words) -> str:
    accept, cost = files
    assert main(["--accept", str(accept), "--cost", str(cost), *words]) == 0
    return capsys.readouterr().out


def test_a_small_tree_wins_at_batch_1(files, capsys):
    printed = tuned(files, capsys, "--batch", "1")
    # 1.8 tokens in 10 + 4 + 1 ms against 1 in 10
    assert "Best: talon:8,2,10,0.03, 1.20 times plain decoding" in printed
    assert "--speculative-algorithm TALON" in printed and "--speculative-num-draft-tokens 8" in printed


def test_plain_decoding_wins_a_full_batch(files, capsys):
    printed = tuned(files, capsys, "--batch", "16")
    assert "Plain decoding is the fastest" in printed
    assert "--speculative" not in printed


def test_a_rate_is_served_by_the_smallest_batch_that_carries_it(files, capsys):
    # 150 tokens/s: plain needs 2 sequences (100 each), talon:8 needs 2 (1.8 tokens in 10 + 8 + 1 ms for each of two)
    printed = tuned(files, capsys, "--rate", "1.5", "--tokens", "100")
    assert "predicted, 150 tokens/s" in printed and "Plain decoding is the fastest" in printed
    row = next(line.split() for line in printed.splitlines() if "talon:8,2" in line and "tokens" not in line and "--" not in line)
    assert row[1] == "2" and float(row[2]) == pytest.approx(2 * 1.8 / 0.019, abs=0.1)
    # Beyond what trees can reach, only plain decoding is left.
    assert tuned(files, capsys, "--rate", "100", "--tokens", "100").count("talon:") == 0


def test_a_rate_that_nothing_carries_is_said(files, capsys):
    accept, cost = files
    assert main(["--accept", str(accept), "--cost", str(cost), "--rate", "10000"]) == 1
    assert "nothing that was measured carries" in capsys.readouterr().out


def test_the_confirmation_runs_the_best_and_its_neighbours(files, capsys):
    printed = tuned(files, capsys, "--batch", "4")
    command = next(line for line in printed.splitlines() if line.startswith("python eval/serve.py"))
    assert "--talon 8,2,10,0.03 --talon 60,10,10,0.03 --eagle3 4,4,16 --concurrency 4" in command


def test_a_prompt_set_can_decide(files, capsys):
    assert "Best: talon:60,10" in tuned(files, capsys, "--set", "code")


@pytest.mark.parametrize("policy", [Talon(16, 4, 0, 0.1), Chain(3), Eagle(4, 4, 16, approximate=True)])
def test_the_printed_command_says_all_settings(policy):
    words = launch_command(policy, ARGS).split()
    flags = dict(zip(words, words[1:]))
    assert int(flags["--speculative-num-draft-tokens"]) == served_as(policy).nodes
    assert flags["--speculative-algorithm"] == ("TALON" if isinstance(policy, Talon) else "EAGLE3")
    assert ("--talon-gate" in flags) == isinstance(policy, Talon)
    assert flags["--speculative-num-steps"] == {"talon:16,4,0,0.1": "0", "chain:3": "3", "sglang-eagle3:4,4,16": "4"}[policy.name]


@pytest.mark.parametrize("policy", [OptTree(16), Eagle(4, 4, 16), LaneTalon(16, 4), TalonLayers(16, 4, 2)])
def test_offline_policies_are_not_offered(policy):
    assert served_as(policy) is None


def test_files_of_different_heads_are_refused(files, capsys):
    accept, cost = files
    body = json.loads(cost.read_text())
    body["settings"]["head"]["fingerprint"] = "another"
    cost.write_text(json.dumps(body))
    assert main(["--accept", str(accept), "--cost", str(cost)]) == 1
    assert "different heads" in capsys.readouterr().out


def test_an_unknown_set_names_those_there_are(files, capsys):
    accept, cost = files
    assert main(["--accept", str(accept), "--cost", str(cost), "--set", "poems"]) == 1
    assert "all, code" in capsys.readouterr().out.replace("\n", " ")


def test_one_server_for_several_loads_gets_a_batch_budget(files, capsys):
    accept, cost = files
    body = json.loads(accept.read_text())
    body["summary"]["talon:4,2,10,0.03"] = {"all": figure(1.5, [1.0])}
    accept.write_text(json.dumps(body))
    printed = tuned(files, capsys, "--batch", "1", "2", "16")
    # batch 1: 1.8 tokens in 10 + 4 + 1 ms; batch 2: four nodes each, 1.5 in 10 + 4 + 1; batch 16: the root alone, 1 in 10 + 8
    line = next(line for line in " ".join(printed.split()).split("One server")[1:])
    assert "talon:8,2,10,0.03 with a batch budget of 8, 1.20 at batch 1, 1.00 at batch 2, 0.56 at batch 16 times plain" in line
    assert "--talon-batch-budget 8" in line


def test_a_budget_whose_trees_were_not_measured_is_not_advised(files, capsys):
    printed = " ".join(tuned(files, capsys, "--batch", "1", "2").split())
    # a budget of 8 would give two sequences talon:4,2; one of 16 changes nothing, so none is named
    assert "One server for all of these loads: talon:8,2,10,0.03 without a batch budget" in printed
