"""TALON's draft tree: arXiv 2601.07353, Algorithm 2.

    T = {root};  P = [root];  d = 0
    while |T| < N:
        one draft forward over all nodes of P
        S = every (parent v in P, token w of the vocabulary), scored by its path probability p(v) * P_draft(w | path of v)
        if d == 0:  P = the K best of S                                   # first-layer width
        else:       P = every u in S with p(u) >= mu * (best p in S)      # the gate: one anchor for the whole layer, inclusive
        if |T| + |P| > N:  P = the N - |T| best of P                      # the budget counts the root
        T = T + P;  d += 1

The optional depth cap (not in the paper) ends the loop after that many layers.

Ties: of two candidates with the same path probability the one whose parent was drafted earlier wins, then the one with the smaller token
id; nodes enter the tree in that order. Path probabilities are sums of log-probabilities in float64, so the tree does not depend on how
requests are batched.

`TreeBatch` grows the trees of a whole batch together, every request with its own shape. `grow_tree` is the same code for one tree. The
serving worker drives `TreeBatch` itself.

Suffixes: B requests, N tree nodes, L lanes (the nodes whose children are wanted, request after request), V vocabulary, K first-layer width,
C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeConfig:
    """The tree's four settings; the defaults are the paper's (section 6.1, appendix E.1.2).

    Raises ValueError, naming the field, the value and the allowed range.
    """

    node_budget: int = 60  # N, the root included
    first_layer_width: int = 10  # K
    gate: float = 0.03  # mu, relative to the layer's best path probability
    depth_cap: int = 0  # layers at most; 0 = no cap, the paper's rule

    def __post_init__(self):
        for field, value, least in (
            ("node_budget", self.node_budget, 1),
            ("first_layer_width", self.first_layer_width, 1),
            ("depth_cap", self.depth_cap, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field} is {value!r}: it must be a whole number of at least {least}")
        if not isinstance(self.gate, (int, float)) or not 0 < self.gate <= 1:
            raise ValueError(f"gate is {self.gate!r}: it must be greater than 0 and at most 1")

    @property
    def max_depth(self) -> int:
        """No tree is deeper than this. (By the paper's rule it is N - K unless the vocabulary is smaller than K.)"""
        return min(self.node_budget - 1, self.depth_cap or self.node_budget)


@dataclass(frozen=True)
class DraftTree:
    """One tree as parallel lists: root first, every parent before its children."""

    tokens: list[int]  # tokens[0] is the root; grow_tree does not know it and puts -1
    parents: list[int]  # node indices; -1 for the root
    depths: list[int]  # 0 for the root
    log_probs: list[float]  # natural log of the path probability; 0.0 for the root
    degraded: bool = False  # the draft gave a non-finite distribution: the tree is the root alone

    def __len__(self) -> int:
        return len(self.tokens)


def grow_tree(next_log_probs: Callable[[list[tuple[int, ...]]], torch.Tensor], config: TreeConfig) -> DraftTree:
    """Grow one tree.

    Args:
        next_log_probs: maps a list of token paths (the empty tuple is the root) to a `[len(paths), vocab]` tensor of draft
            log-probabilities. -inf is a token of probability zero; a row with NaN, +inf or nothing but -inf counts as a failed draft and
            degrades the tree to its root.
        config: the tree's settings.
    """
    trees = TreeBatch(1, config)
    paths: list[tuple[int, ...]] = [()]
    while trees.num_lanes:
        _, lanes = trees.frontier
        trees.expand(next_log_probs([paths[node] for node in lanes.tolist()]))
        for node in range(len(paths), int(trees.size_B[0])):
            paths.append(paths[int(trees.parents_BN[0, node])] + (int(trees.tokens_BN[0, node]),))
    return trees.tree(0)


class TreeBatch:
    """The growing trees of B requests.

    While `num_lanes` is not zero: compute the draft distribution of every lane in `frontier`, then call `expand`. Nodes of request b are
    0 .. size_B[b]-1; the rest of a row is padding (parent -1, token 0).
    """

    def __init__(self, batch: int, config: TreeConfig, device: torch.device | str = "cpu"):
        self.config, self.depth = config, 0
        shape = (batch, config.node_budget)
        self.tokens_BN = torch.zeros(shape, dtype=torch.int64, device=device)
        self.tokens_BN[:, 0] = -1
        self.parents_BN = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.depths_BN = torch.zeros(shape, dtype=torch.int64, device=device)
        self.log_probs_BN = torch.zeros(shape, dtype=torch.float64, device=device)
        # each node sees itself and its path
        self.ancestors_BNN = torch.eye(config.node_budget, dtype=torch.bool, device=device).repeat(batch, 1, 1)
        self.size_B = torch.ones(batch, dtype=torch.int64, device=device)
        self.layers_B = torch.zeros(batch, dtype=torch.int64, device=device)  # draft distributions used per request: the paper's delta
        self.degraded_B = torch.zeros(batch, dtype=torch.bool, device=device)
        self._set_frontier(torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.int64, device=device))

    @property
    def frontier(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(request_L, node_L) of the lanes whose children are wanted, sorted by request."""
        return self._request_L, self._node_L

    @property
    def num_lanes(self) -> int:
        return self._request_L.numel()

    def tree(self, b: int) -> DraftTree:
        n = int(self.size_B[b])
        rows = (self.tokens_BN, self.parents_BN, self.depths_BN, self.log_probs_BN)
        return DraftTree(*(row[b, :n].tolist() for row in rows), degraded=bool(self.degraded_B[b]))

    def expand(self, log_probs_LV: torch.Tensor) -> None:
        """Add one layer from the full draft distribution of every lane, in `frontier`'s order."""
        if self.depth == 0:
            width = min(self.config.first_layer_width, self.config.node_budget, log_probs_LV.shape[1])
            return self.expand_first(*exact_topk(log_probs_LV, width))
        best_L = log_probs_LV.amax(dim=1).double()  # exact: the largest child of a lane is its parent's score plus this
        self._degrade(~torch.isfinite(best_L))
        lane_C, token_C = self._gated_candidates(log_probs_LV, best_L)
        self._append(lane_C, token_C, self._parent_scores()[lane_C] + log_probs_LV[lane_C, token_C].double())

    def expand_first(self, log_probs_BK: torch.Tensor, tokens_BK: torch.Tensor) -> None:
        """Add the first layer from each request's `exact_topk` (at least K columns, or the whole vocabulary)."""
        batch, columns = tokens_BK.shape
        width = min(columns, self.config.first_layer_width)
        self._degrade(~torch.isfinite(log_probs_BK[:, 0]))
        lane_C = torch.arange(batch, device=tokens_BK.device).repeat_interleave(width)
        self._append(lane_C, tokens_BK[:, :width].flatten(), log_probs_BK[:, :width].flatten().double())

    def _gated_candidates(self, log_probs_LV, best_L):
        """(lane_C, token_C), row-major, of every candidate that passes the gate, or a superset of those that the budget cut can use."""
        score_L = self._parent_scores()
        anchor_B = torch.full_like(self.log_probs_BN[:, 0], -math.inf)
        anchor_B.scatter_reduce_(0, self._request_L, self._alive(score_L + best_L), "amax")
        gate_B = anchor_B + math.log(self.config.gate)
        threshold_L = (gate_B[self._request_L] - score_L).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        threshold_L[self.degraded_B[self._request_L]] = math.inf
        # A cheap pass in the logits' own precision with a margin, then the exact gate in float64 on the few that are left.
        slack_L = 1e-4 * (1 + threshold_L.abs())
        passing_LV = log_probs_LV >= (threshold_L - slack_L.nan_to_num(posinf=0.0)).to(log_probs_LV.dtype)[:, None]
        lanes, room = log_probs_LV.shape[0], self.config.node_budget - 2
        if int(passing_LV.sum()) > 64 * room * lanes > 0:  # a flat draft: no lane can place more than `room` children, so sort only those
            _, token_LR = exact_topk(log_probs_LV, min(room, log_probs_LV.shape[1]))
            lane_C = torch.arange(lanes, device=token_LR.device).repeat_interleave(token_LR.shape[1])
            token_C = token_LR.sort(dim=1).values.flatten()
        else:
            lane_C, token_C = passing_LV.nonzero(as_tuple=True)
        score_C, gate_C = log_probs_LV[lane_C, token_C].double() + score_L[lane_C], gate_B[self._request_L[lane_C]]
        # Inclusive, up to the rounding of the log-probabilities: 0.05 passes a gate of 0.1 under an anchor of 0.5 in float32 too.
        exact_C = score_C >= gate_C - torch.finfo(log_probs_LV.dtype).eps * (1 + gate_C.abs())
        return lane_C[exact_C], token_C[exact_C]

    def _append(self, lane_C, token_C, score_C) -> None:
        """Budget cut, then add the candidates as nodes; `lane_C, token_C` ascend, so that stable sorts break ties by parent, then token."""
        request_C, node_C = self._request_L[lane_C], self._node_L[lane_C]
        self.layers_B[self._request_L] += 1  # an indexed += adds once per request, however many lanes it has
        order = score_C.sort(descending=True, stable=True).indices
        order = order[request_C[order].sort(stable=True).indices]
        request_C = request_C[order]
        count_B = torch.bincount(request_C, minlength=self.size_B.numel())
        rank_C = torch.arange(order.numel(), device=order.device) - (count_B.cumsum(0) - count_B)[request_C]
        fits_C = (rank_C < self.config.node_budget - self.size_B[request_C]) & ~self.degraded_B[request_C]
        order, request, node = order[fits_C], request_C[fits_C], (self.size_B[request_C] + rank_C)[fits_C]
        parent = node_C[order]

        self.depth += 1
        self.tokens_BN[request, node] = token_C[order]
        self.parents_BN[request, node] = parent
        self.depths_BN[request, node] = self.depth
        self.log_probs_BN[request, node] = score_C[order]
        self.ancestors_BNN[request, node] |= self.ancestors_BNN[request, parent]
        self.size_B += torch.bincount(request, minlength=self.size_B.numel())
        growing = (self.size_B < self.config.node_budget)[request] & (self.depth != self.config.depth_cap)
        self._set_frontier(request[growing], node[growing])

    def _set_frontier(self, request_L, node_L) -> None:
        if self.config.node_budget == 1:
            request_L, node_L = request_L[:0], node_L[:0]
        self._request_L, self._node_L = request_L, node_L

    def _degrade(self, failed_L) -> None:
        """A request with a non-finite lane falls back to its root alone: this round is plain decoding for it."""
        failed = self._request_L[failed_L]
        self.degraded_B[failed] = True
        self.size_B[failed] = 1
        self.tokens_BN[failed, 1:], self.parents_BN[failed, 1:], self.depths_BN[failed, 1:] = 0, -1, 0

    def _parent_scores(self):
        return self.log_probs_BN[self._request_L, self._node_L]

    def _alive(self, value_L):
        return torch.where(self.degraded_B[self._request_L], -math.inf, value_L)


def exact_topk(x_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row, in descending order, ties to the smaller column; `torch.topk` leaves both open.

    Returns (values_RK, columns_RK). A row with NaN, +inf or nothing but -inf returns NaN values. Raises ValueError for k outside 1 .. V.
    """
    if not 1 <= k <= x_RV.shape[1]:
        raise ValueError(f"k is {k}: it must be between 1 and the row length {x_RV.shape[1]}")
    failed_R = ~torch.isfinite(x_RV.amax(dim=1))
    x_RV = x_RV.masked_fill(failed_R[:, None], 0.0)
    kth_R1 = x_RV.topk(k, dim=1).values[:, -1:]
    above_RV, equal_RV = x_RV > kth_R1, x_RV == kth_R1
    wanted_R1 = k - above_RV.sum(dim=1, keepdim=True)
    chosen_RV = above_RV | (equal_RV & (equal_RV.cumsum(dim=1) <= wanted_R1))
    columns_RK = chosen_RV.nonzero()[:, 1].view(-1, k)
    values_RK, order_RK = x_RV.gather(1, columns_RK).sort(dim=1, descending=True, stable=True)
    return values_RK.masked_fill(failed_R[:, None], math.nan), columns_RK.gather(1, order_RK)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The token path from (not including) the root to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:]):
        found.append(found[parent] + (token,))
    return found


def children(parents: Sequence[int]) -> list[list[int]]:
    """Node indices of each node's children, in drafting order."""
    found: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[parent].append(node)
    return found
