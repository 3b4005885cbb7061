"""SGLang's EAGLE3 with topk 1: the draft's best token, `steps` times over."""

from __future__ import annotations

import torch

from eval.policies.rounds import Draft, DraftRounds, best_children, ranked_tree


class Chain:
    def __init__(self, steps: int):
        if steps < 1:
            raise ValueError(f"steps is {steps}: it must be at least 1")
        self.steps, self.name = steps, f"chain:{steps}"

    def draft(self, rounds: DraftRounds) -> list[Draft]:
        all_B = torch.arange(rounds.batch)
        log_probs_BV, score_B, tokens, scores = rounds.root_log_probs(), torch.zeros(rounds.batch, dtype=torch.float64), [], []
        for step in range(1, self.steps + 1):
            best_B1, token_B1 = best_children(log_probs_BV, 1)
            score_B = score_B + best_B1[:, 0]
            tokens.append(token_B1[:, 0])
            scores.append(score_B)
            if step < self.steps:
                slot_B = torch.full_like(all_B, step)
                log_probs_BV = rounds.forward(all_B, slot_B, slot_B - 1, tokens[-1])
        ids_BS, scores_BS = rounds.draft_ids_V[torch.stack(tokens, 1)].tolist(), torch.stack(scores, 1).tolist()
        parents, depths = list(range(-1, self.steps - 1)), list(range(1, self.steps + 1))
        return [
            Draft(ranked_tree(ids, parents, depths, score, self.steps + 1), [1] * (self.steps - 1)) for ids, score in zip(ids_BS, scores_BS)
        ]
