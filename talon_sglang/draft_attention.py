"""Exact draft attention: a node attends to its request's committed prefix, its true ancestors and itself.

(Stock SGLang is approximate here for topk > 1: a lane reads the history of its own slots, whoever its parent is.)

Suffixes: B requests, L lanes (nodes forwarded together, request after request), M lanes of one request, N tree nodes per request, P prefix
length.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from talon_sglang.cpu.attention import Span, padded_slots, worth_padding
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
        lanes_B = torch.bincount(request_L, minlength=seq_lens_cpu.numel())
        busy_B = lanes_B.nonzero().flatten()  # from here on, B are the requests that still grow
        busy = busy_B.tolist()
        lanes, prefixes, table = lanes_B[busy_B], seq_lens_cpu[busy_B], self.req_to_token_pool.req_to_token
        if worth_padding(prefixes.tolist()):
            self._plan_padded(trees, busy_B, lanes, prefixes, req_pool_indices[busy_B], slots_BN)
            return
        self.spans, self.place_L, first = [], None, 0
        for b, row, count, prefix, size in zip(
            busy, req_pool_indices[busy_B].tolist(), lanes.tolist(), prefixes.tolist(), trees.size_B[busy_B].tolist()
        ):
            rows = slice(first, first + count)
            slots = torch.cat((table[row, :prefix].long(), slots_BN[b, 1:size]))
            visible = torch.ones(count, slots.numel(), dtype=torch.bool)
            visible[:, prefix:] = trees.ancestors_BNN[b, node_L[rows], 1:size]
            self.spans.append(Span(rows, slots[None], visible[None]))
            first += count

    def _plan_padded(self, trees: TreeBatch, busy_B, lanes_B, prefix_B, pool_index_B, slots_BN) -> None:
        """All requests at once, padded to M lanes and one prefix length; a padding lane is the request's root, which sees the prefix."""
        _, node_L = trees.frontier
        batch, most, longest = busy_B.numel(), int(lanes_B.max()), int(prefix_B.max())
        number_L = torch.arange(node_L.numel())
        first_B = lanes_B.cumsum(0) - lanes_B
        self.place_L = torch.repeat_interleave(torch.arange(batch) * most - first_B, lanes_B) + number_L
        lane_BM, node_BM = (torch.zeros(batch * most, dtype=torch.int64).scatter_(0, self.place_L, x_L) for x_L in (number_L, node_L))
        prefix_slots, inside_BP = padded_slots(self.req_to_token_pool.req_to_token, pool_index_B, prefix_B, longest)
        inside_BMP = inside_BP[:, None].expand(batch, most, longest)
        ancestors_BMN = trees.ancestors_BNN[busy_B[:, None], node_BM.view(batch, most)][:, :, 1:]
        # No lane looks at nodes that do not exist yet, but their slots may hold what is not finite, and 0 x NaN is NaN.
        exists_BN = torch.arange(1, slots_BN.shape[1]) < trees.size_B[busy_B, None]
        node_slots = torch.where(exists_BN, slots_BN[busy_B, 1:], prefix_slots[:, :1])
        slots = torch.cat((prefix_slots, node_slots), dim=1)
        self.spans = [Span(lane_BM, slots, torch.cat((inside_BMP, ancestors_BMN), dim=2))]

    def plan_chain(self, seq_len: int, req_pool_index: int, rows: int) -> None:
        """The lanes are the last `rows` tokens of one request's `seq_len` committed ones, each seeing all before it and itself."""
        slots = self.req_to_token_pool.req_to_token[req_pool_index, :seq_len].long()
        visible = torch.ones(rows, seq_len, dtype=torch.bool).tril(seq_len - rows)
        self.spans, self.place_L = [Span(slice(0, rows), slots[None], visible[None])], None

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        q_LHD = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self.place_L is not None:
            return self.spans[0].attend(q_LHD, keys, values, layer.scaling)[self.place_L].flatten(1)
        o_LHD = q.new_empty(q_LHD.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for span in self.spans:
            o_LHD[span.rows] = span.attend(q_LHD, keys, values, layer.scaling)
        return o_LHD.flatten(1)
