"""OPT-Tree (arXiv 2406.17276), on an EAGLE-3 head: each layer forwards as many nodes as the tree may hold, and drafting stops when another
layer no longer raises the expected accept length enough.

A layer's n = N - 1 nodes are the n best of all children of the layer before, by path probability. E, the sum of the n largest path
probabilities so far, is the draft's own estimate of the accepted tokens. After a layer, go on while E has grown by more than `threshold`
and `max_depth` is not reached; the tree is then the n best nodes of all layers. (The public code's default threshold is 0.5 and its E lags
one layer behind; here E includes the layer just drafted.)

Suffixes: B rounds, n nodes of a layer, L lanes, V draft vocabulary.
"""

from __future__ import annotations

import torch

from eval.policies.rounds import Draft, DraftRounds, best_children, ranked_tree


class OptTree:
    def __init__(self, nodes: int, threshold: float = 0.5, max_depth: int = 10):
        """nodes N with the root. Raises ValueError naming the field."""
        if nodes < 2 or max_depth < 1 or threshold < 0:
            raise ValueError(f"N={nodes}, threshold={threshold}, depth={max_depth}: want N >= 2, threshold >= 0 and depth >= 1")
        self.nodes, self.threshold, self.max_depth = nodes, threshold, max_depth
        self.name = f"opt-tree:{nodes},{threshold:g},{max_depth}"

    def draft(self, rounds: DraftRounds) -> list[Draft]:
        score_Bn, token_Bn = best_children(rounds.root_log_probs(), self.nodes - 1)
        count = token_Bn.shape[1]
        found = [_Candidates(rounds.draft_ids_V[ids].tolist(), scores.tolist()) for ids, scores in zip(token_Bn, score_Bn)]
        parent_Bn, going_B = torch.zeros_like(token_Bn), torch.arange(rounds.batch)
        for depth in range(1, self.max_depth):
            keep = [i for i, b in enumerate(going_B.tolist()) if found[b].gain(count) > self.threshold]
            if not keep:
                break
            going_B, token_Bn, score_Bn, parent_Bn = going_B[keep], token_Bn[keep], score_Bn[keep], parent_Bn[keep]
            slot_Bn = (1 + (depth - 1) * count + torch.arange(count)).expand(len(keep), -1)
            log_probs_LV = rounds.forward(going_B.repeat_interleave(count), slot_Bn.flatten(), parent_Bn.flatten(), token_Bn.flatten())
            local_Ln, child_Ln = best_children(log_probs_LV, count)
            scores = (score_Bn[:, :, None] + local_Ln.view(len(keep), count, -1)).flatten(1)
            score_Bn, index_Bn = scores.topk(count, dim=1)
            token_Bn = child_Ln.view(len(keep), -1).gather(1, index_Bn)
            parent_Bn = slot_Bn.gather(1, index_Bn // child_Ln.shape[1])
            layers = zip(going_B.tolist(), rounds.draft_ids_V[token_Bn].tolist(), (parent_Bn - 1).tolist(), score_Bn.tolist())
            for b, ids, parents, layer in layers:
                found[b].add(ids, parents, layer)
        return [Draft(ranked_tree(c.ids, c.parents, c.depths, c.scores, self.nodes), [count] * (c.depths[-1] - 1)) for c in found]


class _Candidates:
    """One round's nodes so far; a node's slot is its place in the lists plus one."""

    def __init__(self, ids: list[int], scores: list[float]):
        self.ids, self.scores, self.parents, self.depths, self.expected = ids, scores, [-1] * len(ids), [1] * len(ids), 0.0

    def add(self, ids: list[int], parents: list[int], scores: list[float]) -> None:
        self.ids, self.parents, self.scores = self.ids + ids, self.parents + parents, self.scores + scores
        self.depths += [self.depths[-1] + 1] * len(ids)

    def gain(self, count: int) -> float:
        """How much the newest layer has raised the expected accept length of the best `count` nodes."""
        before = self.expected
        self.expected = float(torch.tensor(self.scores, dtype=torch.float64).topk(count).values.exp().sum())
        return self.expected - before
