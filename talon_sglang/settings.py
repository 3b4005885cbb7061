"""What the user set: the tree, and where to write a trace. Read once at the start, handed to the spawned processes through one environment
variable.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from talon_sglang.tree import TreeConfig

SGLANG_VERSION = "0.5.23"  # the only version whose internals this plugin was read and tested against

# A bound on the worst case (N - K layers by the paper's rule) that ordinary rounds do not reach: docs/settings.md has the measurement.
DEFAULT_DEPTH_CAP = 10

GATE_ENV, TRACE_ENV = "TALON_GATE", "TALON_TRACE"  # set by --talon-gate and --talon-trace, or by the user of sglang.Engine
HANDOFF_ENV = "TALON_SETTINGS"  # parent to spawned processes; not for users


class TalonError(ValueError):
    """One sentence for the user: what is wrong, why, what to do."""


@dataclass(frozen=True)
class TalonSettings:
    tree: TreeConfig
    trace: str | None = None  # JSONL file, one line per request and round

    def hand_over(self) -> None:
        os.environ[HANDOFF_ENV] = json.dumps({"tree": asdict(self.tree), "trace": self.trace})

    @classmethod
    def handed_over(cls) -> TalonSettings:
        raw = json.loads(os.environ[HANDOFF_ENV])
        return cls(TreeConfig(**raw["tree"]), raw["trace"])


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
    return TalonSettings(tree, os.environ.get(TRACE_ENV) or None)
