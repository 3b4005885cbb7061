"""Draft attention on a CPU: each lane against its prefix and its own path, one at a time."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
from talon_sglang.draft_attention import CpuTreeAttention  # noqa: E402
from talon_sglang.tree import TreeBatch, TreeConfig  # noqa: E402

SLOTS, HEADS, KV_HEADS, SIZE, NODES = 400, 4, 2, 8, 12
LAYER = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=SIZE, v_head_dim=SIZE, scaling=0.3)


class Pool:
    """KV that is not finite wherever nothing was written."""

    def __init__(self):
        self.keys, self.values = (torch.full((SLOTS, KV_HEADS, SIZE), float("nan")) for _ in range(2))

    def set_kv_buffer(self, _layer, where, k, v):
        self.keys[where.loc], self.values[where.loc] = k, v

    def get_kv_buffer(self, _layer_id):
        return self.keys, self.values


def path(trees, b, node):
    """The nodes above the root that lead to `node`, itself included."""
    found = []
    while node > 0:
        found.append(node)
        node = int(trees.parents_BN[b, node])
    return found[::-1]


@pytest.mark.parametrize("prefixes", [[9], [9, 12, 7], [3, 30]], ids=["one request", "padded", "one by one"])
@pytest.mark.parametrize("seed", range(5))
def test_a_lane_sees_its_prefix_and_its_path(prefixes, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = len(prefixes)
    shuffled = torch.randperm(SLOTS, generator=generator)
    table = shuffled[: 5 * 50].view(5, 50).int()
    slots_BN = shuffled[5 * 50 : 5 * 50 + batch * NODES].view(batch, NODES)
    rows = torch.randperm(5, generator=generator)[:batch]
    backend = CpuTreeAttention.__new__(CpuTreeAttention)
    backend.req_to_token_pool, backend.token_to_kv_pool = SimpleNamespace(req_to_token=table), Pool()
    pool = backend.token_to_kv_pool
    for row, prefix in zip(rows.tolist(), prefixes):
        written = table[row, :prefix].long()
        for buffer in (pool.keys, pool.values):
            buffer[written] = torch.randn(prefix, KV_HEADS, SIZE, generator=generator)

    trees = TreeBatch(batch, TreeConfig(node_budget=NODES, first_layer_width=3, gate=0.2))
    sharpness_B1 = torch.tensor([[1.0], [9.0], [3.0]])[:batch]  # some grow deep and some wide, so lanes are ragged
    trees.expand((torch.randn(batch, 20, generator=generator) * sharpness_B1).log_softmax(-1))
    layers = 0
    while trees.num_lanes:
        request_L, node_L = trees.frontier
        lanes = trees.num_lanes
        backend.plan(trees, torch.tensor(prefixes), rows, slots_BN)
        q = torch.randn(lanes, HEADS * SIZE, generator=generator)
        k, v = (torch.randn(lanes, KV_HEADS, SIZE, generator=generator) for _ in range(2))
        got = backend.forward_decode(q, k, v, LAYER, SimpleNamespace(out_cache_loc=slots_BN[request_L, node_L]))
        for lane, (b, node) in enumerate(zip(request_L.tolist(), node_L.tolist())):
            seen = torch.cat((table[rows[b], : prefixes[b]].long(), slots_BN[b, path(trees, b, node)]))
            for head in range(HEADS):
                keys, values = pool.keys[seen, head // 2], pool.values[seen, head // 2]
                want = ((q.view(lanes, HEADS, SIZE)[lane, head] @ keys.T) * 0.3).softmax(-1) @ values
                torch.testing.assert_close(got.view(lanes, HEADS, SIZE)[lane, head], want)
        scores = torch.randn(lanes, 20, generator=generator) * sharpness_B1[request_L]
        trees.expand(scores.log_softmax(-1))
        layers += 1
    assert layers >= 1
