"""--talon-batch-budget: trees shrink as requests come, down to plain decoding, and grow again as they end. Answers never change, and a
draft that has caught up drafts what it would have drafted anyway.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
from eval.client import ChatTokenizer, Client  # noqa: E402
from eval.servers import ServerSpec, serve  # noqa: E402
from talon_sglang.catch_up import MOST_TOKENS, forget, postpone, postponed  # noqa: E402
from talon_sglang.settings import BATCH_BUDGET_ENV, TalonError, TalonSettings, batch_budget  # noqa: E402
from talon_sglang.tree import TreeConfig  # noqa: E402
from tests.toy import FORKING, GROUPS, answer  # noqa: E402


def test_equal_shares_at_least_the_root_and_at_most_the_tree():
    settings = TalonSettings(TreeConfig(16, 4), batch_budget=24)
    sizes = {requests: settings.tree_for(requests) for requests in (1, 2, 3, 5, 6, 12, 24, 100)}
    assert {r: (tree.node_budget, tree.first_layer_width) for r, tree in sizes.items()} == {
        1: (16, 4),
        2: (12, 3),
        3: (8, 2),
        5: (4, 2),
        6: (4, 2),
        12: (2, 1),
        24: (1, 1),
        100: (1, 1),
    }
    for requests, tree in sizes.items():
        assert requests * tree.node_budget <= 24 or tree.node_budget == 1
    assert TalonSettings(TreeConfig(16, 4)).tree_for(1000) == TreeConfig(16, 4)


@pytest.mark.parametrize("text", ["-1", "many", "1.5"])
def test_a_bad_budget_names_itself(monkeypatch, text):
    monkeypatch.setenv(BATCH_BUDGET_ENV, text)
    with pytest.raises(TalonError, match=rf"--talon-batch-budget \(or TALON_BATCH_BUDGET\) is {text}: it must be a whole number"):
        batch_budget()


def test_only_the_end_of_a_long_stretch_is_kept():
    class Req:
        pass

    request = Req()
    assert postponed(request) is None
    for number in range(MOST_TOKENS + 3):
        postpone([request], torch.full((1, 2), float(number)))
    assert postponed(request).shape == (MOST_TOKENS, 2) and postponed(request)[0, 0] == 3
    forget([request])
    assert postponed(request) is None


def together(server, jobs: list[tuple[list[int], int]]) -> list[list[int]]:
    """The answers to (prompt, length) jobs that reach the scheduler in one moment."""

    def ask(job):
        body = {"input_ids": job[0], "sampling_params": {"temperature": 0, "max_new_tokens": job[1], "ignore_eos": True}}
        return http.post("/generate", json=body).json()["output_ids"]

    with httpx.Client(base_url=server.url, timeout=300, trust_env=False) as http, ThreadPoolExecutor(len(jobs)) as pool:
        http.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
        answers = [pool.submit(ask, job) for job in jobs]
        time.sleep(2)  # the server holds them
        http.post("/continue_generation", json={}).raise_for_status()
        return [answer.result() for answer in answers]


def budget(nodes: int) -> tuple[str, ...]:
    return ("--talon-batch-budget", str(nodes))


@pytest.mark.slow
def test_trees_shrink_with_many_requests_and_grow_again(toy, tmp_path):
    trace = tmp_path / "trace.jsonl"
    spec = ServerSpec(
        *toy,
        "TALON",
        nodes=16,
        width=4,
        steps=0,
        trace=trace,
        threads=1,
        max_running_requests=16,
        extra=("--skip-tokenizer-init", *budget(16)),
        launcher=FORKING,
    )
    tokens = [*GROUPS["sure"], *GROUPS["broken"]]
    lengths = [150, *range(5, 20)]  # the last one is alone for most of its time
    with serve(spec) as server:
        jobs = [([1, 2, 3, tokens[2 * i]], length) for i, length in enumerate(lengths)]
        for (ids, length), got in zip(jobs, together(server, jobs)):
            assert got == answer(ids[-1], length)
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    longest = max({row["rid"] for row in rows}, key=lambda rid: max(row["seq_len"] for row in rows if row["rid"] == rid))
    sizes = [len(row["tokens"]) for row in rows if row["rid"] == longest]
    assert sizes[0] == 1 and sizes[-1] == 16 and {2, 4} & set(sizes) and sizes == sorted(sizes)
    after_plain = [row for row in rows if row["rid"] == longest and len(row["tokens"]) == 16]
    assert all(len(row["accepted"]) == len(set(row["depths"])) for row in after_plain[:-1])  # the caught-up draft is right at every depth


@pytest.mark.slow
def test_a_draft_that_has_caught_up_drafts_the_same_trees(target_dir, shared_dir, tmp_path):
    """The trees of a request after a stretch of plain rounds are those of the same request alone, wherever both have one."""
    head, encode = shared_dir / "heads" / "smollm2-135m-eagle3-8k", ChatTokenizer(target_dir).encode
    questions = ("Why is the sky blue?", "Name three birds.", "What is salt?", "Count to five.")
    trace = tmp_path / "trace.jsonl"
    spec = ServerSpec(
        target_dir, head, "TALON", nodes=8, width=2, trace=trace, threads=1, extra=(*budget(8), "--disable-radix-cache"), launcher=FORKING
    )
    with serve(spec) as server, Client(server.url) as client:
        jobs = [(encode([question]), 60 if i == 0 else 15) for i, question in enumerate(questions * 2)]
        crowded = together(server, jobs)
        crowded_rows = [json.loads(line) for line in trace.read_text().splitlines()]
        alone = client.generate(jobs[0][0], 60, ignore_eos=True).output_ids
    alone_rows = [json.loads(line) for line in trace.read_text().splitlines()[len(crowded_rows) :]]
    assert crowded[0] == alone
    longest = max(crowded_rows, key=lambda row: row["seq_len"])["rid"]
    mine = {row["seq_len"]: row for row in crowded_rows if row["rid"] == longest and len(row["tokens"]) == 8}
    assert any(len(row["tokens"]) == 1 for row in crowded_rows if row["rid"] == longest)
    both = [(mine[row["seq_len"]], row) for row in alone_rows if row["seq_len"] in mine]
    assert len(both) >= 5
    for one, other in both:
        assert one["tokens"] == other["tokens"] and one["parents"] == other["parents"]
        assert one["log_probs"] == pytest.approx(other["log_probs"], abs=2e-3)
