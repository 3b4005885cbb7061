"""What the user set: the tree, and where to write a trace. Read once at the start, handed to the spawned processes through one environment
variable.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace

from talon_sglang.tree import TreeConfig

SGLANG_VERSION = "0.5.23"  # the only version whose internals this plugin was read and tested against

# A bound on the worst case (N - K layers by the paper's rule) that ordinary rounds do not reach: docs/settings.md has the measurement.
DEFAULT_DEPTH_CAP = 10

# Set by --talon-gate, --talon-trace and --talon-batch-budget, or by the user of sglang.Engine.
GATE_ENV, TRACE_ENV, BATCH_BUDGET_ENV = "TALON_GATE", "TALON_TRACE", "TALON_BATCH_BUDGET"
HANDOFF_ENV = "TALON_SETTINGS"  # parent to spawned processes; not for users


class TalonError(ValueError):
    """One sentence for the user: what is wrong, why, what to do."""


@dataclass(frozen=True)
class TalonSettings:
    tree: TreeConfig
    trace: str | None = None  # JSONL file, one line per request and round
    batch_budget: int = 0  # tree nodes verified in one round over all requests, roots included; 0: as many as there are

    def tree_for(self, requests: int) -> TreeConfig:
        """The tree of each request when so many decode together: the batch budget in equal shares, at least the root and at most N, with a
        first layer in the same proportion, but of two nodes where there is room: at 4 nodes, a second guess beats a third layer.
        """
        n, k = self.tree.node_budget, self.tree.first_layer_width
        nodes = max(1, min(n, self.batch_budget // requests)) if self.batch_budget else n
        if nodes == n:
            return self.tree
        return replace(self.tree, node_budget=nodes, first_layer_width=min(k, max(2, math.ceil(k * nodes / n)), max(1, nodes - 1)))

    def hand_over(self) -> None:
        os.environ[HANDOFF_ENV] = json.dumps(asdict(self))

    @classmethod
    def handed_over(cls) -> TalonSettings:
        raw = json.loads(os.environ[HANDOFF_ENV])
        return cls(**raw | {"tree": TreeConfig(**raw["tree"])})


def read_settings(num_draft_tokens: int | None, eagle_topk: int | None, num_steps: int | None) -> TalonSettings:
    """From SGLang's own flags (None = not given) and TALON's environment variables.

    Raises TalonError naming the flag, the value and the allowed range.
    """
    gate_text = os.environ.get(GATE_ENV)
    try:
        gate = TreeConfig.gate if gate_text is None else float(gate_text)
    except ValueError:
        gate = None
    flags = {
        "--speculative-num-draft-tokens": (
            num_draft_tokens,
            "the node budget, root included, must be a whole number of at least 2",
            lambda v: v >= 2,
        ),
        "--speculative-eagle-topk": (eagle_topk, "the first-layer width must be a whole number of at least 1", lambda v: v >= 1),
        "--speculative-num-steps": (
            num_steps,
            "the depth cap must be at least 1, or 0 or none for the paper's uncapped rule",
            lambda v: v >= 0,
        ),
    }
    for flag, (value, rule, valid) in flags.items():
        if value is not None and not valid(value):
            raise TalonError(f"{flag} is {value}: {rule}")
    if gate is None or not 0 < gate <= 1:
        raise TalonError(f"--talon-gate (or {GATE_ENV}) is {gate_text}: the gate must be greater than 0 and at most 1; 0.03 is the paper's")
    tree = TreeConfig(
        node_budget=TreeConfig.node_budget if num_draft_tokens is None else num_draft_tokens,
        first_layer_width=TreeConfig.first_layer_width if eagle_topk is None else eagle_topk,
        gate=gate,
        depth_cap=DEFAULT_DEPTH_CAP if num_steps is None else num_steps,
    )
    return TalonSettings(tree, os.environ.get(TRACE_ENV) or None, batch_budget())


def batch_budget() -> int:
    """Raises TalonError naming the flag and the value."""
    text = os.environ.get(BATCH_BUDGET_ENV) or "0"
    if not text.isdecimal():
        raise TalonError(
            f"--talon-batch-budget (or {BATCH_BUDGET_ENV}) is {text}: it must be a whole number of tree nodes, or 0 for no such budget"
        )
    return int(text)
