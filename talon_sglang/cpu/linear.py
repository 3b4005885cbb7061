"""Faster matrix products for SGLang on a CPU without AMX.

`F.linear` computes rows @ weight.T, for which MKL first repacks the whole weight matrix: on two AVX2 cores the products of SmolLM2-135M in
fp32 took 60 ms for one row, 100 to 140 ms for 2 to 8 rows. As (weight @ rows.T).T they take 50 to 85 ms (eval/cpu_linear.py measures it).
That matters most where a few rows are computed together: tree verify, draft layers, small batches.

SGLang asks `layer.use_intel_amx_backend` for layers whose weights sgl_kernel has packed, and calls `weight_packed_linear` for them. Here
the weights stay as they are and the operator is ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MAX_ROWS = 256  # beyond it the two ways are equally fast


def weight_packed_linear(x, weight, bias, is_vnni):
    return few_rows_linear(x, weight, bias)


def few_rows_linear(x, weight, bias=None):
    """`F.linear` of [rows, in], up to rounding."""
    if x.dtype != torch.float32 or not 1 < x.shape[0] <= MAX_ROWS:
        return F.linear(x, weight, bias)
    product = (weight @ x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)


def register_hooks() -> None:
    """Mark every unquantised linear layer, and the lm_head when it is first used, as packed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    setattr(torch.ops.sgl_kernel, weight_packed_linear.__name__, weight_packed_linear)
    unquantised = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"
    HookRegistry.register(f"{unquantised}.process_weights_after_loading", mark_layer, HookType.AFTER)
    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", mark_lm_head, HookType.BEFORE)


def mark_layer(_, method, layer) -> None:
    layer.use_intel_amx_backend = True


def mark_lm_head(processor, hidden_states, lm_head, *args, **kwargs) -> None:
    if isinstance(getattr(lm_head, "weight", None), torch.Tensor):
        lm_head.use_intel_amx_backend = True
