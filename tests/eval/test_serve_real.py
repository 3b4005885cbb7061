"""eval/serve.py with real SGLang servers: its figures are consistent with each other and with the trace."""

import json
import subprocess
import sys

import pytest

from eval.trace import deepest_and_widest, read_trace

pytestmark = pytest.mark.slow
PROMPTS = ["Name three colours.", "What is the capital of France?"]


@pytest.fixture(scope="module")
def measured(repo_root, shared_dir, target_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    head = shared_dir / "heads" / "smollm2-135m-eagle3-8k"
    command = [sys.executable, "eval/serve.py", "--target", target_dir, "--head", head, "--prompts", folder / "prompts.txt"]
    command += ["--dtype", "float32", "--max-new-tokens", "24", "--trace", folder / "trace.jsonl", "--out", folder / "results.json"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
    return json.loads((folder / "results.json").read_text()), read_trace(folder / "trace.jsonl"), done.stdout


def test_greedy_output_in_fp32_is_that_of_plain_decoding(measured):
    body, _, _ = measured
    assert {run: figure["all"]["same_as_plain"] for run, figure in body["summary"].items() if run != "plain"} == {
        "EAGLE3 N=16 K=4 D=4": 1.0,
        "TALON N=16 K=4": 1.0,
    }


def test_the_servers_counters_agree_with_its_answers_and_its_trace(measured):
    body, rounds, _ = measured
    (one,) = body["runs"]["TALON N=16 K=4"].values()
    assert one["draft_rounds"] == sum(answer["rounds"] for answer in one["answers"]) == len(rounds)
    assert one["draft_forwards"] == sum(round_.depth for round_ in rounds)
    generated = [sum(len(round_.accepted) for round_ in rounds if round_.rid == rid) for rid in dict.fromkeys(r.rid for r in rounds)]
    # Every token but the first comes out of a round; the last round may have accepted more than was asked for.
    for answer, count in zip(one["answers"], generated, strict=True):
        assert answer["tokens"] - 1 <= count


def test_trees_keep_to_their_budget(measured):
    _, rounds, _ = measured
    assert {len(round_.tokens) for round_ in rounds} == {16}
    assert all(round_.widths[0] == 4 for round_ in rounds)
    deepest, widest = deepest_and_widest(rounds)
    assert deepest.depth >= widest.depth


def test_the_table_shows_all_three(measured):
    _, _, printed = measured
    for run in ("plain", "EAGLE3 N=16 K=4 D=4", "TALON N=16 K=4"):
        assert run in printed
