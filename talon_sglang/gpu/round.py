"""One round of drafting in buffers that never move: what a step reads and writes, whatever computes the draft forward.

Suffixes: B requests, N tree nodes, M = N + 1 (the last row takes what dead lanes write), W lanes a request, L = B x W lanes, H hidden size,
V draft vocabulary, K columns of the first layer, R rows and C columns of SGLang's table of KV slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from talon_sglang.gpu.kernels import DUMMY_SLOT, index_entries, write_kv_indices
from talon_sglang.gpu.tree import StaticTrees
from talon_sglang.tree import TreeConfig


class Lanes(NamedTuple):
    """Inputs of one draft forward over all lanes, dead ones included; a dead lane has a valid token, position and slot, and no effect."""

    tokens_L: torch.Tensor  # draft ids
    positions_L: torch.Tensor
    slots_L: torch.Tensor  # where each lane's own key and value go; the dummy slot for a dead one
    hidden_LH: torch.Tensor  # the parents' hidden states
    kv_indptr: torch.Tensor  # what each lane attends to, see kernels.py
    kv_indices: torch.Tensor


Forward = Callable[[Lanes], tuple[torch.Tensor, torch.Tensor]]  # -> (logits_LV of the draft vocabulary, hidden_LH)


class StaticRound:
    """The trees of B requests and the tensors around them. `load` a round's inputs, `begin`, then `step` until the trees' `room` is 0.

    `begin` and `step` make no allocation that outlives them, ask the device for nothing and take no tensor arguments, so both can be
    captured.

    Args:
        table_RC: SGLang's `req_to_token`.
        forward: the draft model over the lanes of one layer.
        uniform, index_dtype: the layout of the KV index lists (kernels.py); False and int64 for Triton, True and int32 for FlashInfer.
    """

    def __init__(
        self,
        batch: int,
        config: TreeConfig,
        vocab: int,
        hidden_size: int,
        table_RC: torch.Tensor,
        forward: Forward,
        *,
        hidden_dtype: torch.dtype = torch.float32,
        uniform: bool = False,
        index_dtype: torch.dtype = torch.int64,
    ):
        n, device = config.node_budget, table_RC.device
        self.trees, self.table_RC, self.forward, self.uniform = StaticTrees(batch, config, vocab, device), table_RC, forward, uniform
        self.seq_lens_B = torch.ones(batch, dtype=torch.int64, device=device)
        self.rows_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.slots_BN = torch.full((batch, n), DUMMY_SLOT, dtype=torch.int64, device=device)
        self.hidden_BMH = torch.zeros(batch, n + 1, hidden_size, dtype=hidden_dtype, device=device)
        columns = max(1, self.trees.first_width)
        self.first_log_probs_BK = torch.full((batch, columns), -1.0, device=device)
        self.first_tokens_BK = torch.zeros(batch, columns, dtype=torch.int64, device=device)
        widest = max(self.trees.widest(0), self.trees.widest(1))
        self.kv_indptr = torch.zeros(batch * widest + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(index_entries(batch, widest, table_RC.shape[1]), dtype=index_dtype, device=device)

    def load(self, seq_lens_B, rows_B, slots_BN, first_log_probs_BK, first_tokens_BK, root_hidden_BH) -> None:
        """Copy a round's inputs into the buffers. Fewer requests than B leave the rest as padding (a prefix of one token in row 0)."""
        b, k = seq_lens_B.numel(), self.first_tokens_BK.shape[1]
        for buffer, padding in ((self.seq_lens_B, 1), (self.rows_B, 0), (self.slots_BN, DUMMY_SLOT)):
            buffer[b:] = padding
        self.seq_lens_B[:b], self.rows_B[:b], self.slots_BN[:b] = seq_lens_B, rows_B, slots_BN
        self.first_log_probs_BK[:b], self.first_tokens_BK[:b] = first_log_probs_BK[:, :k], first_tokens_BK[:, :k]
        self.first_log_probs_BK[b:] = torch.nan  # a degraded tree: padding leaves the frontier at once
        self.hidden_BMH[:b, 0] = root_hidden_BH

    def begin(self) -> None:
        """Layer 1."""
        self.trees.reset()
        self.trees.expand_first(self.first_log_probs_BK, self.first_tokens_BK)

    def step(self, width: int) -> None:
        """One draft forward over the frontier, and the next layer from it. `width` must not be less than the frontier's."""
        trees = self.trees
        live_BW, node_BW = trees.lanes(width)
        logits_LV, hidden_LH = self.forward(self.lanes(live_BW, node_BW))
        row_BW = torch.where(live_BW, node_BW, self.slots_BN.shape[1])
        self.hidden_BMH.scatter_(1, spread(row_BW, self.hidden_BMH), hidden_LH.view(*row_BW.shape, -1).to(self.hidden_BMH.dtype))
        trees.expand(logits_LV.float().log_softmax(-1).view(*row_BW.shape, -1))

    def lanes(self, live_BW, node_BW) -> Lanes:
        trees, width = self.trees, node_BW.shape[1]
        count = live_BW.numel() + 1
        in_tree = trees.start_B, trees.size_B, trees.depth, trees.ancestors_BNN
        kv_indptr = self.kv_indptr[:count]
        write_kv_indices(
            kv_indptr, self.kv_indices, self.table_RC, self.rows_B, self.seq_lens_B, *in_tree, self.slots_BN, width, self.uniform
        )
        parent_BW = trees.parents_BN.gather(1, node_BW).clamp(min=0)
        return Lanes(
            tokens_L=torch.where(live_BW, trees.tokens_BN.gather(1, node_BW), 0).flatten(),
            positions_L=(self.seq_lens_B[:, None] + trees.depth - 1).expand_as(node_BW).flatten(),
            slots_L=torch.where(live_BW, self.slots_BN.gather(1, node_BW), DUMMY_SLOT).flatten(),
            hidden_LH=self.hidden_BMH.gather(1, spread(parent_BW, self.hidden_BMH)).flatten(0, 1),
            kv_indptr=kv_indptr,
            kv_indices=self.kv_indices,
        )


def spread(index_BW: torch.Tensor, like_BMH: torch.Tensor) -> torch.Tensor:
    return index_BW[:, :, None].expand(-1, -1, like_BMH.shape[-1])
