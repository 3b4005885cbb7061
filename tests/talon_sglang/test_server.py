"""TALON with a trained head on SmolLM2 in the real server, fp32: lossless, exact draft attention, radix hits, concurrency."""

import json
import math

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
from eval.client import ChatTokenizer, Client  # noqa: E402
from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import FORKING  # noqa: E402
from train.reference import ReferenceHead  # noqa: E402
from train.target import FrozenTarget  # noqa: E402

pytestmark = pytest.mark.slow
SETS = ("mt_bench", "gsm8k", "humaneval", "alpaca", "qa", "cnn_dm")
LENGTH = 40


@pytest.fixture(scope="module")
def head(shared_dir):
    return shared_dir / "heads" / "smollm2-135m-eagle3-8k"


@pytest.fixture(scope="module")
def tokenizer(target_dir):
    return ChatTokenizer(target_dir)


@pytest.fixture(scope="module")
def prompts(shared_dir, tokenizer):
    """Two prompts of each of the six sets."""
    chosen = []
    for name in SETS:
        rows = [json.loads(line) for line in (shared_dir / "data" / "eval" / f"{name}.jsonl").read_text().splitlines()]
        chosen += [tokenizer.encode(row["turns"][:1]) for row in rows[:2]]
    return chosen


SHARED_PREFIX = "You are a careful assistant who answers briefly and always gives one example. " * 6
QUESTIONS = (
    "What is a river?",
    "What is a mountain?",
    "Name three birds.",
    "Count to five.",
    "What is salt?",
    "Why is the sky blue?",
)


@pytest.fixture(scope="module")
def shared_prefix_prompts(tokenizer):
    return [tokenizer.encode([SHARED_PREFIX + question]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(target_dir, prompts, shared_prefix_prompts):
    """The same server without speculation."""
    with serve(ServerSpec(target_dir, threads=1, launcher=FORKING)) as server, Client(server.url) as client:
        return [a.output_ids for a in client.generate_all(prompts + shared_prefix_prompts, LENGTH, concurrency=4)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("talon") / "trace.jsonl"


@pytest.fixture(scope="module")
def talon(target_dir, head, trace):
    with serve(ServerSpec(target_dir, head, "TALON", nodes=16, width=4, trace=trace, threads=1)) as server, Client(server.url) as client:
        yield client


def test_greedy_output_equals_plain_decoding(talon, prompts, plain):
    answers = list(talon.generate_all(prompts, LENGTH))
    assert [a.output_ids for a in answers] == plain[: len(prompts)]
    assert sum(a.tokens for a in answers) / sum(a.rounds for a in answers) > 1.6  # a simulation of this head gave 2.05


def test_concurrent_requests_with_a_shared_prefix_equal_one_at_a_time(talon, shared_prefix_prompts, plain, prompts):
    one_at_a_time = list(talon.generate_all(shared_prefix_prompts, LENGTH))
    together = list(talon.generate_all(shared_prefix_prompts, LENGTH, concurrency=6))
    assert [a.output_ids for a in together] == [a.output_ids for a in one_at_a_time] == plain[len(prompts) :]
    shared = len(shared_prefix_prompts[0]) // 2
    assert all(a.meta["cached_tokens"] > shared for a in one_at_a_time[1:] + together)


def path_to(node: int, parents: list[int]) -> list[int]:
    """Node indices from the root's child to `node`."""
    path = []
    while node > 0:
        path.insert(0, node)
        node = parents[node]
    return path


def test_the_draft_distribution_of_every_node_is_that_of_a_fresh_chain_over_its_path(talon, trace, prompts, head, target_dir):
    """Each drafted child's conditional log-probability against train/reference.py, which knows no cache, no tree and no batch."""
    asked = [prompts[0], prompts[5], prompts[9]]
    done = len(trace.read_text().splitlines())
    answers = list(talon.generate_all(asked, 24, concurrency=3))
    rows = [json.loads(line) for line in trace.read_text().splitlines()[done:]]
    target, reference = FrozenTarget.load(target_dir, torch.float32), ReferenceHead.from_dirs(head, target_dir)
    draft_id = {int(t): i for i, t in enumerate(reference.draft_ids_Vd)}
    committed = {tuple(ids): ids + a.output_ids for ids, a in zip(asked, answers)}
    by_request: dict[str, list] = {}
    for row in rows:
        by_request.setdefault(row["rid"], []).append(row)
    assert len(by_request) == 3
    compared, worst = 0, 0.0
    for rounds in by_request.values():
        ids = next(
            full
            for prompt, full in committed.items()
            if rounds[0]["seq_len"] == len(prompt) and rounds[0]["tokens"][0] == full[len(prompt)]
        )
        features_TF, _ = target.hidden(torch.tensor([ids]))
        for row in rounds[:4]:
            n = row["seq_len"]
            assert row["tokens"][0] == ids[n]
            for leaf in set(range(len(row["tokens"]))) - set(row["parents"]):
                path = path_to(leaf, row["parents"])
                log_probs = reference.chain_log_probs(features_TF[0, :n], ids[: n + 1], [row["tokens"][v] for v in path[:-1]])
                for depth, node in enumerate(path):
                    conditional = row["log_probs"][node] - row["log_probs"][row["parents"][node]]
                    expected = float(log_probs[depth, draft_id[row["tokens"][node]]])
                    worst, compared = max(worst, abs(conditional - expected)), compared + 1
    assert compared > 200 and worst < 1e-3, (compared, worst)
    print(f"{compared} comparisons, largest difference {worst:.2e}")


def test_the_trace_agrees_with_the_answers(talon, trace, prompts):
    done = len(trace.read_text().splitlines())
    (got,) = talon.generate_all(prompts[6:7], LENGTH)
    rows = [json.loads(line) for line in trace.read_text().splitlines()[done:]]
    assert len(rows) == got.rounds and [row["round"] for row in rows] == list(range(len(rows)))
    told = [rows[0]["tokens"][0]]
    for row in rows:
        assert row["tokens"][0] == told[-1] and row["accepted"][0] == 0 and not row["degraded"]
        assert all(row["parents"][b] == a for a, b in zip(row["accepted"], row["accepted"][1:]))
        assert len(row["tokens"]) == 16 and math.isclose(row["log_probs"][0], 0.0)
        told += [row["tokens"][v] for v in row["accepted"][1:]] + [row["bonus"]]
    assert told[: got.tokens] == got.output_ids
