"""Lossless acceptance for sampled requests: draw the target's token at each node with SGLang's own sampler and go down while it is a child.

The tree is a deterministic function of the prefix, so each drawn token has exactly the distribution that plain decoding would draw it from,
whatever the tree looks like (docs: talon paper, appendix B, with point-mass proposals). A drawn token that was drafted costs no further
target
forward; the first one that was not is the round's bonus.

Suffixes: B requests, N tree nodes per request, V target vocabulary.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput


def accept_sampled(
    sampler, sampling_info, logits, positions, *, predicts, accept_index, accept_token_num, candidates, retrieve_next_token,
    retrieve_next_sibling, **_,
):  # fmt: skip
    """Drop-in for SGLang's `verify_tree_greedy_func`, with the same outputs: writes and returns `predicts` [B*N] (the drawn token after
    each
    accepted node), `accept_index` [B, depth + 1] (global node indices, -1 after the end) and `accept_token_num` [B] (drafts accepted).

    Args:
        sampler: SGLang's Sampler module; gives one token per row of logits, by `sampling_info` and the row's position (sampling seeds).
        logits: [B*N, V], adjusted already.
        positions: [B*N].
    """
    batch, n = candidates.shape
    logits_BNV, positions_BN = logits.view(batch, n, -1), positions.view(batch, n)
    row_B = torch.arange(batch, device=candidates.device)
    node_B = torch.zeros_like(row_B)
    walking_B = torch.ones_like(row_B, dtype=torch.bool)
    accept_index[:, 0] = row_B * n
    accept_token_num.zero_()
    for step in range(1, accept_index.shape[1] + 1):
        token_B = draw(sampler, sampling_info, logits_BNV[row_B, node_B], positions_BN[row_B, node_B])
        last_B = row_B * n + node_B
        predicts[last_B[walking_B]] = token_B[walking_B].to(predicts.dtype)
        if step == accept_index.shape[1]:
            break
        child_B = matching_child(token_B, node_B, candidates, retrieve_next_token, retrieve_next_sibling)
        walking_B &= child_B >= 0
        if not walking_B.any():
            break
        node_B = torch.where(walking_B, child_B, node_B)
        accept_index[walking_B, step] = (row_B * n + node_B)[walking_B].to(accept_index.dtype)
        accept_token_num += walking_B.to(accept_token_num.dtype)
    return predicts, accept_index, accept_token_num


def draw(sampler, sampling_info, logits_BV, position_B):
    """One token per request. The sampler works in place, so it gets a copy of the rows (advanced indexing made one)."""
    output = LogitsProcessorOutput(next_token_logits=logits_BV)
    none = [0] * len(position_B)
    return sampler(output, sampling_info, False, none, [None] * len(position_B), position_B)


def matching_child(token_B, node_B, candidates_BN, first_child_BN, next_sibling_BN):
    """The child of each node that carries the token, or -1. Children are distinct, so there is at most one."""
    row_B = torch.arange(token_B.numel(), device=token_B.device)
    child_B = first_child_BN[row_B, node_B]
    while True:
        looking_B = (child_B >= 0) & (candidates_BN[row_B, child_B.clamp(min=0)] != token_B)
        if not looking_B.any():
            return child_B
        child_B = torch.where(looking_B, next_sibling_BN[row_B, child_B.clamp(min=0)], child_B)
