"""The tree rule of `talon_sglang/tree.py` in fixed shapes: nothing here asks the device for a value or makes a shape out of one, so a step
can be captured in a CUDA graph and replayed.

`TreeBatch` is the oracle: the same log-probabilities give the same trees, ties included. What makes that possible in fixed shapes:

- **Lanes.** Nodes enter layer by layer, so the frontier of request b is the range start_B[b] .. size_B[b]-1, and lane w of it is node
  start + w. How wide can a layer that is still expanded be? Layer 1 has k1 = min(K, N-1, V) nodes. Layer i > 1 shares N - 1 - k1 nodes
  with the layers 2 .. i-1 before it (one node each at least) and leaves one node of room, so N - k1 - i at most: 48 at N=60, K=10. A
  smaller cap is not exact: a lane's children are known to fail the gate only after its forward.
- **Children per lane.** No layer can add more nodes than the room that is left, D = N - 1 - k1 at most. The R = min(D, V) best children of
  each lane, pooled, gated and cut at the room, are therefore the same as all children, gated and cut.
- **Ties.** Of equal scores the earlier parent wins, then the smaller token. Per lane the order (log-probability, token) is a single int64
  key; pooled, a stable sort keeps lane order. Two children of one lane with different float32 log-probabilities never share a float64
  score: those above -0.69 can be one child only, and below it float32 is coarser than float64 at any score that passes the gate.

Suffixes: B requests, N tree nodes, W lanes a request (live ones first), V vocabulary, K columns of the first layer, R children kept a lane,
C = W x R pooled candidates, D of them that one layer can add.
"""

from __future__ import annotations

import math

import torch

from talon_sglang.tree import TreeBatch, TreeConfig


class StaticTrees:
    """The growing trees of B requests in buffers that never move. The tensors of `TreeBatch` have the same names and meaning here.

    A round: `reset()`, `expand_first(...)`, then `expand(...)` with the draft distributions of `lanes(W)` until `room` is 0. Calls after
    that change nothing.

    Args:
        vocab: size of the draft vocabulary; it decides k1 and R.
    """

    def __init__(self, batch: int, config: TreeConfig, vocab: int, device: torch.device | str = "cpu"):
        self.config = config
        n = config.node_budget
        self.first_width = min(config.first_layer_width, n - 1, vocab)
        self.layer_cap = max(1, n - 1 - self.first_width)  # D: nodes that one layer after the first can add
        self.children = min(self.layer_cap, vocab)  # R
        self.tokens_BN = torch.zeros(batch, n, dtype=torch.int64, device=device)
        self.parents_BN = torch.full((batch, n), -1, dtype=torch.int64, device=device)
        self.depths_BN = torch.zeros(batch, n, dtype=torch.int64, device=device)
        self.log_probs_BN = torch.zeros(batch, n, dtype=torch.float64, device=device)
        self.ancestors_BNN = torch.zeros(batch, n, n, dtype=torch.bool, device=device)
        self.start_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.size_B = torch.ones(batch, dtype=torch.int64, device=device)
        self.layers_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.degraded_B = torch.zeros(batch, dtype=torch.bool, device=device)
        self.depth = torch.zeros((), dtype=torch.int64, device=device)  # depth of the frontier's nodes
        self.room = torch.zeros((), dtype=torch.int64, device=device)  # most nodes that a request with a frontier may still add; 0 = done
        self._node_N = torch.arange(n, device=device)
        self._eye_NN = torch.eye(n, dtype=torch.bool, device=device)
        self.reset()

    tree = TreeBatch.tree

    @property
    def max_steps(self) -> int:
        """Draft forwards that a round can need after the first layer."""
        return max(0, self.config.max_depth - 1) if self.first_width < self.config.node_budget - 1 else 0

    def widest(self, step: int) -> int:
        """Lanes that the frontier of `step` (0 expands layer 1) can have; at least 1."""
        n, k1 = self.config.node_budget, self.first_width
        return max(1, k1 if step == 0 else n - 1 - k1 - step)

    def reset(self) -> None:
        """Every tree is its root, and the root is the frontier."""
        self.tokens_BN.zero_()[:, 0] = -1
        self.parents_BN.fill_(-1)
        self.depths_BN.zero_()
        self.log_probs_BN.zero_()
        self.ancestors_BNN.copy_(self._eye_NN)
        for counter in (self.start_B, self.layers_B, self.degraded_B, self.depth):
            counter.zero_()
        self.size_B.fill_(1)
        self.room.fill_(self.config.node_budget - 1)

    def lanes(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(live_BW, node_BW): which lanes hold a frontier node, and the node of each; a dead lane names some existing node."""
        node_BW = self.start_B[:, None] + torch.arange(width, device=self.start_B.device)
        live_BW = node_BW < self.size_B[:, None]
        return live_BW, node_BW.clamp(max=self.config.node_budget - 1)

    def expand_first(self, log_probs_BK: torch.Tensor, tokens_BK: torch.Tensor) -> None:
        """Add layer 1 from each request's `exact_topk` (best first; at least `first_width` columns)."""
        k = self.first_width
        if k == 0:  # a budget of the root alone
            self._end_layer(torch.zeros_like(self.size_B), torch.zeros_like(self.degraded_B))
            return
        live_B = self.start_B < self.size_B
        self._degrade(live_B & ~torch.isfinite(log_probs_BK[:, 0]))
        fits_BK = (live_B & ~self.degraded_B)[:, None].expand(-1, k)
        tokens_BK, parents_BK = tokens_BK[:, :k].long(), torch.zeros_like(tokens_BK[:, :k], dtype=torch.int64)
        self._append(fits_BK, tokens_BK, parents_BK, log_probs_BK[:, :k].double(), live_B)

    def expand(self, log_probs_BWV: torch.Tensor) -> None:
        """Add one layer from the draft distributions of `lanes(W)`; the rows of dead lanes may hold anything.

        Raises TypeError unless the log-probabilities are float32 (the exactness of the tie order rests on it).
        """
        if log_probs_BWV.dtype != torch.float32:
            raise TypeError(f"log_probs_BWV is {log_probs_BWV.dtype}: pass float32 log-probabilities")
        live_BW, node_BW = self.lanes(log_probs_BWV.shape[1])
        growing_B = live_BW[:, 0]
        value_BWR, token_BWR = ordered_topk(log_probs_BWV, self.children)
        best_BW = value_BWR[:, :, 0].double()
        self._degrade((live_BW & ~torch.isfinite(best_BW)).any(1))

        live_BW = live_BW & ~self.degraded_B[:, None]
        score_BW = self.log_probs_BN.gather(1, node_BW)
        anchor_B = torch.where(live_BW, score_BW + best_BW, -math.inf).amax(1)
        gate_B = anchor_B + math.log(self.config.gate)
        gate_B = gate_B - torch.finfo(torch.float32).eps * (1 + gate_B.abs())  # inclusive, as in TreeBatch
        score_BWR = score_BW[:, :, None] + value_BWR.double()
        passes_BWR = live_BW[:, :, None] & (score_BWR >= gate_B[:, None, None])

        score_BC = torch.where(passes_BWR, score_BWR, -math.inf).flatten(1)
        score_BD, order_BD = (x_BC[:, : self.layer_cap] for x_BC in score_BC.sort(dim=1, descending=True, stable=True))
        rank_D = torch.arange(score_BD.shape[1], device=score_BD.device)
        room_B = self.config.node_budget - self.size_B
        fits_BD = rank_D < torch.minimum(passes_BWR.flatten(1).sum(1), room_B)[:, None]
        parent_BD = node_BW.gather(1, order_BD // self.children)
        self._append(fits_BD, token_BWR.flatten(1).gather(1, order_BD), parent_BD, score_BD, growing_B)

    def _append(self, fits_BD, token_BD, parent_BD, score_BD, growing_B) -> None:
        """Candidate r of request b becomes node size_B[b] + r where it fits; the ones that fit come first."""
        rank_BN = self._node_N - self.size_B[:, None]
        in_range_BN, rank_BN = (rank_BN >= 0) & (rank_BN < fits_BD.shape[1]), rank_BN.clamp(0, fits_BD.shape[1] - 1)
        new_BN = in_range_BN & fits_BD.gather(1, rank_BN)
        for row_BN, value_BD in ((self.tokens_BN, token_BD), (self.parents_BN, parent_BD), (self.log_probs_BN, score_BD)):
            row_BN.copy_(torch.where(new_BN, value_BD.gather(1, rank_BN), row_BN))
        self.depths_BN.copy_(torch.where(new_BN, self.depth + 1, self.depths_BN))
        path_BNN = self.ancestors_BNN.gather(1, self.parents_BN.clamp(min=0)[:, :, None].expand_as(self.ancestors_BNN)) | self._eye_NN
        self.ancestors_BNN.copy_(torch.where(new_BN[:, :, None], path_BNN, self.ancestors_BNN))
        self._end_layer(new_BN.sum(1), growing_B)

    def _end_layer(self, added_B, growing_B) -> None:
        self.layers_B.add_(growing_B)
        self.depth.add_(1)
        self.start_B.copy_(self.size_B)
        self.size_B.add_(added_B)
        more_B = (self.size_B < self.config.node_budget) & (self.depth != self.config.depth_cap)
        self.start_B.copy_(torch.where(more_B, self.start_B, self.size_B))  # an empty frontier
        room_B = torch.where(self.start_B < self.size_B, self.config.node_budget - self.size_B, 0)
        self.room.copy_(room_B.amax())

    def _degrade(self, failed_B) -> None:
        """A request with a non-finite lane falls back to its root alone."""
        self.degraded_B.logical_or_(failed_B)
        drop_BN = failed_B[:, None] & (self._node_N > 0)
        for row_BN, empty in ((self.tokens_BN, 0), (self.parents_BN, -1), (self.depths_BN, 0)):
            row_BN.masked_fill_(drop_BN, empty)
        self.size_B.masked_fill_(failed_B, 1)
        self.start_B.masked_fill_(failed_B, 1)


def ordered_topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of the last dimension of a float32 tensor, best first, ties to the smaller column: (values, columns).

    `exact_topk` without its data-dependent shapes, and with the same values: NaN for a row with NaN, +inf or nothing but -inf, whose
    columns mean nothing.
    """
    failed = ~torch.isfinite(x.amax(-1, keepdim=True))
    bits = (x + 0.0).view(torch.int32)  # -0.0 ties with 0.0
    bits = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # integers in the order of the floats
    last = x.shape[-1] - 1
    key = bits.long().bitwise_left_shift_(32).bitwise_or_(last - torch.arange(last + 1, device=x.device))
    columns = last - (key.topk(k, dim=-1).values & 0xFFFFFFFF)  # the keys all differ, so topk has no choice
    return x.gather(-1, columns).masked_fill(failed, math.nan), columns
