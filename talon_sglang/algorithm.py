"""TALON in SGLang's registry of speculative algorithms: what it answers to SGLang's questions, and how it settles the server's arguments."""

from __future__ import annotations

import logging
from importlib.metadata import version

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from talon_sglang.draft_head import check_draft_head
from talon_sglang.settings import SGLANG_VERSION, TalonError, read_settings

logger = logging.getLogger(__name__)

started_from_command_line = False  # set by plugin.read_flags; a library user of sglang.Engine gets the exception instead of an exit


class TalonAlgorithm(CustomSpecAlgo):
    """To the rest of SGLang TALON is EAGLE-3 (aux hidden states, draft KV pool, bigram radix keys) with its own worker.

    `CustomSpecAlgo` lacks some methods that the scheduler calls on every algorithm; the built-in ones depend on nothing but this interface, so they are borrowed unbound.
    """

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return True

    def need_topk(self) -> bool:
        return True  # the root's best candidates travel from one round to the next

    def carries_draft_hidden_states(self) -> bool:
        return True

    def get_platform_worker_cls(self):
        return None

    create_future_map = SpeculativeAlgorithm.create_future_map
    build_disagg_draft_input = SpeculativeAlgorithm.build_disagg_draft_input

    def handle_server_args(self, server_args) -> None:
        try:
            settle(server_args)
        except TalonError as error:
            if started_from_command_line:
                raise SystemExit(f"TALON cannot start: {error}") from error
            raise


def check_interface() -> None:
    """Raises TypeError if SGLang asks its algorithms something that TALON has no answer to. (SGLang's own check covers `is_*` and `supports_*` only.)"""
    questions = {name for name, value in vars(SpeculativeAlgorithm).items() if callable(value) and not name.startswith("_")}
    missing = sorted(questions - set(dir(TalonAlgorithm)) - {"register", "from_string"})
    if missing:
        raise TypeError(f"TalonAlgorithm lacks {', '.join(missing)}")


def settle(server_args) -> None:
    """Check everything that can be checked before the models load, and hand the settings to the workers. Raises TalonError.

    `server_args` is SGLang's recorder: reads give the value so far, assignments become SGLang's own settings.
    """
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise TalonError(f"SGLang {installed} is installed, but this plugin is made for {SGLANG_VERSION} and relies on its internals: pip install sglang=={SGLANG_VERSION}")
    refuse_unsupported(server_args)
    settings = read_settings(server_args.speculative_num_draft_tokens, server_args.speculative_eagle_topk, server_args.speculative_num_steps)
    if not server_args.speculative_draft_model_path:
        raise TalonError("--speculative-draft-model-path is missing: TALON drafts with an EAGLE-3 head, so name the folder of the head trained for this target (train/export.py writes one)")
    check_draft_head(server_args.speculative_draft_model_path, server_args.model_path)
    settings.hand_over()

    tree = settings.tree
    server_args.speculative_num_draft_tokens = tree.node_budget
    # SGLang plans steps x topk draft slots per request, one attention backend per step and index buffers for all of them. TALON drafts layer by layer into the verify window
    # (one slot a node), so it declares one step: the reserve becomes 2 x N slots a request, and no multi-step backend is built. topk is the number of root candidates that travel
    # between rounds; 1 would switch SGLang to its chain paths.
    server_args.speculative_num_steps = 1
    server_args.speculative_eagle_topk = max(2, min(tree.first_layer_width, tree.node_budget - 1))
    server_args.disable_overlap_schedule = True
    server_args.enable_mixed_chunk = False
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48  # SGLang's own default for EAGLE
    cap = tree.depth_cap or "none"
    logger.info(f"TALON: node budget {tree.node_budget}, first-layer width {tree.first_layer_width}, gate {tree.gate}, depth cap {cap}")


def refuse_unsupported(server_args) -> None:
    """What TALON does not support yet, each with its reason. Raises TalonError."""
    a = server_args
    backend, draft_backend = a.attention_backend or "intel_amx", a.speculative_draft_attention_backend
    decode, prefill = a.decode_attention_backend, a.prefill_attention_backend
    cases = [
        (a.device != "cpu", f"--device {a.device}", "its draft attention is written for the CPU so far", "use --device cpu, or --speculative-algorithm EAGLE3 on this device"),
        (a.device == "cpu" and not on_cpu_engine(), "SGLANG_USE_CPU_ENGINE", "SGLang does not switch to its CPU operators without it", "set SGLANG_USE_CPU_ENGINE=1"),
        (backend != "intel_amx", f"--attention-backend {backend}", "its draft attention is written for intel_amx so far", "leave the flag out"),
        (any(b not in (None, "intel_amx") for b in (draft_backend, decode, prefill)), "a separate draft, decode or prefill attention backend", "TALON uses one for all", "leave the flag out"),
        ((a.page_size or 1) != 1, f"--page-size {a.page_size}", "a draft node takes one KV slot, not a page", "use --page-size 1"),
        (a.tp_size > 1, f"--tp-size {a.tp_size}", "ranks would have to agree on every tree", "use --tp-size 1"),
        (a.pp_size > 1, f"--pp-size {a.pp_size}", "the tree lives on one stage", "use --pp-size 1"),
        (a.dp_size > 1 or a.enable_dp_attention, "data parallelism", "idle ranks would have to follow every layer", "use --dp-size 1 without --enable-dp-attention"),
        (a.tokenizer_worker_num > 1, f"--tokenizer-worker-num {a.tokenizer_worker_num}", "SGLang does not load plugins in those workers", "use --tokenizer-worker-num 1"),
        (a.disaggregation_mode != "null", f"--disaggregation-mode {a.disaggregation_mode}", "the draft's state is not transferred", "serve prefill and decode together"),
        (bool(a.enable_lora or a.lora_paths), "LoRA", "the head was trained for the base model", "serve the merged model"),
        (a.speculative_adaptive, "--speculative-adaptive", "it resizes EAGLE's chain; TALON's tree adapts by itself", "leave the flag out"),
        (a.speculative_use_rejection_sampling or a.speculative_use_block_verification, "rejection sampling or block verification", "they are for chains", "leave the flag out"),
        (a.speculative_token_map is not None, "--speculative-token-map", "an EAGLE-3 head brings its own d2t", "leave the flag out"),
        (a.speculative_draft_window_size is not None, "--speculative-draft-window-size", "TALON's draft attention is over the whole prefix", "leave the flag out"),
        (a.enable_multi_layer_eagle, "--enable-multi-layer-eagle", "TALON drafts with one head", "leave the flag out"),
        (a.speculative_accept_threshold_single != 1.0 or a.speculative_accept_threshold_acc != 1.0, "an accept threshold below 1", "it makes the output inexact", "leave the flag out"),
    ]  # fmt: skip
    for refused, what, why, instead in cases:
        if refused:
            raise TalonError(f"{what} is not supported with TALON: {why}; {instead}")


def on_cpu_engine() -> bool:
    from sglang.srt.utils import is_cpu

    return is_cpu()
