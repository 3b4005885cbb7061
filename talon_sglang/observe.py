"""What a TALON server reports about its drafting: counters on /metrics, and one line per round in a trace file."""

from __future__ import annotations

import json
from pathlib import Path

from sglang.srt.runtime_context import get_context

from talon_sglang.tree import TreeBatch


class Counters:
    """Prometheus counters in the scheduler process, shown on SGLang's own /metrics with --enable-metrics."""

    def __init__(self):
        from prometheus_client import Counter

        self.rounds = Counter("talon:rounds", "Verify rounds, counted per request")
        self.forwards = Counter(
            "talon:draft_forwards", "Draft distributions levels computed, the draft extend included, summed over request rounds"
        )
        self.degraded = Counter(
            "talon:degraded_rounds", "Request rounds that fell back to plain decoding because the draft gave non-finite scores"
        )
        self.nodes = Counter("talon:drafted_nodes", "Tree nodes verified, the root not counted")
        self.accepted = Counter("talon:accepted_nodes", "Drafted nodes accepted")

    def add(self, trees: TreeBatch, accept_lens_B) -> None:
        self.rounds.inc(accept_lens_B.numel())
        self.forwards.inc(int(trees.layers_B.sum()))
        self.degraded.inc(int(trees.degraded_B.sum()))
        self.nodes.inc(int((trees.size_B - 1).sum()))
        self.accepted.inc(int((accept_lens_B - 1).sum()))


class Trace:
    """Appends `{rid, round, seq_len, tokens, parents, depths, log_probs, accepted, bonus, degraded}` per request and round; tokens are
    target ids, log-probs cumulative natural logs of the draft.
    """

    def __init__(self, path: str):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a", buffering=1)
        self.rounds: dict[str, int] = {}

    def write(self, trees: TreeBatch, rids, seq_lens, target_tokens_BN, accept_index, accept_lens, bonus_tokens) -> None:
        n = trees.config.node_budget
        for b, rid in enumerate(rids):
            tree, count = trees.tree(b), int(accept_lens[b])
            row = {
                "rid": rid,
                "round": self.rounds.get(rid, 0),
                "seq_len": int(seq_lens[b]),
                "tokens": target_tokens_BN[b, : len(tree)].tolist(),
                "parents": tree.parents,
                "depths": tree.depths,
                "log_probs": tree.log_probs,
                "accepted": [int(i) - b * n for i in accept_index[b, :count]],
                "bonus": int(bonus_tokens[b]),
                "degraded": tree.degraded,
            }
            self.rounds[rid] = row["round"] + 1
            self.file.write(json.dumps(row) + "\n")


def metrics_enabled() -> bool:
    return bool(get_context().server_args.enable_metrics)
