"""What a training run will need: disk, memory, time. From the target's config file alone; docs/data.md shows the formulas.

Sizes of weights, optimizer states and feature files are exact (the tests compare them with real files and tensors). Activations are a rough
sum. Time is work divided by a rate: the user's tokens per second, or the rate of matrix products measured on this machine, of which a run
gets a share (`EFFICIENCY`).
"""

import time
from dataclasses import dataclass, replace

import torch

from train.feature_size import feature_bytes
from train.head import Eagle3Head, HeadConfig
from train.memory import checkpoint_bytes

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
EFFICIENCY = 0.6  # of the rate of large matrix products, measured on a CPU (docs/data.md); attention, softmax, optimizer are the rest


@dataclass(frozen=True)
class Plan:
    """The settings that matter; the same names as in a recipe."""

    draft_vocab_size: int
    max_length: int = 2048
    epochs: float | None = 1
    tokens: int | None = None  # in place of epochs
    ttt_steps: int = 7
    micro_batch_tokens: int = 4096
    precision: str = "bf16"
    zero_stage: int = 1
    processes: int = 1
    keep_checkpoints: int = 2
    online: bool = False
    features_dtype: str = "fp8"


@dataclass(frozen=True)
class Sizes:
    """Parameters of target and head, and the target's hidden size. `matrix` counts weights that multiply every token."""

    target: int
    target_matrix: int
    head: int
    head_matrix: int
    lm_head: int
    hidden: int
    intermediate: int
    attention: int  # heads times head size
    heads: int
    context_matrix: int  # weights that multiply rows without loss too: fc, k_proj, v_proj

    @classmethod
    def of(cls, config, draft_vocab_size: int) -> "Sizes":
        """Built on the meta device: exact for every architecture that transformers knows, and no weight is allocated.

        Raises ValueError when the target is none that a head can be built for.
        """
        from transformers import AutoModelForCausalLM

        try:
            with torch.device("meta"):
                target = AutoModelForCausalLM.from_config(config)
                head = Eagle3Head(HeadConfig.from_target(config, min(draft_vocab_size, config.vocab_size)))
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"no head can be sized for a target of type {config.model_type!r} ({error})") from None
        matrices = [parameter.numel() for parameter in head.parameters() if parameter.ndim == 2]
        target_total = sum(parameter.numel() for parameter in target.parameters())
        return cls(
            target_total,
            target_total - target.get_input_embeddings().weight.numel() * (not config.tie_word_embeddings),
            sum(parameter.numel() for parameter in head.parameters()),
            sum(matrices),
            head.lm_head.weight.numel(),
            config.hidden_size,
            config.intermediate_size,
            head.config.num_attention_heads * head.config.head_dim,
            head.config.num_attention_heads,
            sum(layer.weight.numel() for layer in (head.fc, head.midlayer.self_attn.k_proj, head.midlayer.self_attn.v_proj)),
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds. `memory` is of one process; `rate_from` says where the time comes from."""

    features_disk: int
    checkpoints_disk: int
    memory: dict[str, int]
    seconds: float
    tokens_per_second: float
    rate_from: str


def estimate(
    sizes: Sizes, plan: Plan, stored: int, tokens: int, supervised: int, conversations: int, tokens_per_second: float | None = None
) -> Estimate:
    """`tokens` of all conversations, `supervised` of them predicted, features `stored` of those up to each last answer."""
    plan = replace(plan, epochs=plan.epochs or plan.tokens / max(tokens, 1))
    seconds_of = _seconds(sizes, plan, tokens, supervised, tokens_per_second)
    return Estimate(
        0 if plan.online else feature_bytes(sizes.hidden, stored, supervised, conversations, plan.features_dtype),
        plan.keep_checkpoints * checkpoint_bytes(sizes.head),
        memory_bytes(sizes, plan),
        *seconds_of,
    )


def memory_bytes(sizes: Sizes, plan: Plan) -> dict[str, int]:
    """Per process. ZeRO 1 divides the optimizer's fp32 state by the processes, 2 the gradients too, 3 the weights too."""
    width, shards = BYTES[plan.precision], plan.processes
    weights = sizes.head * width / (shards if plan.zero_stage >= 3 else 1)
    gradients = sizes.head * width / (shards if plan.zero_stage >= 2 else 1)
    state = sizes.head * (8 + (0 if plan.precision == "fp32" else 4)) / (shards if plan.zero_stage >= 1 else 1)
    per_row = 14 * sizes.hidden + 4 * sizes.intermediate + 4 * sizes.attention
    scores = sizes.heads * min(plan.max_length, plan.micro_batch_tokens) * 4
    logits = 3 * 4 * (sizes.lm_head // sizes.hidden)  # scores, softmax and its gradient in fp32
    activations = plan.micro_batch_tokens * (plan.ttt_steps * (per_row * width + scores + logits) + 4 * sizes.hidden * width)
    return {
        "target": sizes.target * width,
        "head and gradients": round(weights + gradients),
        "optimizer": round(state),
        "activations, roughly": round(activations),
    }


def work_per_token(sizes: Sizes, plan: Plan, supervised_share: float) -> float:
    """Floating-point operations for a token and epoch: the head forward and backward at every step for the rows that carry loss, its `fc`,
    keys and values for the others, lm_head once more for the target's distribution, and the target's forward (once in all when features
    are kept)."""
    head = 6 * plan.ttt_steps * sizes.head_matrix * supervised_share
    context = 6 * sizes.context_matrix * (1 - supervised_share)
    teacher = 2 * sizes.lm_head * supervised_share
    return head + context + teacher + 2 * sizes.target_matrix / (1 if plan.online else plan.epochs)


def _seconds(sizes: Sizes, plan: Plan, tokens: int, supervised: int, given: float | None) -> tuple[float, float, str]:
    if given is not None:
        rate, source = given, "given with --tokens-per-second"
    else:
        measured = matrix_rate(torch.float32 if plan.precision == "fp32" else torch.bfloat16)
        work = work_per_token(sizes, plan, supervised / max(tokens, 1))
        rate = measured * EFFICIENCY * plan.processes / work
        device = "this GPU" if torch.cuda.is_available() else f"{torch.get_num_threads()} thread(s) of this CPU"
        source = f"{EFFICIENCY:.0%} of the {measured / 1e9:.0f} GFLOP/s that {device} just reached, for {work / 1e9:.2f} GFLOP a token"
    return tokens * plan.epochs / rate, rate, source


def matrix_rate(dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Measured floating-point operations per second of a matrix product of the sizes that training has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, inner, columns = (4096, 4096, 4096) if device == "cuda" else (256, 1024, 1024)
    a, b = torch.randn(rows, inner, device=device).to(dtype), torch.randn(inner, columns, device=device).to(dtype)
    a @ b
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        (a @ b).flatten()[0].item()  # waits for the result
        count += 1
    return 2.0 * rows * inner * columns * count / (time.perf_counter() - start)
