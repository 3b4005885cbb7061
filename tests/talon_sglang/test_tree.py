"""The tree rule against a naive Algorithm 2 over the full vocabulary, one Python object per candidate."""

import math
import random

import pytest
import torch

from talon_sglang.tree import DraftTree, TreeBatch, TreeConfig, exact_topk, grow_tree, paths

ENTROPY_LEVELS = (0.05, 0.5, 2.0, 6.0, 20.0)  # logit scales: flat to nearly one-hot


def naive_tree(next_log_probs, config: TreeConfig):
    """Algorithm 2 as printed: every candidate of every parent, sorted; returns [(parent, token, depth, score)] with the root first."""
    nodes, parents, depth = [(-1, -1, 0, 0.0)], [0], 0
    path = {0: ()}
    while len(nodes) < config.node_budget and parents and not (config.depth_cap and depth == config.depth_cap):
        rows = next_log_probs([path[v] for v in parents]).double().tolist()
        candidates = [(nodes[v][3] + lp, v, w) for v, row in zip(parents, rows) for w, lp in enumerate(row)]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        if depth == 0:
            chosen = candidates[: config.first_layer_width]
        else:
            chosen = [c for c in candidates if c[0] >= candidates[0][0] + math.log(config.gate) - 1e-14 * (1 + abs(c[0]))]
        chosen = chosen[: config.node_budget - len(nodes)]
        depth += 1
        parents = []
        for score, v, w in chosen:
            path[len(nodes)] = path[v] + (w,)
            parents.append(len(nodes))
            nodes.append((v, w, depth, score))
    return nodes


class RandomDraft:
    """A fixed random distribution per path, made on demand."""

    def __init__(self, vocab: int, scale: float, seed: int):
        self.vocab, self.scale, self.seed = vocab, scale, seed

    def __call__(self, token_paths):
        rows = []
        for path in token_paths:
            generator = torch.Generator().manual_seed(hash((self.seed, path)) % 2**63)
            rows.append(torch.randn(self.vocab, generator=generator, dtype=torch.float64) * self.scale)
        return torch.stack(rows).log_softmax(-1)


def random_config(rng: random.Random, cap=False) -> TreeConfig:
    budget = rng.randint(2, 96)
    gate = 1.0 if rng.random() < 0.05 else 10 ** rng.uniform(-3, 0)
    return TreeConfig(budget, rng.randint(1, budget + 3), gate, rng.randint(1, 12) if cap else 0)


def as_nodes(tree: DraftTree):
    return list(zip(tree.parents, tree.tokens, tree.depths))


def cases(count, cap=False, seed=0):
    rng = random.Random(seed)
    for case in range(count):
        vocab = rng.choice((4, 5, 7, 16, 40, 100, 400))
        yield RandomDraft(vocab, ENTROPY_LEVELS[case % 5], case), random_config(rng, cap)


def test_equals_the_naive_algorithm_on_1500_random_trees():
    for draft, config in cases(1500):
        tree, naive = grow_tree(draft, config), naive_tree(draft, config)
        assert as_nodes(tree) == [n[:3] for n in naive], (config, draft.vocab, draft.scale)
        assert tree.log_probs == pytest.approx([n[3] for n in naive], abs=1e-9)
        assert len(tree) == config.node_budget  # without a cap the budget is always met


def test_equals_the_naive_algorithm_under_a_depth_cap():
    for draft, config in cases(300, cap=True, seed=1):
        tree = grow_tree(draft, config)
        assert as_nodes(tree) == [n[:3] for n in naive_tree(draft, config)]
        assert max(tree.depths) <= min(config.depth_cap, config.max_depth)


def test_the_invariants_that_verify_relies_on():
    for draft, config in cases(200, cap=True, seed=2):
        tree = grow_tree(draft, config)
        assert tree.parents[0] == -1 and all(0 <= p < i for i, p in enumerate(tree.parents) if i)
        assert all(d == tree.depths[p] + 1 for d, p in zip(tree.depths[1:], tree.parents[1:]))
        assert len(set(paths(tree))) == len(tree)  # no duplicate child
        assert tree.depths == sorted(tree.depths)


def test_golden_vector():
    """Design note, section 1.3: every node's distribution is [.70, .20, .08, .02]; N=16, K=3, mu=0.1."""
    row = torch.tensor([0.70, 0.20, 0.08, 0.02]).log()
    tree = grow_tree(lambda token_paths: row.repeat(len(token_paths), 1), TreeConfig(16, 3, 0.1))
    probs = [round(math.exp(x), 4) for x in tree.log_probs]
    assert [tree.depths.count(d) for d in (1, 2, 3)] == [3, 5, 7] and len(tree) == 16
    assert probs[1:4] == [0.7, 0.2, 0.08]
    assert probs[4:9] == [0.49, 0.14, 0.14, 0.056, 0.056]
    assert probs[9:] == [0.343, 0.098, 0.098, 0.098, 0.0392, 0.0392, 0.0392]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gate_is_inclusive(dtype):
    row = torch.tensor([0.5, 0.45, 0.05], dtype=dtype).log()
    tree = grow_tree(lambda token_paths: row.repeat(len(token_paths), 1), TreeConfig(5, 1, 0.1))
    assert tree.tokens[1:] == [0, 0, 1, 2]  # 0.05 is exactly a tenth of 0.5


def test_the_anchor_is_pooled_over_the_layer():
    """The weak parent's only child is far below the strong parent's best one, although it is its own parent's best."""
    table = {(): [0.99, 0.01, 0.0], (0,): [0.5, 0.5, 0.0], (1,): [0.0, 0.0, 1.0]}
    tree = grow_tree(lambda token_paths: torch.tensor([table.get(p, [1.0, 0.0, 0.0]) for p in token_paths]).log(), TreeConfig(6, 2, 0.1))
    assert as_nodes(tree)[3:5] == [(1, 0, 2), (1, 1, 2)] and (1, 2) not in paths(tree)


@pytest.mark.parametrize("probs, widths", [([1 - 1e-9] + [1e-9 / 63] * 63, [10] + [1] * 49), ([1 / 64] * 64, [10, 49])])
def test_the_two_extremes_at_the_papers_setting(probs, widths):
    row = torch.tensor(probs, dtype=torch.float64).log()
    tree = grow_tree(lambda token_paths: row.repeat(len(token_paths), 1), TreeConfig())
    assert [tree.depths.count(d) for d in range(1, max(tree.depths) + 1)] == widths


def test_ties_go_to_the_earlier_parent_then_the_smaller_token():
    row = torch.full((6,), 1 / 6).log()
    tree = grow_tree(lambda token_paths: row.repeat(len(token_paths), 1), TreeConfig(9, 2, 1.0))
    assert as_nodes(tree)[1:] == [(0, 0, 1), (0, 1, 1)] + [(1, w, 2) for w in range(6)]


def test_ragged_batches_grow_the_same_trees_as_single_requests():
    """The worker's way: one `TreeBatch` for all requests, the first layer from each root's top K only, float32."""
    rng = random.Random(3)
    for case in range(60):
        config, vocab = random_config(rng, cap=case % 3 == 0), rng.choice((16, 100, 400))
        drafts = [RandomDraft(vocab, rng.choice(ENTROPY_LEVELS), 1000 * case + b) for b in range(rng.randint(1, 7))]
        batch = TreeBatch(len(drafts), config)
        roots = torch.cat([draft([()]) for draft in drafts]).float()
        batch.expand_first(*exact_topk(roots, min(config.first_layer_width, config.node_budget, vocab)))
        while batch.num_lanes:
            lanes = [(int(b), paths(batch.tree(b))[v]) for b, v in zip(*batch.frontier)]
            batch.expand(torch.cat([drafts[b]([path]) for b, path in lanes]).float())
        for b, draft in enumerate(drafts):
            single = grow_tree(lambda token_paths, draft=draft: draft(token_paths).float(), config)
            assert batch.tree(b) == single
            assert int(batch.layers_B[b]) == max(single.depths)
            seen = batch.ancestors_BNN[b, : len(single), : len(single)]
            for node, row in enumerate(seen.tolist()):
                up, path = node, set()
                while up >= 0:
                    path.add(up)
                    up = single.parents[up]
                assert {i for i, visible in enumerate(row) if visible} == path


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_failed_draft_degrades_its_own_request_only(bad):
    config = TreeConfig(12, 3, 0.05)
    good, other = RandomDraft(16, 0.5, 1), RandomDraft(16, 0.5, 2)
    for failing_layer in (0, 1):
        batch = TreeBatch(2, config)
        while batch.num_lanes:
            rows = []
            for b, v in zip(*(t.tolist() for t in batch.frontier)):
                row = (good, other)[b]([paths(batch.tree(b))[v]])[0]
                if b == 1 and batch.depth == failing_layer:
                    row[5] = bad
                rows.append(row)
            batch.expand(torch.stack(rows))
        assert batch.tree(0) == grow_tree(good, config)
        assert batch.tree(1) == DraftTree([-1], [-1], [0], [0.0], degraded=True)


def test_probability_zero_is_not_a_failure():
    row = torch.tensor([0.6, 0.4, 0.0, 0.0]).log()
    tree = grow_tree(lambda token_paths: row.repeat(len(token_paths), 1), TreeConfig(8, 3, 0.01))
    assert len(tree) == 8 and not tree.degraded
    assert tree.tokens[1:4] == [0, 1, 2] and tree.parents.count(3) == 0  # the top K of the root may hold it, nothing grows below it
    assert grow_tree(lambda token_paths: torch.full((len(token_paths), 4), -math.inf), TreeConfig(8, 3, 0.01)).degraded


def test_exact_topk_against_a_sort():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        x = torch.randint(0, 5, (4, 30), generator=generator).float()  # many ties
        x[0, 3] = -math.inf
        k = int(torch.randint(1, 31, (), generator=generator))
        values, columns = exact_topk(x, k)
        for r, row in enumerate(x.tolist()):
            expected = sorted(range(30), key=lambda c: (-row[c], c))[:k]
            assert columns[r].tolist() == expected and values[r].tolist() == [row[c] for c in expected]
    assert exact_topk(torch.tensor([[1.0, math.nan]]), 1)[0].isnan().all()


@pytest.mark.parametrize(
    "field, value", [("node_budget", 0), ("first_layer_width", 0), ("gate", 0.0), ("gate", 1.5), ("depth_cap", -1), ("node_budget", 2.5)]
)
def test_a_bad_setting_names_the_field_and_the_value(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        TreeConfig(**{field: value})


def test_a_budget_of_one_is_the_root():
    assert grow_tree(RandomDraft(8, 1.0, 0), TreeConfig(node_budget=1)).tokens == [-1]
