"""Mask, positions, links and filler against a walk over the tree, one node at a time; and SGLang's greedy verify over them against a plain
descent.
"""

import random

import pytest
import torch

from talon_sglang.cpu import activate
from talon_sglang.tree import TreeBatch, TreeConfig, children, exact_topk

activate()
pytest.importorskip("sglang", reason="needs SGLang")
# noqa: E402, F401  (SGLang's modules import in a ring; this is a safe place to enter)

from talon_sglang.cpu.sgl_kernel import verify_tree_greedy_cpu  # noqa: E402
from talon_sglang.verify_input import build_verify_input, retrieval_links  # noqa: E402

VOCAB = 12


def random_trees(rng: random.Random, batch: int, config: TreeConfig, broken: int | None = None) -> TreeBatch:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    trees = TreeBatch(batch, config)
    root = (torch.randn(batch, VOCAB, generator=generator) * 2).log_softmax(-1)
    trees.expand_first(*exact_topk(root, min(config.first_layer_width, VOCAB)))
    while trees.num_lanes:
        rows = (torch.randn(trees.num_lanes, VOCAB, generator=generator) * 2).log_softmax(-1)
        if broken is not None:
            rows[trees.frontier[0] == broken] = float("nan")
        trees.expand(rows)
    return trees


def cases():
    rng = random.Random(5)
    for _ in range(60):
        n, batch = rng.randint(2, 40), rng.randint(1, 5)
        config = TreeConfig(n, rng.randint(1, 12), 10 ** rng.uniform(-3, 0), rng.choice((0, 0, 1, 3)))
        broken = rng.choice((None, None, 0))
        yield rng, batch, config, random_trees(rng, batch, config, broken)


def build(rng, batch, trees, n):
    roots = torch.tensor([rng.randrange(VOCAB) for _ in range(batch)])
    lengths = torch.tensor([rng.randint(1, 50) for _ in range(batch)])
    slots = torch.arange(batch * n).view(batch, n) + 100
    return roots, lengths, slots, build_verify_input(trees, roots, trees.tokens_BN.clamp(min=0), lengths, slots)


def test_mask_positions_and_tokens_follow_each_nodes_own_path():
    for rng, batch, config, trees in cases():
        n = config.node_budget
        roots, lengths, slots, verify = build(rng, batch, trees, n)
        mask, positions, tokens = verify.custom_mask.view(batch, n, n), verify.positions.view(batch, n), verify.draft_token.view(batch, n)
        for b in range(batch):
            tree = trees.tree(b)
            for node in range(n):
                path, up = {node} if node < len(tree) else set(), node if node < len(tree) else 0
                while up >= 0:
                    path.add(up)
                    up = tree.parents[up]
                assert {i for i in range(n) if mask[b, node, i]} == path
                live = 0 < node < len(tree)
                assert positions[b, node] == lengths[b] + (tree.depths[node] if live else 0)
                assert tokens[b, node] == (tree.tokens[node] if live else roots[b])
        assert verify.tree_topk == -1 and verify.max_tree_depth <= n and verify.prepared_out_cache_loc.equal(slots.flatten())


def test_links_list_every_child_once_in_drafting_order():
    for _, batch, _, trees in cases():
        first, sibling = retrieval_links(trees.parents_BN, trees.size_B)
        for b in range(batch):
            tree = trees.tree(b)
            for node, expected in enumerate(children(tree.parents)):
                found, child = [], int(first[b, node])
                while child != -1:
                    found.append(child)
                    child = int(sibling[b, child])
                assert found == expected
            assert (first[b, len(tree) :] == -1).all() and (sibling[b, len(tree) :] == -1).all()


def test_greedy_verify_walks_down_as_far_as_the_target_agrees_and_never_into_filler():
    for rng, batch, config, trees in cases():
        n = config.node_budget
        *_, verify = build(rng, batch, trees, n)
        target = torch.tensor([[rng.randrange(4) for _ in range(n)] for _ in range(batch)])
        predicts, accepted = torch.zeros(batch * n, dtype=torch.int32), torch.full((batch, verify.max_tree_depth), -1, dtype=torch.int32)
        count = torch.zeros(batch, dtype=torch.int32)
        links = (verify.retrieve_index, verify.retrieve_next_token, verify.retrieve_next_sibling)
        verify_tree_greedy_cpu(predicts, accepted, count, verify.draft_token.view(batch, n), *links, target)
        for b in range(batch):
            tree, node, path = trees.tree(b), 0, [0]
            while True:
                match = [c for c in children(tree.parents)[node] if tree.tokens[c] == target[b, node]]
                if not match:
                    break
                node = match[0]
                path.append(node)
            assert [int(i) - b * n for i in accepted[b] if i >= 0] == path and int(count[b]) == len(path) - 1
            assert [int(predicts[b * n + i]) for i in path] == [int(target[b, i]) for i in path]
