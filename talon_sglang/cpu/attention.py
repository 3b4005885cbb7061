"""Attention of the CPU stand-ins: which KV each new token sees, worked out once a forward, and softmax attention over it.

Suffixes: B requests, N new tokens (tree nodes) of each, R rows (new tokens of all requests), L KV length, S KV slots, H query heads, G KV
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass
class Span:
    """Requests that attention takes together: of one number of new tokens, padded to one KV length.

    rows: where their new tokens are in the batch, request after request (a slice, or indices)
    slots_BL: KV slots; any valid ones beyond a request's length
    visible_BNL: which of them a new token sees; None = all
    """

    rows: slice | torch.Tensor
    slots_BL: torch.Tensor
    visible_BNL: torch.Tensor | None = None
    bias: dict = field(default_factory=dict)  # visible_BNL as SDPA wants it, by head grouping and dtype

    def attend(self, q_RHD, keys_SGD, values_SGD, scale: float):
        """[rows, H, D] for the rows of this span."""
        batch, length = self.slots_BL.shape
        q_RHD = q_RHD[self.rows]
        new, (heads, size), kv_heads = q_RHD.shape[0] // batch, q_RHD.shape[1:], keys_SGD.shape[1]
        group = heads // kv_heads
        # The query heads of one KV head are stacked as rows, so that K and V need no copies for them.
        q = q_RHD.view(batch, new, kv_heads, group, size).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * new, size)
        slots = self.slots_BL.view(-1)
        k, v = (
            # Whole rows: eight times as fast as indexing for eight requests.
            buffer.flatten(1).index_select(0, slots).view(batch, length, kv_heads, -1).transpose(1, 2).to(q.dtype)
            for buffer in (keys_SGD, values_SGD)
        )
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(group, q.dtype), scale=scale)
        return o.reshape(batch, kv_heads, group, new, -1).permute(0, 3, 1, 2, 4).reshape(batch * new, heads, -1)

    def mask(self, group: int, dtype: torch.dtype):
        if self.visible_BNL is None:
            return None
        if (group, dtype) not in self.bias:
            hidden = torch.zeros(self.visible_BNL.shape, dtype=dtype).masked_fill_(~self.visible_BNL, float("-inf"))
            self.bias[group, dtype] = hidden.repeat(1, group, 1)[:, None]
        return self.bias[group, dtype]


class Kept:
    """The spans of the forward that is running: the same for all of its layers.

    They belong to the tensors that they were made from, and to no forward after the next `forget`.
    """

    sources: tuple = ()
    spans: list[Span] = []

    @classmethod
    def of(cls, sources: tuple, build: Callable[..., list[Span]]) -> list[Span]:
        if len(sources) != len(cls.sources) or any(new is not old for new, old in zip(sources, cls.sources)):
            cls.spans, cls.sources = build(*sources), sources
        return cls.spans

    @classmethod
    def forget(cls, *args, **kwargs) -> None:
        cls.sources, cls.spans = (), []


def decode_spans(table, request_B, length_B) -> list[Span]:
    """One new token a request, which sees all of its KV."""
    lengths = length_B.tolist()
    if worth_padding(lengths):
        slots_BL, inside_BL = padded_slots(table, request_B, length_B, max(lengths))
        return [Span(slice(0, len(lengths)), slots_BL, inside_BL[:, None])]
    return [Span(slice(b, b + 1), table[row, : lengths[b]].long()[None]) for b, row in enumerate(request_B.tolist())]


def extend_spans(table, request_B, length_B, new_B, first_B, tree_mask, is_causal: bool) -> list[Span]:
    """New tokens, already in the KV: causal among themselves, or by `tree_mask` (flat N * N per request), or each sees all."""
    lengths, news = length_B.tolist(), new_B.tolist()
    if is_causal and len(set(news)) == 1 and worth_padding(lengths):
        batch, n, longest = len(lengths), news[0], max(lengths)
        slots_BL, _ = padded_slots(table, request_B, length_B, longest)
        offset_BNL = torch.arange(longest) - (length_B.long()[:, None, None] - n)  # 0 is the first new token
        if tree_mask is None:
            visible_BNL = offset_BNL <= torch.arange(n)[:, None]
        else:
            tree_BNN = tree_mask[: batch * n * n].view(batch, n, n)
            inside_BNL = offset_BNL.clamp(0, n - 1).expand(batch, n, longest)
            visible_BNL = (offset_BNL < 0) | (tree_BNN.gather(2, inside_BNL) & (offset_BNL < n))
        return [Span(slice(0, batch * n), slots_BL, visible_BNL)]
    spans, mask_at = [], 0
    for row, length, new, first in zip(request_B.tolist(), lengths, news, first_B.tolist()):
        visible_NL = None
        if is_causal:
            visible_NL = torch.ones(new, length, dtype=torch.bool)
            if tree_mask is None:
                visible_NL[:, length - new :] = torch.ones(new, new, dtype=torch.bool).tril()
            else:
                visible_NL[:, length - new :] = tree_mask[mask_at : mask_at + new * new].view(new, new)
                mask_at += new * new
        slots_L = table[row, :length].long()
        spans.append(Span(slice(first, first + new), slots_L[None], None if visible_NL is None else visible_NL[None]))
    return spans


def worth_padding(lengths: list[int]) -> bool:
    return len(lengths) > 1 and 2 * max(lengths) * len(lengths) <= 3 * sum(lengths)


def padded_slots(table, request_B, length_B, longest: int):
    """(slots_BL, inside_BL): a request's first slot stands in for those beyond its length, where the table holds anything."""
    slots_BL = table[request_B.long(), :longest].long()
    inside_BL = torch.arange(longest) < length_B.long()[:, None]
    return torch.where(inside_BL, slots_BL, slots_BL[:, :1]), inside_BL


def register_hooks() -> None:
    """A backend that prepares for a forward ends what was kept for the one before."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
    HookRegistry.register(f"{backend}.init_forward_metadata", Kept.forget, HookType.AFTER)
