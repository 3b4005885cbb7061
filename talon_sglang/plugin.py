"""The entry point `talon` of SGLang's group `sglang.srt.plugins`: SGLang calls `load` once in the parent and in every spawned process.

SGLang logs and swallows what a plugin raises, after which `--speculative-algorithm TALON` would end as "unknown algorithm". So whatever
goes wrong here while TALON was asked for ends the process instead, with one sentence.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from importlib.metadata import version

from talon_sglang import cpu
from talon_sglang.settings import BATCH_BUDGET_ENV, GATE_ENV, SGLANG_VERSION, TRACE_ENV

logger = logging.getLogger(__name__)


def load() -> None:
    try:
        register_algorithm()
        register_flags()
        register_hooks()
        cpu.register_hooks()
    except Exception as error:
        reason = (
            f"TALON could not be registered with SGLang {version('sglang')} ({type(error).__name__}: {error}); "
            f"this plugin is made for {SGLANG_VERSION}: pip install sglang=={SGLANG_VERSION}"
        )
        if asked_for(sys.argv):
            raise SystemExit(reason) from error  # not an Exception, so SGLang does not swallow it
        logger.error(reason)


def asked_for(argv: list[str]) -> bool:
    """True if the command line names TALON as the speculative algorithm."""
    flag = "--speculative-algorithm"
    values = [following for arg, following in zip(argv, argv[1:]) if arg == flag] + [
        arg.partition("=")[2] for arg in argv if arg.startswith(flag + "=")
    ]
    return any(value.upper() == "TALON" for value in values)


def register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from talon_sglang.algorithm import TalonAlgorithm, check_interface

    if get_spec("TALON") is not None:  # a second load in the same process, in tests
        return
    check_interface()

    # Overlap scheduling is turned off at the start (algorithm.py); registering it as unsupported would only add a deprecation warning about
    # V1 workers, which this is not.
    @SpeculativeAlgorithm.register("TALON", supports_overlap=True, spec_class=TalonAlgorithm)
    def worker_class(server_args):
        from talon_sglang.worker import TalonWorker

        return TalonWorker


def register_flags() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", add_flags, HookType.AFTER)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.from_cli_args", read_flags, HookType.BEFORE)


def register_hooks() -> None:
    """Where SGLang shows what observe.py counts, and reads what requests.py checks. The hooks name their functions, which are imported
    when SGLang first calls them.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hook(target: str, hook_type: HookType, module: str, function: str) -> None:
        def call(*args, **kwargs):
            return getattr(importlib.import_module(f"talon_sglang.{module}"), function)(*args, **kwargs)

        HookRegistry.register(f"sglang.srt.managers.{target}", call, hook_type)

    hook("scheduler.Scheduler.get_output_streamer_class", HookType.AFTER, "observe", "streamer_class")
    reporter = "scheduler_components.metrics_reporter.SchedulerMetricsReporter"
    hook(f"{reporter}.report_decode_stats", HookType.AFTER, "observe", "log_with_decode_stats")
    manager = "tokenizer_manager.TokenizerManager"
    hook(f"{manager}.update_request_meta_info", HookType.AFTER, "observe", "unwrap_report")
    hook(f"{manager}.generate_request", HookType.AROUND, "requests", "generate_request")
    hook(f"{manager}._create_tokenized_object", HookType.AROUND, "requests", "create_tokenized_object")


def add_flags(_, parser) -> None:
    """AFTER hook: TALON's own flags, and `none` for the depth cap."""
    group = parser.add_argument_group("TALON", "adaptive draft trees, with --speculative-algorithm TALON")
    group.add_argument(
        "--talon-gate",
        default=None,
        help="gate mu in (0, 1]: a candidate is drafted if its path probability is at least mu times the layer's best (default 0.03); "
        "larger is deeper and narrower",
    )
    group.add_argument(
        "--talon-trace",
        default=None,
        metavar="FILE",
        help="append every round's draft tree and accepted path to this JSONL file (slows serving; for evaluation)",
    )
    group.add_argument(
        "--talon-batch-budget",
        default=None,
        metavar="NODES",
        help="verify at most so many tree nodes in one round, over all requests: with many requests at a time each gets a smaller tree, "
        "down to plain decoding (default 0: no such budget)",
    )
    steps = parser._option_string_actions["--speculative-num-steps"]
    steps.type = depth_cap
    steps.help += " TALON: the depth cap of the draft tree; 0 or none for the paper's uncapped rule."


def depth_cap(text: str) -> int:
    try:
        return 0 if text.lower() == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor none") from None


def read_flags(*args, **kwargs) -> None:
    """BEFORE hook of `from_cli_args(cls, namespace)`: ServerArgs has no field for these, so they travel in the environment."""
    from talon_sglang import algorithm

    namespace = args[-1]
    algorithm.started_from_command_line = True
    wanted = (namespace.speculative_algorithm or "").upper() == "TALON"
    for flag, variable in (("--talon-gate", GATE_ENV), ("--talon-trace", TRACE_ENV), ("--talon-batch-budget", BATCH_BUDGET_ENV)):
        value = getattr(namespace, flag[2:].replace("-", "_"), None)
        if value is not None and not wanted:
            raise SystemExit(
                f"{flag} is only for --speculative-algorithm TALON, and that is {namespace.speculative_algorithm}: remove the one or "
                "set the other"
            )
        if value is not None:
            os.environ[variable] = value
    if wanted:
        # SGLang reads the head's config before it asks the algorithm, and would end in a traceback of its own.
        algorithm.check_head_early(namespace.speculative_draft_model_path, namespace.model_path)
