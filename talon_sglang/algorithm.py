"""TALON in SGLang's registry of speculative algorithms: its answers to SGLang's questions, and how it settles the server's arguments."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from importlib.metadata import version

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from talon_sglang.compatibility import refuse_unsupported
from talon_sglang.draft_head import check_draft_head
from talon_sglang.settings import SGLANG_VERSION, TalonError, read_settings

logger = logging.getLogger(__name__)

started_from_command_line = False  # set by plugin.read_flags


class TalonAlgorithm(CustomSpecAlgo):
    """To the rest of SGLang TALON is EAGLE-3 (aux hidden states, draft KV pool, bigram radix keys) with its own worker.

    `CustomSpecAlgo` lacks some methods that the scheduler calls on every algorithm; the built-in ones depend on nothing but this interface,
    so they are borrowed unbound.
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
        with one_sentence():
            settle(server_args)


@contextmanager
def one_sentence():
    """On a command line a TalonError ends the process with its sentence; a library user of `sglang.Engine` gets the exception."""
    try:
        yield
    except TalonError as error:
        if started_from_command_line:
            raise SystemExit(f"TALON cannot start: {error}") from error
        raise


def check_head_early(head: str | None, target: str) -> None:
    with one_sentence():
        check_head(head, target)


def check_head(head: str | None, target: str) -> None:
    if not head:
        raise TalonError(
            "--speculative-draft-model-path is missing: TALON drafts with an EAGLE-3 head, so name the folder of the head trained for "
            "this target (train/export.py writes one)"
        )
    check_draft_head(head, target)


def check_interface() -> None:
    """Raises TypeError if SGLang asks its algorithms something that TALON has no answer to. (SGLang's own check covers `is_*` and
    `supports_*` only.)
    """
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
        raise TalonError(
            f"SGLang {installed} is installed, but this plugin is made for {SGLANG_VERSION} and relies on its internals: pip install "
            f"sglang=={SGLANG_VERSION}"
        )
    refuse_unsupported(server_args)
    settings = read_settings(
        server_args.speculative_num_draft_tokens, server_args.speculative_eagle_topk, server_args.speculative_num_steps
    )
    if settings.batch_budget and server_args.attention_backend == "triton":
        raise TalonError(
            "--talon-batch-budget is not supported with --attention-backend triton: rounds there have one fixed size; leave it out"
        )
    check_head(server_args.speculative_draft_model_path, server_args.model_path)
    settings.hand_over()

    tree = settings.tree
    server_args.speculative_num_draft_tokens = tree.node_budget
    # SGLang plans steps x topk draft slots per request, one attention backend per step and index buffers for all of them. TALON drafts
    # layer by layer into the verify window (one slot a node), so it declares one step: the reserve becomes 2 x N slots a request, and no
    # multi-step backend is built. topk is the number of root candidates that travel between rounds; 1 would switch SGLang to its chain
    # code.
    server_args.speculative_num_steps = 1
    server_args.speculative_eagle_topk = max(2, min(tree.first_layer_width, tree.node_budget - 1))
    server_args.disable_overlap_schedule = True
    server_args.enable_mixed_chunk = False
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48  # SGLang's own default for EAGLE
    cap = tree.depth_cap or "none"
    shared = f", batch budget {settings.batch_budget}" if settings.batch_budget else ""
    logger.info(
        f"TALON: node budget {tree.node_budget}, first-layer width {tree.first_layer_width}, gate {tree.gate}, depth cap {cap}{shared}"
    )
