"""The training state of a DeepSpeed engine as plain tensors, the same for every ZeRO stage and number of processes.

fp32 weights and AdamW's two moments of each trained parameter, by the head's own parameter names. DeepSpeed's checkpoints hold flat pieces
cut for one stage and one number of processes; these files can be read by any. Reading and writing go through DeepSpeed's `safe_get_*` and
`safe_set_*` functions; what they lack (moments before a first step, padded ZeRO-3 shards, frozen parameters) is added here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of DeepSpeed's dynamic fp16 loss scale


def full_weights(engine) -> dict[str, torch.Tensor]:
    """All parameters of the head in float32 on the CPU: the master weights where there are some. All processes must call it."""
    return {name: _full(parameter) for name, parameter in engine.module.head.named_parameters()}


def training_state(engine) -> tuple[dict[str, torch.Tensor], dict]:
    """-> tensors (`weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`) and plain numbers. All processes must call it, after a step."""
    tensors = {}
    for name, parameter in _trained(engine):
        tensors[f"weight/{name}"] = _full(parameter)
        for moment in MOMENTS:
            tensors[f"{moment}/{name}"] = _full_moment(engine, parameter, moment)
    inner = _inner(engine)
    facts = {"adam_steps": max(int(state["step"]) for state in inner.state.values() if "step" in state)}
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        facts["loss_scaler"] = {name: getattr(scaler, name) for name in SCALER}
    return tensors, facts


def restore(engine, tensors: dict[str, torch.Tensor], facts: dict) -> None:
    """Undo `training_state` in a fresh engine whose module was built with these weights. Raises KeyError when a tensor is missing."""
    inner = _inner(engine)
    _make_moments(engine, inner, facts["adam_steps"])
    for name, parameter in _trained(engine):
        _set(engine, parameter, tensors[f"weight/{name}"], None)
        for moment in MOMENTS:
            _set(engine, parameter, tensors[f"{moment}/{name}"], moment)
    for name, value in facts.get("loss_scaler", {}).items():
        setattr(engine.optimizer.loss_scaler, name, value)


def _trained(engine) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in engine.module.head.named_parameters() if parameter.requires_grad]


def _inner(engine):
    """torch's AdamW inside DeepSpeed's wrapper, if there is one."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _full(parameter) -> torch.Tensor:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        master = safe_get_full_fp32_param(parameter)
        return (parameter if master is None else master).detach().float().cpu().clone()
    if hasattr(parameter, "ds_id"):  # a frozen parameter of ZeRO-3 has no master, and its own storage is a shard
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().float().cpu().clone()
    return parameter.detach().float().cpu().clone()


def _full_moment(engine, parameter, moment: str) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_optimizer_state

    whole = safe_get_full_optimizer_state(parameter, moment)
    whole = engine.optimizer.state[parameter][moment] if whole is None else whole
    return whole.detach().float().cpu().clone()


def _make_moments(engine, inner, steps: int) -> None:
    """AdamW makes its state in its first step; here it must exist before."""
    flat = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3
    for parameter in flat if flat is not None else [p for group in inner.param_groups for p in group["params"]]:
        device = parameter.device
        inner.state[parameter] = {"step": torch.tensor(float(steps), device=device)}
        inner.state[parameter] |= {moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in MOMENTS}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # ZeRO-1 and 2: parameters to their pieces of the flat state
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _set(engine, parameter, value: torch.Tensor, moment: str | None) -> None:
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    value = value.to(parameter.device)
    if hasattr(parameter, "ds_id"):
        # DeepSpeed 0.19.8's setter for whole tensors of ZeRO-3 runs past their end where the last process's shard is padded.
        size = parameter.ds_tensor.numel()
        padded = torch.zeros(size * dist.get_world_size(), dtype=value.dtype, device=value.device)
        padded[: value.numel()] = value.flatten()
        shard = padded[size * dist.get_rank() :][:size]
        safe_set_local_optimizer_state(parameter, shard, moment) if moment else safe_set_local_fp32_param(parameter, shard)
    elif hasattr(parameter, "_hp_mapping"):
        safe_set_full_optimizer_state(parameter, value, moment) if moment else safe_set_full_fp32_param(parameter, value)
    elif moment:  # ZeRO off: the parameter is its own master, and was built with the right value
        engine.optimizer.state[parameter][moment].copy_(value)
