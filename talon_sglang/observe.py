"""What a TALON server reports about its drafting:

meta_info["talon"] of each finished request     RequestStats, through SGLang's output streamer
/metrics                                        Metrics, with --enable-metrics
the log, at every --decode-log-interval         one line, through a hook on SGLang's own decode log
--talon-trace FILE                              Trace: every round's tree and accepted path
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_context

from talon_sglang.tree import TreeBatch

logger = logging.getLogger(__name__)


@dataclass
class Stats:
    """Sums over request rounds."""

    rounds: int = 0
    draft_forwards: int = 0  # draft distributions used, the one from draft extend included
    drafted: int = 0  # tree nodes verified, the root not counted
    accepted: int = 0  # of those
    degraded: int = 0  # rounds that decoded plainly because the draft gave non-finite scores
    depths: Counter = field(default_factory=Counter)  # tree depth -> rounds
    widths: Counter = field(default_factory=Counter)  # nodes of the widest layer -> rounds

    def add(self, shape: RoundShape) -> None:
        self.rounds += 1
        self.draft_forwards += shape.draft_forwards
        self.drafted += shape.drafted
        self.accepted += shape.accepted
        self.degraded += shape.degraded
        self.depths[shape.depth] += 1
        self.widths[shape.width] += 1

    def report(self) -> dict:
        return {
            "rounds": self.rounds,
            "accept_length": self.accepted / self.rounds + 1,
            "draft_forwards_per_round": self.draft_forwards / self.rounds,
            "budget_accepted": self.accepted / max(self.drafted, 1),
            "degraded_rounds": self.degraded,
            "tree_depths": {str(depth): count for depth, count in sorted(self.depths.items())},
            "tree_widths": {str(width): count for width, count in sorted(self.widths.items())},
        }


@dataclass(frozen=True)
class RoundShape:
    """One request's round in numbers."""

    draft_forwards: int
    drafted: int
    accepted: int
    depth: int
    width: int
    degraded: bool


def round_shapes(trees: TreeBatch, accept_lens_B) -> list[RoundShape]:
    layers, sizes, accepts, degraded = (x.tolist() for x in (trees.layers_B, trees.size_B, accept_lens_B, trees.degraded_B))
    shapes = []
    for depths, layer, size, accept, bad in zip(trees.depths_BN.tolist(), layers, sizes, accepts, degraded):
        layer_sizes = Counter(depths[1:size])
        shapes.append(RoundShape(layer, size - 1, accept - 1, max(layer_sizes, default=0), max(layer_sizes.values(), default=0), bad))
    return shapes


class Observer:
    """Hears of every round, in the scheduler process."""

    def __init__(self, trace: str | None):
        self.metrics = Metrics() if get_context().server_args.enable_metrics else None
        self.trace = Trace(trace) if trace else None
        self.window = Stats()  # since the last log line

    def round(self, batch, trees: TreeBatch, target_tokens_BN, result) -> None:
        """`result` is SGLang's verify result, before it is committed."""
        for req, shape in zip(batch.reqs, round_shapes(trees, result.accept_lens)):
            if not hasattr(req, "talon"):
                req.talon = Stats()
            req.talon.add(shape)
            self.window.add(shape)
            if self.metrics:
                self.metrics.add(shape)
        if self.trace:
            self.trace.write(batch, trees, target_tokens_BN, result)

    def time(self, seconds: Counter[str]) -> None:
        """Seconds of one batch by phase (clock.py)."""
        if self.metrics:
            for phase, value in seconds.items():
                self.metrics.seconds.labels(phase).inc(value)

    def log(self) -> None:
        """One line about the rounds since the last call."""
        if self.window.rounds:
            report = self.window.report()
            logger.info(
                f"TALON rounds: {report['rounds']}, accept len: {report['accept_length']:.2f}, draft forwards: "
                f"{report['draft_forwards_per_round']:.2f}, deepest tree: {max(self.window.depths)}, widest: {max(self.window.widths)}, "
                f"budget accepted: {report['budget_accepted']:.1%}, degraded: {report['degraded_rounds']}"
            )
        self.window = Stats()


class Metrics:
    """Prometheus metrics in the scheduler process, shown on SGLang's own /metrics."""

    def __init__(self):
        from prometheus_client import Counter, Histogram

        self.rounds = Counter("talon:rounds", "Verify rounds, counted per request")
        self.forwards = Counter("talon:draft_forwards", "Draft distributions used, the one from draft extend included, over request rounds")
        self.degraded = Counter("talon:degraded_rounds", "Request rounds that decoded plainly because the draft gave non-finite scores")
        self.nodes = Counter("talon:drafted_nodes", "Tree nodes verified, the root not counted")
        self.accepted = Counter("talon:accepted_nodes", "Drafted nodes accepted")
        self.seconds = Counter("talon:seconds", "Wall-clock seconds of the scheduler by phase (talon_sglang/clock.py)", ["phase"])
        self.depth = Histogram("talon:tree_depth", "Layers of a request's draft tree", buckets=(0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50))
        self.width = Histogram(
            "talon:tree_width", "Nodes of the widest layer of a tree", buckets=(0, 1, 2, 4, 6, 8, 10, 15, 20, 30, 50, 100)
        )

    def add(self, shape: RoundShape) -> None:
        self.rounds.inc()
        self.forwards.inc(shape.draft_forwards)
        self.degraded.inc(shape.degraded)
        self.nodes.inc(shape.drafted)
        self.accepted.inc(shape.accepted)
        self.depth.observe(shape.depth)
        self.width.observe(shape.width)


class Trace:
    """Appends `{rid, round, seq_len, tokens, parents, depths, log_probs, accepted, bonus, degraded}` per request and round; tokens are
    target ids, log-probs cumulative natural logs of the draft.
    """

    def __init__(self, path: str):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a", buffering=1)

    def write(self, batch, trees: TreeBatch, target_tokens_BN, result) -> None:
        n = trees.config.node_budget
        for b, req in enumerate(batch.reqs):
            tree, count = trees.tree(b), int(result.accept_lens[b])
            row = {
                "rid": req.rid,
                "round": req.talon.rounds - 1,
                "seq_len": int(batch.seq_lens[b]),
                "tokens": target_tokens_BN[b, : len(tree)].tolist(),
                "parents": tree.parents,
                "depths": tree.depths,
                "log_probs": tree.log_probs,
                "accepted": [int(i) - b * n for i in result.accept_index[b, :count]],
                "bonus": int(result.next_draft_input.bonus_tokens[b]),
                "degraded": tree.degraded,
            }
            self.file.write(json.dumps(row) + "\n")


# ---------------------------------------------------------------- seams of SGLang's scheduler


class TalonOutputStreamer(SchedulerOutputStreamer):
    """Adds `meta_info["talon"]` to finished requests that had at least one round."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs) -> dict[str, list]:
        reports = [[req.talon.report()] if req.finished() and hasattr(req, "talon") else [] for req in reqs]
        return {"talon": reports} if any(reports) else {}


def streamer_class(stock, scheduler):
    """AFTER hook of `Scheduler.get_output_streamer_class`. (SGLang's Rust front end takes no additional output.)"""
    return TalonOutputStreamer if is_talon(scheduler) and scheduler.rust_server is None else stock


def log_with_decode_stats(_, reporter, *args, **kwargs) -> None:
    """AFTER hook of SGLang's decode log line, which is written every --decode-log-interval decode steps."""
    if is_talon(reporter.scheduler) and reporter.forward_ct_decode % reporter.decode_log_interval == 0:
        reporter.scheduler.draft_worker.observer.log()


def unwrap_report(_, tokenizer_manager, meta_info: dict, state, *args, **kwargs) -> None:
    """AFTER hook of `TokenizerManager.update_request_meta_info`, which knows lists with a value per token only: puts the report itself in
    place of a list of one, and out of reach of the code that slices such lists for streams.
    """
    state.customized_info_accumulated.pop("talon", None)
    state.customized_info_reported_keys.discard("talon")
    reports = meta_info.pop("talon", None)
    if reports:
        meta_info["talon"] = reports[-1]


def is_talon(scheduler) -> bool:
    from talon_sglang.algorithm import TalonAlgorithm

    return isinstance(scheduler.spec_algorithm, TalonAlgorithm)
