"""Matrix products from packed weights, for SGLang on a CPU without AMX.

`F.linear` brings the weight matrix into the layout of its kernel at every call. That costs more than the product itself where a few rows
are computed together: tree verify, draft layers, small batches. With weights packed once, all products of SmolLM2-135M take on two Zen 5
cores 11 instead of 30 ms for one row and 17 instead of 49 ms for 16 rows in fp32, 5 instead of 13 and 10 instead of 19 ms in bf16
(`python eval/cpu_products.py` measures it). The packed copy takes the memory of the weights once more.

SGLang asks `layer.use_intel_amx_backend` for layers whose weights sgl_kernel has packed, and calls `weight_packed_linear` for them. Here
the layer keeps its weights, for weight updates and tied embeddings, and the operator is ours.
"""

from __future__ import annotations

import psutil
import torch
import torch.nn.functional as F

MEMORY_TO_LEAVE = 0.1  # share of the machine's memory; nothing is packed that would leave less


def weight_packed_linear(x, weight, bias, is_vnni):
    return packed_linear(x, weight, bias)


def packed_linear(x, weight, bias=None):
    """`F.linear` of [rows, in], up to rounding, without gradients. Packs the weight at first use and when it has changed."""
    packed = Packed.of(weight)
    if packed is None or x.dtype != weight.dtype or x.shape[0] == 0:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class Packed:
    """The packed form of a weight, kept as an attribute of it."""

    generation = 0  # what was packed before it counts no more

    @classmethod
    def of(cls, weight: torch.Tensor) -> torch.Tensor | None:
        """None for what cannot be packed. A change in place is seen by its version; writes to `.data` are not: `forget` after them."""
        state = cls.generation, 0 if weight.is_inference() else weight._version
        kept = getattr(weight, "talon_packed", None)
        if kept is None or kept[0] != state:
            kept = weight.talon_packed = state, cls.pack(weight)
        return kept[1]

    @staticmethod
    def pack(weight: torch.Tensor) -> torch.Tensor | None:
        supported = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        memory = psutil.virtual_memory()
        room = memory.available - MEMORY_TO_LEAVE * memory.total
        if not supported or not torch.backends.mkldnn.is_available() or weight.nbytes > room:
            return None
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)  # tuned for about 16 rows; works for any number

    @classmethod
    def forget(cls, *args, **kwargs) -> None:
        cls.generation += 1


def register_hooks() -> None:
    """Mark every unquantised linear layer, and the lm_head when it is first used, as packed; forget it all when weights are updated."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    setattr(torch.ops.sgl_kernel, weight_packed_linear.__name__, weight_packed_linear)
    unquantised = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"
    HookRegistry.register(f"{unquantised}.process_weights_after_loading", mark_layer, HookType.AFTER)
    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", mark_lm_head, HookType.BEFORE)
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    for update in ("update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc"):
        HookRegistry.register(f"{updater}.{update}", Packed.forget, HookType.AFTER)


def mark_layer(_, method, layer) -> None:
    layer.use_intel_amx_backend = True


def mark_lm_head(processor, hidden_states, lm_head, *args, **kwargs) -> None:
    if isinstance(getattr(lm_head, "weight", None), torch.Tensor):
        lm_head.use_intel_amx_backend = True
