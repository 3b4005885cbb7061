"""The verify mask in the layout that SGLang's GPU backends read.

Suffixes: B requests, N tree nodes, E entries of the flat mask.
"""

from __future__ import annotations

import torch


def full_mask(mask_BNN: torch.Tensor, seq_lens_B: torch.Tensor, entries: int) -> torch.Tensor:
    """SGLang's FULL_MASK: request after request, row after row, who of the prefix (all) and of the tree (`mask_BNN`) a node sees.

    `entries` = N x sum of seq_lens + B x N x N, known on the host.
    """
    batch, n = mask_BNN.shape[:2]
    width_B = seq_lens_B.long() + n
    end_B = (width_B * n).cumsum(0)
    entry_E = torch.arange(entries, device=mask_BNN.device)
    request_E = torch.searchsorted(end_B, entry_E, right=True).clamp(max=batch - 1)
    within_E = entry_E - (end_B - width_B * n)[request_E]
    row_E, column_E = within_E // width_B[request_E], within_E % width_B[request_E] - seq_lens_B.long()[request_E]
    return (column_E < 0) | mask_BNN[request_E, row_E.clamp(max=n - 1), column_E.clamp(min=0)]
