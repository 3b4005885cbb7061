"""How much memory and disk a run takes, by formula. docs/checkpoints.md explains each line; tests/train/test_plan.py compares them with
measured runs.

Sizes in bytes. b is 4 in fp32 and 2 in bf16 and fp16, P a number of parameters, n the number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

REDUCE_BUCKET = 500_000_000  # values; DeepSpeed's default `reduce_bucket_size`, allocated whole during backward


@dataclass(frozen=True)
class Shape:
    """What the head's activations depend on."""

    hidden: int
    inner: int
    heads: int
    groups: int
    head_dim: int
    draft_vocab: int


@dataclass(frozen=True)
class Memory:
    """One process while it trains, in bytes; `host` is what offloading puts in the host's memory instead and is not in the total."""

    target_weights: float
    head_weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host")


def width(precision: str) -> int:
    return 4 if precision == "fp32" else 2


def head_states(trained: int, frozen: int, precision: str, stage: int, processes: int, offloaded: bool = False) -> dict[str, float]:
    """Weights, gradients, optimizer states and buffers of the head in one process, as DeepSpeed 0.19.8 keeps them with AdamW.

    The optimizer holds two fp32 moments, and an fp32 copy of the weights unless the weights are fp32 and ZeRO is off. ZeRO-1 divides the
    optimizer by n, ZeRO-2 the gradients too, ZeRO-3 the weights too. Every ZeRO stage stages gradients in a bucket of fixed size.
    `offloaded`: the optimizer is in the host's memory. (What offloaded weights save is the sharded copy; it is not counted off.)
    """
    b = width(precision)
    master = 0 if precision == "fp32" and stage == 0 else 4
    bucket = REDUCE_BUCKET * (4 if stage == 1 else b) if stage else min(trained, REDUCE_BUCKET) * b * (processes > 1)
    optimizer = (master + 8) * trained / (processes if stage >= 1 else 1)
    return {
        "head_weights": b * (trained + frozen) / (processes if stage == 3 else 1),
        "gradients": b * trained / (processes if stage >= 2 else 1),
        "optimizer": 0.0 if offloaded else optimizer,
        "host": optimizer if offloaded else 0.0,
        "buffers": bucket,
    }


def saved_activations(
    shape: Shape, precision: str, rows: float, queries: float, row_length: float, steps: int, recomputed: bool = False
) -> float:
    """What one micro-batch of `rows` padded tokens keeps for backward (train/ttt.py).

    Per query row and training-time-test step: inputs of norms and projections, the attention weights over `row_length` keys (in fp32, and
    once more in bf16), log-probabilities and targets over the draft vocabulary in fp32. Per row once: the features and the layer's input.
    `recomputed` (activation checkpointing): of each step only its state, its token's embedding and its own keys and values; and the
    activations of the one step whose gradient is being computed.
    """
    b = width(precision)
    norms = (30 if b == 2 else 44) * shape.hidden  # a bf16 norm keeps its input in fp32 as well
    projections = b * shape.head_dim * (3 * shape.heads + 4 * shape.groups + 4) + 4 * b * shape.inner
    attention = (6 if b == 2 else 4) * shape.heads * row_length
    vocabulary = 8 * shape.draft_vocab
    once = rows * 5 * b * shape.hidden + queries * 4 * shape.draft_vocab
    step = norms + projections + attention + vocabulary
    if recomputed:
        return queries * (steps * b * 2 * (shape.hidden + shape.groups * shape.head_dim) + step) + once
    return queries * steps * step + once


def working_activations(shape: Shape, queries: float, row_length: float) -> float:
    """What one step needs on top while its gradient is computed: three fp32 copies of its scores and of its logits."""
    return queries * 12 * (shape.heads * row_length + shape.draft_vocab)


def checkpoint_bytes(trained: int) -> int:
    """One checkpoint, whatever the stage, the precision and the number of processes: fp32 weights and two moments."""
    return 12 * trained
