"""What TALON does not support yet: each case stops the start with one sentence (what, why, what to do instead)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from talon_sglang.settings import TalonError


class Refusal(NamedTuple):
    what: str  # a format string over the server's arguments, `a`
    when: Callable[[object], bool]
    why: str
    instead: str


def refuse_unsupported(server_args) -> None:
    """Raises TalonError for the first case that applies."""
    for case in REFUSALS:
        if case.when(server_args):
            raise TalonError(f"{case.what.format(a=server_args)} is not supported with TALON: {case.why}; {case.instead}")


def served_backend(backend: str | None) -> bool:
    """Triton's attention kernels run on a CPU in Triton's interpreter: for tests of that path, far too slow to serve with."""
    return backend in (None, "intel_amx") or (backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1")


def on_cpu_engine() -> bool:
    from sglang.srt.utils import is_cpu

    return is_cpu()


LEAVE_OUT = "leave the flag out"

REFUSALS = [
    Refusal(
        "--device {a.device}",
        lambda a: a.device != "cpu",
        "its draft attention is written for the CPU so far",
        "use --device cpu, or --speculative-algorithm EAGLE3 on this device",
    ),
    Refusal(
        "a CPU without SGLANG_USE_CPU_ENGINE",
        lambda a: not on_cpu_engine(),
        "SGLang does not switch to its CPU operators without it",
        "set SGLANG_USE_CPU_ENGINE=1 in the environment",
    ),
    Refusal(
        "--attention-backend {a.attention_backend}",
        lambda a: not served_backend(a.attention_backend),
        "its draft attention is written for intel_amx so far",
        LEAVE_OUT,
    ),
    Refusal(
        "a separate attention backend for draft, decode or prefill",
        lambda a: any(
            backend not in (None, "intel_amx")
            for backend in (a.speculative_draft_attention_backend, a.decode_attention_backend, a.prefill_attention_backend)
        ),
        "its draft attention is written for intel_amx so far",
        LEAVE_OUT,
    ),
    Refusal(
        "--page-size {a.page_size}", lambda a: (a.page_size or 1) != 1, "a draft node takes one KV slot, not a page", "use --page-size 1"
    ),
    Refusal("--tp-size {a.tp_size}", lambda a: a.tp_size > 1, "ranks would have to agree on every tree", "use --tp-size 1"),
    Refusal("--pp-size {a.pp_size}", lambda a: a.pp_size > 1, "the tree lives on one stage", "use --pp-size 1"),
    Refusal(
        "data parallelism",
        lambda a: a.dp_size > 1 or a.enable_dp_attention,
        "idle ranks would have to follow every layer",
        "use --dp-size 1 without --enable-dp-attention",
    ),
    Refusal(
        "--tokenizer-worker-num {a.tokenizer_worker_num}",
        lambda a: a.tokenizer_worker_num > 1,
        "SGLang does not load plugins in those workers",
        "use --tokenizer-worker-num 1",
    ),
    Refusal(
        "--disaggregation-mode {a.disaggregation_mode}",
        lambda a: a.disaggregation_mode != "null",
        "the draft's state is not transferred",
        "serve prefill and decode together",
    ),
    Refusal(
        "--enable-deterministic-inference",
        lambda a: a.enable_deterministic_inference,
        "SGLang's batch-invariant kernels need a GPU, and TALON minds sampling_seed without it",
        LEAVE_OUT,
    ),
    Refusal("LoRA", lambda a: bool(a.enable_lora or a.lora_paths), "the head was trained for the base model", "serve the merged model"),
    Refusal(
        "returning hidden states",
        lambda a: bool(a.enable_return_hidden_states or a.return_hidden_states_mode),
        "SGLang returns none for tokens that were accepted from a draft",
        "leave --enable-return-hidden-states and --return-hidden-states-mode out",
    ),
    Refusal("--enable-watermark", lambda a: a.enable_watermark, "it was not tested with irregular trees", LEAVE_OUT),
    Refusal(
        "--speculative-adaptive", lambda a: a.speculative_adaptive, "it resizes EAGLE's chain, and TALON's tree adapts by itself", LEAVE_OUT
    ),
    Refusal(
        "rejection sampling or block verification",
        lambda a: a.speculative_use_rejection_sampling or a.speculative_use_block_verification,
        "they are for chains",
        LEAVE_OUT,
    ),
    Refusal(
        "--speculative-token-map",
        lambda a: a.speculative_token_map is not None,
        "an EAGLE-3 head brings its own draft vocabulary",
        LEAVE_OUT,
    ),
    Refusal(
        "--speculative-draft-window-size",
        lambda a: a.speculative_draft_window_size is not None,
        "its draft attention is over the whole prefix",
        LEAVE_OUT,
    ),
    Refusal("--enable-multi-layer-eagle", lambda a: a.enable_multi_layer_eagle, "it drafts with one head", LEAVE_OUT),
    Refusal(
        "an accept threshold below 1",
        lambda a: a.speculative_accept_threshold_single != 1.0 or a.speculative_accept_threshold_acc != 1.0,
        "it makes the output inexact",
        LEAVE_OUT,
    ),
]
