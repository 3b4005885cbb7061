"""RMSNorm and rotary embedding in a third of the operators.

On a CPU without AMX SGLang computes them in plain PyTorch, ten to twenty operators each; with a small model their dispatch takes as long as
the matrix products. What these shorter forms do not cover goes to SGLang's own.

Suffixes: T tokens, A heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(sglang_forward, norm, x, residual=None, post_residual_addition=None, *args, **kwargs):
    """`RMSNorm.forward_native`. In bf16 the sum with the residual is rounded before it is normalised, as in Transformers, not after."""
    simple = norm.variance_size_override is None and norm.override_orig_dtype is None and post_residual_addition is None
    same_type = norm.weight.dtype == x.dtype and not norm.fp32_residual and not norm.cast_x_before_out_mul
    if not (simple and same_type and x.shape[-1] == norm.hidden_size):
        return sglang_forward(norm, x, residual, post_residual_addition, *args, **kwargs)
    total = x if residual is None else x + residual
    normed = F.rms_norm(total, (norm.hidden_size,), norm.weight, norm.variance_epsilon)
    return normed if residual is None else (normed, total)


class Rotation:
    """Cosines and signed sines [T, 1, D] of one set of positions: the same for all layers of a forward, and for queries and keys."""

    def __init__(self, cos_sin_cache, positions_T, dtype):
        self.cache, self.positions_T, self.dtype = cos_sin_cache, positions_T.clone(), dtype
        cos_TD, sin_TD = cos_sin_cache.index_select(0, positions_T).to(dtype).chunk(2, dim=-1)
        self.cos_T1D = torch.cat((cos_TD, cos_TD), -1)[:, None]
        self.sin_T1D = torch.cat((-sin_TD, sin_TD), -1)[:, None]

    def fits(self, cos_sin_cache, positions_T, dtype) -> bool:
        return self.cache is cos_sin_cache and self.dtype == dtype and torch.equal(self.positions_T, positions_T)

    def turn(self, x, head_size: int):
        x_TAD = x.view(x.shape[0], -1, head_size)
        halves_swapped = x_TAD.roll(head_size // 2, -1)
        return torch.addcmul(x_TAD * self.cos_T1D, halves_swapped, self.sin_T1D).view(x.shape)


def rotary_embedding(sglang_forward, rope, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """`RotaryEmbedding.forward_native`."""
    plain = offsets is None and fused_set_kv_buffer_arg is None and not hasattr(rope, "sin_cos_cache")
    if not (plain and positions.dim() == 1 and rope.is_neox_style and rope.rotary_dim == rope.head_size):
        return sglang_forward(rope, positions, query, key, offsets, fused_set_kv_buffer_arg)
    kept = getattr(rope, "talon_rotation", None)
    if kept is None or not kept.fits(rope.cos_sin_cache, positions, query.dtype):
        kept = rope.talon_rotation = Rotation(rope.cos_sin_cache, positions, query.dtype)
    return kept.turn(query, rope.head_size), kept.turn(key, rope.head_size)


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    layers = "sglang.srt.layers"
    HookRegistry.register(f"{layers}.layernorm.RMSNorm.forward_native", rms_norm, HookType.AROUND)
    HookRegistry.register(f"{layers}.rotary_embedding.base.RotaryEmbedding.forward_native", rotary_embedding, HookType.AROUND)
