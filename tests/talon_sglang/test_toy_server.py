"""The tree adapts, request by request in one batch, and stays lossless: the real server with a toy whose behaviour is known on paper
(tests/toy.py).
"""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("sglang", reason="needs SGLang")
from eval.client import Client  # noqa: E402
from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import GROUPS, VOCAB, answer, transitions, write_toy  # noqa: E402

pytestmark = pytest.mark.slow
N, K, LENGTH = 16, 4, 60


def run(toy, trace, steps):
    """One batch of two requests of each group; returns {group: accept length}, {group: Counter of layer widths}, counters. Checks every
    answer.
    """
    spec = ServerSpec(*toy, algorithm="TALON", nodes=N, width=K, steps=steps, trace=trace, extra=("--skip-tokenizer-init",))
    lasts = {group: (tokens[0], tokens[5]) for group, tokens in GROUPS.items()}
    with serve(spec) as server, Client(server.url) as client, ThreadPoolExecutor(6) as pool:
        flat = [(group, last) for group, pair in lasts.items() for last in pair]
        answers = list(pool.map(lambda item: client.generate([1, 2, 3, item[1]], LENGTH), flat))
        counters = client.counters()
    for (_, last), got in zip(flat, answers):
        assert got.output_ids == answer(last, LENGTH)
    accept = {group: max(a.tokens / a.rounds for (g, _), a in zip(flat, answers) if g == group) for group in GROUPS}
    shapes = {group: Counter() for group in GROUPS}
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    for row in rows:
        group = next(name for name, tokens in GROUPS.items() if row["tokens"][0] in tokens)
        depths = Counter(row["depths"])
        shapes[group][tuple(depths[d] for d in range(1, max(depths) + 1))] += 1
        assert row["degraded"] == (group == "broken")
    assert counters["talon:rounds_total"] == len(rows)
    assert counters["talon:degraded_rounds_total"] == sum(shapes["broken"].values())
    # Draft forwards follow the layers drafted: the sum of depths, and one failed extend for each degraded round.
    assert counters["talon:draft_forwards_total"] == sum(max(len(w), 1) * c for s in shapes.values() for w, c in s.items())
    return accept, shapes


@pytest.mark.parametrize("steps, depth", [(0, N - K), (6, 6)])
def test_deep_where_the_draft_is_sure_wide_where_not_plain_where_it_fails(toy, tmp_path, steps, depth):
    accept, shapes = run(toy, tmp_path / "trace.jsonl", steps)
    assert shapes["sure"] == {(K, *[1] * (depth - 1)): shapes["sure"].total()}
    assert shapes["hopeless"] == {(K, N - 1 - K): shapes["hopeless"].total()}  # the budget is spent in two layers
    assert shapes["broken"] == {(): shapes["broken"].total()}  # the root alone
    assert accept["sure"] > depth * 0.9  # every drafted step is right; the first token comes from prefill
    assert accept["broken"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("n, k, steps", [(2, 1, 1), (5, 4, 1), (7, 1, 6), (24, 30, 0)])
def test_degenerate_trees_are_lossless(toy, n, k, steps):
    spec = ServerSpec(*toy, algorithm="TALON", nodes=n, width=k, steps=steps, extra=("--skip-tokenizer-init",))
    with serve(spec) as server, Client(server.url) as client:
        prompts = [[1, 2, tokens[3]] for tokens in GROUPS.values()]
        for prompt, got in zip(prompts, client.generate_all(prompts, 30, concurrency=3)):
            assert got.output_ids == answer(prompt[-1], 30)


def filtered(sampling: dict) -> torch.Tensor:
    """[V, V] next-token probabilities of the spread toy under temperature, top_k and top_p, by SGLang's rules, row by row."""
    rows = []
    for row in (transitions() / sampling.get("temperature", 1.0)).softmax(-1).double():
        order = row.sort(descending=True).indices
        before = row[order].cumsum(0) - row[order]
        kept = order[(torch.arange(VOCAB) < sampling.get("top_k", VOCAB)) & (before <= sampling.get("top_p", 1.0))]
        rows.append(torch.zeros(VOCAB, dtype=torch.float64).index_put((kept,), row[kept]))
    return torch.stack(rows) / torch.stack(rows).sum(-1, keepdim=True)


def p_value(triples: list[list[int]], last: int, probabilities: torch.Tensor) -> float:
    """Chi-square of three sampled tokens after `last`, each told apart by its residue modulo 4: 64 classes, their probabilities by
    enumeration.
    """
    residue = torch.arange(VOCAB) % 4
    counts, expected = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for a, b, c in triples:
        counts[16 * (a % 4) + 4 * (b % 4) + c % 4] += 1
    for a in range(4):
        for b in range(4):
            for c in range(4):
                after_a = probabilities[last] * (residue == a)
                after_b = (after_a @ probabilities) * (residue == b)
                expected[16 * a + 4 * b + c] = ((after_b @ probabilities) * (residue == c)).sum()
    expected *= len(triples)
    if counts[expected == 0].any():
        return 0.0  # a class that cannot occur did
    common = expected >= 5  # the chi-square approximation needs that; the rarer classes are counted together
    pooled = [torch.cat((x[common], x[~common].sum()[None])) for x in (counts, expected)]
    kept = pooled[1] > 0
    return chisquare(pooled[0][kept], pooled[1][kept]).pvalue


@pytest.mark.parametrize("last", [0, 24])  # a prompt after which the draft is sure, and one after which it is hopeless
def test_sampled_requests_follow_the_targets_distribution(sampling_server, last):
    draws = 800
    for sampling in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 8}):
        prompts = [[3, 2, last]] * draws
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda ids, sampling=sampling: sampling_server.generate(ids, 3, **sampling).output_ids, prompts))
        assert p_value(answers, last, filtered(sampling)) > 0.001, sampling
        assert p_value(answers, last, filtered(sampling | {"temperature": 1.4})) < 1e-3  # the test can tell a wrong sampler


def test_greedy_and_sampled_requests_share_a_batch(sampling_server):
    best = transitions().argmax(-1).tolist()
    expected, token = [], 5
    for _ in range(40):
        token = best[token]
        expected.append(token)
    jobs = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.2}] * 2
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda sampling: sampling_server.generate([1, 5], 40, **sampling).output_ids, jobs))
    for sampling, got in zip(jobs, answers):
        greedy = sampling["temperature"] == 0 or sampling.get("top_k") == 1
        assert (got == expected) == greedy


@pytest.fixture(scope="module")
def sampling_server(tmp_path_factory):
    target, head = write_toy(tmp_path_factory.mktemp("spread"), spread=True)
    spec = ServerSpec(target, head, "TALON", nodes=N, width=K, steps=0, extra=("--skip-tokenizer-init",))
    with serve(spec) as server, Client(server.url) as client:
        yield client
