"""TALON, through the same `TreeBatch` that the server drives, and two variants that exist only to be measured against it.

Suffixes: B rounds, N tree nodes, L lanes, V draft vocabulary, R children a lane may place, K first-layer width, C candidates.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from eval.policies.rounds import Draft, DraftRounds
from talon_sglang.settings import DEFAULT_DEPTH_CAP
from talon_sglang.tree import TreeBatch, TreeConfig, exact_topk


class Talon:
    """With exact ancestors, as served."""

    def __init__(self, nodes: int, width: int, cap: int = DEFAULT_DEPTH_CAP, gate: float = TreeConfig.gate):
        """nodes N with the root, width K, cap in layers (0: none), gate mu. Raises ValueError (from TreeConfig) naming the field."""
        self.config = TreeConfig(nodes, width, gate, cap)
        self.name = f"talon:{nodes},{width},{cap},{gate:g}"

    def draft(self, rounds: DraftRounds) -> list[Draft]:
        return grow(rounds, TreeBatch(rounds.batch, self.config, rounds.draft_ids_V.device))


class TalonLayers:
    """The paper's ablation of the number of top-K layers (section 7, figure 7): the first `layers` layers take their K best nodes, the gate
    rules from there on. 1 is TALON, 0 gates the root's children too."""

    def __init__(self, nodes: int, width: int, layers: int, cap: int = DEFAULT_DEPTH_CAP, gate: float = TreeConfig.gate):
        """As `Talon`. Raises ValueError naming the field."""
        if layers < 0:
            raise ValueError(f"layers is {layers}: it must be at least 0")
        self.config, self.layers = TreeConfig(nodes, width, gate, cap), layers
        self.name = f"talon-layers:{nodes},{width},{layers},{cap},{gate:g}"

    def draft(self, rounds: DraftRounds) -> list[Draft]:
        return grow(rounds, _LayeredTrees(rounds.batch, self.config, self.layers))


class LaneTalon:
    """TALON with stock SGLang's draft attention: the i-th best node of a layer writes to the slots of lane i and reads the history of that
    lane (the i-th nodes of the layers before, where these were wide enough), whoever its parent is. Only the hidden state follows it."""

    def __init__(self, nodes: int, width: int, cap: int = DEFAULT_DEPTH_CAP, gate: float = TreeConfig.gate):
        """As `Talon`."""
        self.config = TreeConfig(nodes, width, gate, cap)
        self.name = f"sglang-talon:{nodes},{width},{cap},{gate:g}"

    def draft(self, rounds: DraftRounds) -> list[Draft]:
        newest_BN = torch.zeros(rounds.batch, self.config.node_budget, dtype=torch.long)  # last node of each lane; the root at first
        return grow(rounds, TreeBatch(rounds.batch, self.config), newest_BN)


def grow(rounds: DraftRounds, trees: TreeBatch, newest_BN: torch.Tensor | None = None) -> list[Draft]:
    """Draft until every tree is done. `newest_BN`: see `LaneTalon`; None: nodes attend to their ancestors."""
    if trees.num_lanes:
        trees.expand(rounds.root_log_probs())
    lanes_B = []
    while trees.num_lanes:
        round_L, node_L = trees.frontier
        count_B = torch.bincount(round_L, minlength=rounds.batch)
        lanes_B.append(count_B.tolist())
        parent_L, token_L = trees.parents_BN[round_L, node_L], trees.tokens_BN[round_L, node_L]
        sees_L = parent_L
        if newest_BN is not None:
            lane_L = torch.arange(len(round_L)) - (count_B.cumsum(0) - count_B)[round_L]
            sees_L = newest_BN[round_L, lane_L]
            newest_BN[round_L, lane_L] = node_L
        trees.expand(rounds.forward(round_L, node_L, parent_L, token_L, sees_L))
    ids_BN = rounds.draft_ids_V[trees.tokens_BN.clamp(min=0)].tolist()
    drafts = []
    for b in range(rounds.batch):
        tree = trees.tree(b)
        drafts.append(Draft(replace(tree, tokens=[-1, *ids_BN[b][1 : len(tree)]]), [lanes[b] for lanes in lanes_B if lanes[b]]))
    return drafts


class _LayeredTrees(TreeBatch):
    """`TreeBatch` with any number of top-K layers."""

    def __init__(self, batch: int, config: TreeConfig, layers: int):
        super().__init__(batch, config)
        self.top_k_layers = layers

    def expand(self, log_probs_LV: torch.Tensor) -> None:
        if (self.depth == 0) == (self.depth < self.top_k_layers):  # the rule's own cases: a top-K root, a gated layer below it
            return super().expand(log_probs_LV)
        self._degrade(~torch.isfinite(log_probs_LV.amax(dim=1)))
        if self.depth == 0:
            values_LR, token_LR = exact_topk(log_probs_LV, min(self.config.node_budget, log_probs_LV.shape[1]))
            gate_L1 = values_LR[:, :1] + math.log(self.config.gate)
            passing_LR = values_LR >= gate_L1 - torch.finfo(values_LR.dtype).eps * (1 + gate_L1.abs())  # inclusive, as `TreeBatch` has it
        else:
            values_LR, token_LR = exact_topk(log_probs_LV, min(self.config.first_layer_width, log_probs_LV.shape[1]))
            passing_LR = self._best_of_each_request(values_LR.double() + self._parent_scores()[:, None])
        token_LR, order_LR = token_LR.sort(dim=1)  # `_append` breaks ties by token
        values_LR, passing_LR = values_LR.gather(1, order_LR), passing_LR.gather(1, order_LR)
        lane_C, place_C = passing_LR.nonzero(as_tuple=True)
        self._append(lane_C, token_LR[lane_C, place_C], self._parent_scores()[lane_C] + values_LR[lane_C, place_C].double())

    def _best_of_each_request(self, scores_LR: torch.Tensor) -> torch.Tensor:
        """True at the K best candidates of each request."""
        chosen_LR = torch.zeros_like(scores_LR, dtype=torch.bool)
        for request in self._request_L.unique().tolist():
            (lane_l,) = (self._request_L == request).nonzero(as_tuple=True)
            mine_LR = scores_LR[lane_l]
            best_K = mine_LR.flatten().sort(descending=True, stable=True).indices[: self.config.first_layer_width]
            chosen_LR[lane_l[best_K // mine_LR.shape[1]], best_K % mine_LR.shape[1]] = True
        return chosen_LR
