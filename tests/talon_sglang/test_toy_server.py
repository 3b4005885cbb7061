"""The tree adapts, request by request in one batch, and stays lossless: the real server with a toy whose behaviour is known on paper
(tests/toy.py).
"""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("sglang", reason="needs SGLang")
from eval.client import Client  # noqa: E402
from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import FORKING, GROUPS, answer  # noqa: E402

pytestmark = pytest.mark.slow
N, K, LENGTH = 16, 4, 60


def run(toy, trace, steps):
    """One batch of two requests of each group; returns {group: accept length}, {group: Counter of layer widths}, counters. Checks every
    answer.
    """
    spec = ServerSpec(
        *toy, algorithm="TALON", nodes=N, width=K, steps=steps, trace=trace, extra=("--skip-tokenizer-init",), threads=1, launcher=FORKING
    )
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
