"""Rounds without a draft. Under a batch budget (settings.py) many requests at a time get trees of the root alone: plain decoding, in which
the draft does not run at all. What it would have read stays with each request, and once trees grow again the draft reads it in one forward.

A request that ends before that never pays for it. Its tokens then lie in the prefix cache without draft KV: who continues from there gets
worse drafts for it (never other tokens).

Suffixes: B requests, P postponed tokens of one request, F size of the target's features (three hidden states), H hidden size, K root
candidates, V draft vocabulary.
"""

from __future__ import annotations

from collections import deque

import torch

MOST_TOKENS = 512  # per request; of a longer stretch only the end is read, which is where the draft looks most


def postpone(reqs, features_BF: torch.Tensor) -> None:
    """Keep, for the token that each request just committed, what draft extend would have read beside it."""
    for req, features_F in zip(reqs, features_BF):
        if not hasattr(req, "talon_postponed"):
            req.talon_postponed = deque(maxlen=MOST_TOKENS)
        req.talon_postponed.append(features_F.clone())


def forget(reqs) -> None:
    """For requests that are prefilled (again): the draft reads all of their tokens there."""
    for req in reqs:
        if hasattr(req, "talon_postponed"):
            req.talon_postponed.clear()


def postponed(req) -> torch.Tensor | None:
    """The features [P, F] that the draft has to read before it can draft for this request; None when it is up to date."""
    kept = getattr(req, "talon_postponed", None)
    return torch.stack(tuple(kept)) if kept else None


def empty_draft_state(requests: int, width: int, hidden_size: int, dtype: torch.dtype, device) -> tuple[torch.Tensor, ...]:
    """In place of the root candidates and hidden states that draft extend hands to the next round: (log_probs_BK, tokens_BK, hidden_BH)."""
    log_probs_BK = torch.zeros(requests, width, device=device)
    return log_probs_BK, log_probs_BK.long(), torch.zeros(requests, hidden_size, dtype=dtype, device=device)
