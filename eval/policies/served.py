"""Which policies a server can run, and as what."""

from __future__ import annotations

from dataclasses import dataclass

from eval.policies import Chain, Eagle, Policy, Talon


@dataclass(frozen=True)
class Served:
    """A policy in SGLang's terms: N, --speculative-eagle-topk, --speculative-num-steps (EAGLE3's depth, TALON's cap), --talon-gate."""

    algorithm: str
    nodes: int
    width: int
    steps: int
    gate: float | None = None


def served_as(policy: Policy) -> Served | None:
    """None for policies that exist only offline: OPT-Tree, the variants of TALON, and EAGLE3 with exact ancestors at K > 1."""
    if isinstance(policy, Talon):
        config = policy.config
        return Served("TALON", config.node_budget, config.first_layer_width, config.depth_cap, config.gate)
    if isinstance(policy, Chain):
        return Served("EAGLE3", policy.steps + 1, 1, policy.steps)
    if isinstance(policy, Eagle) and policy.approximate:
        return Served("EAGLE3", policy.nodes, policy.width, policy.steps)
    return None
