"""EAGLE-2/3's tree as SGLang 0.5.23 draws it (`select_top_k_tokens`, `organize_draft_results`).

Each step forwards K lanes and scores the K best children of each: all K*K are candidates, the K best become the next lanes. After the last
step the N - 1 best of *all* candidates make the tree, whether they were ever lanes or not.

`approximate` is stock SGLang's draft attention: lane t writes to slot (t, step) and reads slots (t, 0) .. (t, step), the history of its own
slots, although after a selection its parent may stand in another lane. Only the hidden state follows the parent.

Suffixes: B rounds, K lanes of a round, C candidates so far, V draft vocabulary.
"""

from __future__ import annotations

import torch

from eval.policies.rounds import Draft, DraftRounds, best_children, ranked_tree


class Eagle:
    def __init__(self, width: int, steps: int, nodes: int, approximate: bool = False):
        """width K, steps, nodes N with the root. Raises ValueError when the candidates cannot fill the tree."""
        if width < 1 or steps < 1 or not 2 <= nodes <= 1 + width + width * width * (steps - 1):
            most = 1 + width + width * width * (steps - 1)
            raise ValueError(f"K={width}, steps={steps}, N={nodes}: K and steps must be at least 1 and N in 2 .. {most}")
        self.width, self.steps, self.nodes, self.approximate = width, steps, nodes, approximate
        self.name = f"{'sglang-eagle3' if approximate else 'eagle3'}:{width},{steps},{nodes}"

    def draft(self, rounds: DraftRounds) -> list[Draft]:
        batch = rounds.batch
        score_BK, token_BK = best_children(rounds.root_log_probs(), self.width)
        width = token_BK.shape[1]  # K, or the whole vocabulary
        round_L = torch.arange(batch).repeat_interleave(width)
        candidates = [(token_BK, torch.full_like(token_BK, -1), score_BK)]  # (draft id, parent candidate, score)
        lane_candidate_BK = torch.arange(width).expand(batch, -1)
        parent_slot_BK = torch.zeros_like(token_BK)
        for step in range(1, self.steps):
            slot_BK = (1 + (step - 1) * width + torch.arange(width)).expand(batch, -1)
            history_BK = (slot_BK - width).clamp(min=0) if self.approximate else parent_slot_BK
            log_probs_LV = rounds.forward(round_L, slot_BK.flatten(), parent_slot_BK.flatten(), token_BK.flatten(), history_BK.flatten())
            local_LK, child_LK = best_children(log_probs_LV, width)
            scores_BC = (score_BK[:, :, None] + local_LK.view(batch, width, width)).flatten(1)
            tokens_BC = child_LK.view(batch, width * width)
            first = sum(tokens.shape[1] for tokens, _, _ in candidates)
            candidates.append((tokens_BC, lane_candidate_BK.repeat_interleave(width, dim=1), scores_BC))
            score_BK, index_BK = scores_BC.topk(width, dim=1)
            token_BK, lane_candidate_BK = tokens_BC.gather(1, index_BK), first + index_BK
            parent_slot_BK = slot_BK.gather(1, index_BK // width)
        tokens_BC, parents_BC, scores_BC = (torch.cat(parts, dim=1) for parts in zip(*candidates))
        depths = [1] * width + [step + 1 for step in range(1, self.steps) for _ in range(width * width)]
        rows = zip(rounds.draft_ids_V[tokens_BC].tolist(), parents_BC.tolist(), scores_BC.tolist())
        return [Draft(ranked_tree(ids, parents, depths, scores, self.nodes), [width] * (self.steps - 1)) for ids, parents, scores in rows]
