"""TALON, through the same `TreeBatch` that the server drives, with exact ancestors."""

from __future__ import annotations

from dataclasses import replace

import torch

from eval.policies.rounds import Draft, DraftRounds
from talon_sglang.settings import DEFAULT_DEPTH_CAP
from talon_sglang.tree import TreeBatch, TreeConfig


class Talon:
    def __init__(self, nodes: int, width: int, cap: int = DEFAULT_DEPTH_CAP, gate: float = TreeConfig.gate):
        """nodes N with the root, width K, cap in layers (0: none), gate mu. Raises ValueError (from TreeConfig) naming the field."""
        self.config = TreeConfig(nodes, width, gate, cap)
        self.name = f"talon:{nodes},{width},{cap},{gate:g}"

    def draft(self, rounds: DraftRounds) -> list[Draft]:
        trees = TreeBatch(rounds.batch, self.config, rounds.draft_ids_V.device)
        if trees.num_lanes:
            trees.expand(rounds.root_log_probs())
        lanes_B = []
        while trees.num_lanes:
            round_L, node_L = trees.frontier
            lanes_B.append(torch.bincount(round_L, minlength=rounds.batch).tolist())
            parent_L, token_L = trees.parents_BN[round_L, node_L], trees.tokens_BN[round_L, node_L]
            trees.expand(rounds.forward(round_L, node_L, parent_L, token_L))
        ids_BN = rounds.draft_ids_V[trees.tokens_BN.clamp(min=0)].tolist()
        drafts = []
        for b in range(rounds.batch):
            tree = trees.tree(b)
            drafts.append(Draft(replace(tree, tokens=[-1, *ids_BN[b][1 : len(tree)]]), [lanes[b] for lanes in lanes_B if lanes[b]]))
        return drafts
