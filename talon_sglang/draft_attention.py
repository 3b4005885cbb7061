"""Exact draft attention: a node attends to its request's committed prefix, its true ancestors and itself.

(Stock SGLang is approximate here for topk > 1: a lane reads the history of its own slots, whoever its parent is.)

Suffixes: B requests, L lanes (nodes forwarded together, request after request), N tree nodes per request.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from talon_sglang.cpu.attention import Span
from talon_sglang.tree import TreeBatch


class CpuTreeAttention(IntelAMXAttnBackend):
    """The draft model's attention backend for one draft forward over the frontier of a `TreeBatch`; `plan` it before each forward."""

    def plan(self, trees: TreeBatch, seq_lens_cpu: torch.Tensor, req_pool_indices: torch.Tensor, slots_BN: torch.Tensor) -> None:
        """
        Args:
            trees: the lanes are its frontier.
            seq_lens_cpu: committed draft KV per request, [B].
            slots_BN: the KV slot of each tree node; the root's (column 0) is not used, its KV is the prefix's last.
        """
        request_L, node_L = trees.frontier
        lanes_B = torch.bincount(request_L, minlength=seq_lens_cpu.numel()).tolist()
        rows, sizes, prefixes = req_pool_indices.tolist(), trees.size_B.tolist(), seq_lens_cpu.tolist()
        table = self.req_to_token_pool.req_to_token
        self.spans, first = [], 0
        for b, lanes in enumerate(lanes_B):
            if lanes:
                slots = torch.cat((table[rows[b], : prefixes[b]].long(), slots_BN[b, 1 : sizes[b]]))
                visible = torch.ones(lanes, slots.numel(), dtype=torch.bool)
                visible[:, prefixes[b] :] = trees.ancestors_BNN[b, node_L[first : first + lanes], 1 : sizes[b]]
                self.spans.append(Span(slice(first, first + lanes), slots[None], visible[None]))
            first += lanes

    def plan_chain(self, seq_len: int, req_pool_index: int, rows: int) -> None:
        """The lanes are the last `rows` tokens of one request's `seq_len` committed ones, each seeing all before it and itself."""
        slots = self.req_to_token_pool.req_to_token[req_pool_index, :seq_len].long()
        visible = torch.ones(rows, seq_len, dtype=torch.bool).tril(seq_len - rows)
        self.spans = [Span(slice(0, rows), slots[None], visible[None])]

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        q_LHD = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        o_LHD = q.new_empty(q_LHD.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for span in self.spans:
            o_LHD[span.rows] = span.attend(q_LHD, keys, values, layer.scaling)
        return o_LHD.flatten(1)
