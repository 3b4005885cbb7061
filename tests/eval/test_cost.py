"""Fitting, reading the clock's lines, and the composition of a round, against hand-made cases and a simulated batch."""

import json
import random

import pytest

from eval.cost import Setting, main, read_times
from eval.cost_model import PARTS, CostModel, Line, Sample, at_least_one, fit


def test_a_line_is_found_again():
    line = fit([Sample("verify", size, 12.0 + 0.7 * size, 5) for size in (8, 16, 64, 256)])
    assert line.fixed == pytest.approx(12.0) and line.slope == pytest.approx(0.7)


def test_relative_error_counts_so_small_sizes_are_not_drowned():
    samples = [Sample("verify", size, (10 + size) * (1.3 if size == 1000 else 1.0), 5) for size in (1, 2, 4, 8, 1000)]
    line = fit(samples)
    assert all(abs(line.at(s.size) / s.ms - 1) < 0.15 for s in samples[:4])


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(1, 5.0)], Line(5.0, 0.0)),
        ([(1, 5.0), (2, 4.0), (4, 3.9)], "falling"),  # noise: a slope below zero would predict negative times
        ([(1, 1.0), (2, 2.4), (4, 5.5)], "from zero"),
    ],
)
def test_nothing_costs_less_than_nothing(samples, expected):
    line = fit([Sample("draft", size, ms, 3) for size, ms in samples])
    assert line.fixed >= 0 and line.slope >= 0
    if isinstance(expected, Line):
        assert (line.fixed, line.slope) == pytest.approx((expected.fixed, expected.slope))
    else:
        assert (line.slope if expected == "falling" else line.fixed) == 0


def test_a_part_without_a_sample_is_named():
    with pytest.raises(ValueError, match="no sample of 'draft'"):
        CostModel.fitted([Sample(part, 1, 1.0, 3) for part in PARTS if part != "draft"])


def simulated_round(model: CostModel, rng: random.Random, nodes: int, batch: int, layers, accepts) -> float:
    """One batch of sequences, each with its own depth and accept length."""
    drawn = [rng.choice(layers) for _ in range(batch)]  # lanes of each forward
    longest = max(map(len, drawn))
    ms = model.lines["verify"].at(batch * nodes) + model.lines["overhead"].at(batch)
    for i in range(longest):
        ms += model.lines["draft"].at(sum(lanes[i] for lanes in drawn if i < len(lanes)))
    return ms + model.lines["extend"].at(batch * (1 + max(rng.choice(accepts) for _ in range(batch))))


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_round_is_the_mean_over_batches_of_different_trees(batch):
    model = CostModel({part: Line(3.0 + i, 0.2 * (i + 1)) for i, part in enumerate(PARTS)})
    layers, accepts = [[4], [4, 7], [4, 7, 3, 1], []], [0, 0, 1, 3]
    figure = {
        "forwarded": [sum(len(lanes) > i for lanes in layers) / 4 for i in range(4)],
        "lanes": [sum(lanes[i] for lanes in layers if len(lanes) > i) / 4 for i in range(4)],
        "accepts": [sum(count >= depth for count in accepts) / 4 for depth in (1, 2, 3)],
        "emitted": 2.0,
    }
    rng = random.Random(5)
    mean = sum(simulated_round(model, rng, 16, batch, layers, accepts) for _ in range(20_000)) / 20_000
    # The extend's slope multiplies batch by the longest path; both are exact in expectation here.
    assert model.round_ms(figure, 16, batch) == pytest.approx(mean, rel=0.01)
    assert model.tokens_per_s(figure, 16, batch) == pytest.approx(2000.0 * batch / mean, rel=0.01)
    full = model.round_ms(figure, 16, batch, full_extend=True) - model.round_ms(figure, 16, batch)
    rows = 1 + sum(at_least_one(share, batch) for share in figure["accepts"])
    assert full == pytest.approx(model.lines["extend"].slope * batch * (16 - rows))


def events(batch: int, count: int, gap: float) -> list[dict]:
    found, clock = [], 100.0
    for _ in range(count):
        found.append({"kind": "draft decode", "tokens": 4 * batch, "batch": batch, "ms": 2.0})
        found.append({"kind": "target target_verify", "tokens": 8 * batch, "batch": batch, "ms": 10.0})
        found.append({"kind": "draft draft_extend_v2", "tokens": 3 * batch, "batch": batch, "ms": 1.0})
        found.append({"kind": "round", "mode": "decode", "batch": batch, "start": clock, "ms": 14.0})
        clock += 13.0 + gap
    return found


def test_the_clocks_lines_become_samples_of_full_batches_only():
    prefill = [
        {"kind": "target extend", "tokens": 9, "batch": 2, "ms": 5.0},
        {"kind": "round", "mode": "extend", "batch": 2, "start": 0.0, "ms": 6.0},
    ]
    samples = read_times([*prefill, *events(1, 4, 9.0), *events(2, 5, 1.5)], 2)
    assert samples == [
        Sample("draft", 8, 2.0, 5),
        Sample("extend", 6, 1.0, 5),
        Sample("overhead", 2, 1.5, 4),
        Sample("verify", 16, 10.0, 5),
    ]


def test_rare_sizes_are_left_out():
    assert read_times(events(1, 2, 1.0), 1) == []


def test_a_model_is_read_back(tmp_path):
    lines = {part: {"fixed": 1.0, "slope": 0.5} for part in PARTS}
    (tmp_path / "cost.json").write_text(json.dumps({"lines": lines}))
    model = CostModel.read(tmp_path / "cost.json")
    assert model.plain_ms(2) == 4.0 and model.plain_tokens_per_s(2) == 500.0
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="not a file of eval/cost.py"):
        CostModel.read(tmp_path / "other.json")


def test_settings_have_their_own_keys():
    assert len({Setting(nodes, batch).key for nodes in (None, 8, 16) for batch in (1, 2)}) == 6


def test_a_budget_of_one_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--target", "t", "--head", "h", "--nodes", "1"])
    assert "--nodes has 1" in capsys.readouterr().err
