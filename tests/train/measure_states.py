"""What DeepSpeed holds for a head of 333 thousand parameters, stage by stage, counted from the live tensors; printed as JSON."""

import gc
import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import torch

from tests.train.toy import toy_batch, toy_chats, toy_draft_target, toy_head, toy_target
from train.machine import DTYPES
from train.memory import REDUCE_BUCKET
from train.recipe import TrainSettings
from train.trainer import deepspeed_config
from train.ttt import TTTModel
from train.world import join_world


def storages() -> dict[int, int]:
    """Address to bytes of every storage that some live tensor, or its gradient, uses."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    tensors = [tensor for tensor in tensors if tensor.device.type != "meta"]  # DeepSpeed keeps shapes as tensors without storage
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def measure(precision: str, stage: int) -> dict:
    target = toy_target(torch.float32, vocab=3000, hidden=128, head_dim=32)
    ids_Vd = torch.arange(0, 3000, 2)
    head = toy_head(target, ids_Vd, torch.float32, std=0.02)
    draft = toy_draft_target(target, ids_Vd)
    dtype = DTYPES[precision]
    draft.embedding_VH, draft.lm_head_VdH = draft.embedding_VH.to(dtype), draft.lm_head_VdH.to(dtype)
    batch = toy_batch(target, toy_chats(), 3).to("cpu", dtype)
    settings = TrainSettings(epochs=1, micro_batch_tokens=100, learning_rate=1e-3, precision=precision, zero_stage=stage)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    given = set(storages()) - {parameter.untyped_storage().data_ptr() for parameter in head.parameters()}
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=TTTModel(head, 0.8), optimizer=optimizer, config=deepspeed_config(settings, 1))
    for _ in range(2):  # the first step creates the moments
        loss, _ = engine(batch, draft, torch.ones(3))
        engine.backward(loss)
        held = {address: size for address, size in storages().items() if address not in given}
        engine.step()
    bucket = sum(size for size in held.values() if size >= 2 * REDUCE_BUCKET)
    engine.destroy()
    return {
        "precision": precision,
        "stage": stage,
        "parameters": parameters,
        "after_backward": sum(held.values()) - bucket,
        "bucket": bucket,
    }


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel(logging.ERROR)
    join_world()
    cases = [(precision, stage) for precision in ("fp32", "bf16") for stage in range(4)]
    cases.remove(("bf16", 0))  # no fp32 masters: the recipe refuses it
    print("\n" + json.dumps([measure(precision, stage) for precision, stage in cases]))
