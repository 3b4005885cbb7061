"""Fixed-shape expansion against `TreeBatch`, node for node, on random drafts of both kinds: full of ties, and continuous."""

import math
import random

import pytest
import torch

from eval.gpu_cases import differences, grow_both
from talon_sglang.gpu.tree import StaticTrees, ordered_topk
from talon_sglang.tree import TreeConfig, exact_topk


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("failing", [0.0, 0.02])
def test_the_same_trees_as_tree_batch(ties, failing):
    rng = random.Random(f"{ties} {failing}")
    depths = set()
    for case in range(150):
        n = rng.randint(2, 64)
        gate = 1.0 if case % 20 == 0 else 10 ** rng.uniform(-3, 0)
        config = TreeConfig(n, rng.randint(1, n + 3), gate, rng.choice((0, 0, rng.randint(1, 12))))
        vocab, scale = rng.choice((4, 5, 16, 40, 200)), rng.choice((0.0, 0.05, 0.5, 2.0, 6.0, 20.0))
        oracle, static, steps = grow_both(rng.randint(1, 5), config, vocab, scale, ties, case, failing=failing, spare=rng.choice((0, 3)))
        assert differences(oracle, static) == []
        depths.add(steps)
    assert len(depths) > 10  # shallow and deep trees were among them


def test_the_papers_setting_at_both_extremes_fills_the_lanes_exactly():
    config, vocab = TreeConfig(), 64
    for scale, depth in ((0.0, 2), (200.0, None)):
        oracle, static, _ = grow_both(3, config, vocab, scale, ties=False, seed=1)
        assert differences(oracle, static) == []
        assert depth is None or int(oracle.depth) == depth
    static = StaticTrees(1, config, vocab)
    assert (static.widest(0), static.widest(1), static.max_steps) == (10, 48, 58)


def test_the_lane_cap_is_reached_so_it_cannot_be_smaller():
    """Layer 2 keeps all but one of the nodes that are left: a root of K equal tokens, of which one has all the wide children."""
    config, vocab = TreeConfig(20, 4, 0.5), 14
    static = StaticTrees(1, config, vocab)
    static.expand_first(*exact_topk(torch.full((1, vocab), -math.log(vocab)), 4))
    rows = torch.full((1, 4, vocab), -math.inf)
    rows[0, 0] = -math.log(vocab)  # 14 children of one parent, all at the anchor of ...
    rows[0, 1:, 0] = -40.0  # ... the layer; the others' children fail the gate
    static.expand(rows)
    assert int(static.lanes(static.widest(1))[0].sum()) == static.widest(1) == 14 and int(static.room) == 1


def test_steps_after_the_end_change_nothing():
    _, static, _ = grow_both(3, TreeConfig(16, 4, 0.1), 40, 2.0, False, 5, failing=0.02)
    before = {name: value.clone() for name, value in vars(static).items() if isinstance(value, torch.Tensor) and name != "depth"}
    static.expand(torch.randn(3, 11, 40).log_softmax(-1))
    static.expand(torch.full((3, 11, 40), math.nan))
    for name, value in before.items():
        assert name == "start_B" or torch.equal(value, getattr(static, name)), name
    assert not static.lanes(11)[0].any()


def test_a_reset_tree_is_a_new_one():
    config, top = TreeConfig(16, 4, 0.1), exact_topk(torch.randn(2, 40).log_softmax(-1), 4)
    _, used, _ = grow_both(2, config, 40, 2.0, False, 5)
    used.reset()
    new = StaticTrees(2, config, 40)
    for trees in (used, new):
        trees.expand_first(*top)
    for name, value in vars(new).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(used, name)), name


def test_a_budget_of_one_is_the_root_alone():
    static = StaticTrees(2, TreeConfig(1, 4, 0.1), 40)
    static.expand_first(*exact_topk(torch.randn(2, 40).log_softmax(-1), 4))
    assert static.size_B.tolist() == [1, 1] and int(static.room) == 0 and static.max_steps == 0


def test_ordered_topk_equals_exact_topk():
    generator = torch.Generator().manual_seed(0)
    for case in range(60):
        x_RV = torch.randn(7, 50, generator=generator) * 3
        x_RV = x_RV.round() if case % 2 else x_RV
        x_RV[torch.rand(7, 50, generator=generator) < 0.2] = -math.inf
        x_RV[:, case % 50] = -0.0
        k = 1 + case % 50
        for got, expected in zip(ordered_topk(x_RV, k), exact_topk(x_RV, k)):
            assert torch.equal(got, expected)


def test_ordered_topk_marks_failed_rows_whatever_the_sign_of_their_nan():
    rows = torch.tensor([[1.0, math.nan, 0.0], [1.0, -math.nan, 0.0], [math.inf, 0.0, 1.0], [-math.inf] * 3, [-math.inf, 2.0, -math.inf]])
    rows[1, 1] = torch.tensor([-4194304], dtype=torch.int32).view(torch.float32)  # the NaN that x86 makes: sign bit set
    values, columns = ordered_topk(rows, 2)
    assert values.isnan().all(1).tolist() == [True, True, True, True, False] and columns[4].tolist() == [1, 0]


def test_other_precisions_are_refused():
    with pytest.raises(TypeError, match="float32"):
        StaticTrees(1, TreeConfig(), 64).expand(torch.zeros(1, 10, 64, dtype=torch.float64))
