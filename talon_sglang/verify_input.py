"""From grown trees to SGLang's target verify: tokens, positions, mask and retrieval links. The width is always N, so verify and its graphs
do not see the shape.

A tree may have fewer than N nodes (depth cap, failed draft). The rest of its row is filler: the root's token at the root's position, seen
by nobody and linked to nothing, so that verify can never accept it.

Suffixes: B requests, N node budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from talon_sglang.tree import TreeBatch


@dataclass
class TalonVerifyInput(EagleVerifyInput):
    @property
    def tree_topk(self) -> int:
        return -1  # SGLang's sign for an irregular tree


def retrieval_links(parents_BN: torch.Tensor, size_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first child, next sibling) of each node, -1 for none; siblings in node order, which is drafting order: best first."""
    n = parents_BN.shape[1]
    node_N = torch.arange(n, device=parents_BN.device)
    parents_BN = torch.where((node_N >= 1) & (node_N < size_B[:, None]), parents_BN, -1)
    child_BNN = parents_BN[:, None, :] == node_N[:, None]  # [b, p, c]: p is c's parent
    sibling_BNN = (parents_BN[:, None, :] == parents_BN[:, :, None]) & (parents_BN >= 0)[:, None, :] & (node_N > node_N[:, None])
    return first_true(child_BNN), first_true(sibling_BNN)


def first_true(x_BNN: torch.Tensor) -> torch.Tensor:
    """Column of the first True of each row, -1 if there is none."""
    return torch.where(x_BNN.any(-1), x_BNN.int().argmax(-1), -1)


def build_verify_input(trees: TreeBatch, root_tokens_B, target_tokens_BN, seq_lens_B, slots_BN) -> TalonVerifyInput:
    """
    Args:
        root_tokens_B: the last committed token of each request.
        target_tokens_BN: the nodes' tokens as target ids (column 0 and filler are overwritten).
        seq_lens_B: committed length, the root's position.
        slots_BN: KV slots of the verify window.
    """
    batch, n = target_tokens_BN.shape
    device = target_tokens_BN.device
    live_BN = torch.arange(n, device=device) < trees.size_B[:, None]
    drafted_BN = live_BN.clone()
    drafted_BN[:, 0] = False
    first_child_BN, next_sibling_BN = retrieval_links(trees.parents_BN, trees.size_B)
    mask_BNN = trees.ancestors_BNN & live_BN[:, :, None]
    mask_BNN[:, :, 0] = True  # filler sees the root, so that no row of the mask is empty of tree nodes
    return TalonVerifyInput(
        draft_token=torch.where(drafted_BN, target_tokens_BN, root_tokens_B.long()[:, None]).flatten(),
        custom_mask=mask_BNN.flatten(),
        positions=(seq_lens_B.long()[:, None] + trees.depths_BN * live_BN).flatten(),
        retrieve_index=torch.arange(batch * n, device=device).view(batch, n),
        retrieve_next_token=first_child_BN,
        retrieve_next_sibling=next_sibling_BN,
        retrieve_cum_len=None,
        spec_steps=trees.config.max_depth,
        topk=-1,
        draft_token_num=n,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        prepared_out_cache_loc=slots_BN.flatten(),
    )
