"""Ways to draft a tree, one small class each, on one batched draft forward (`eval/policies/rounds.py`).

A policy is anything with a `name` (its spelling, all settings written out) and `draft(rounds) -> list[Draft]`. `parse_policy` reads the
command line's spelling:

    chain:STEPS                       EAGLE3 with topk 1
    eagle3:K,STEPS,N                  EAGLE-2/3's tree, reranked, every node attending to its true ancestors
    sglang-eagle3:K,STEPS,N           the same with stock SGLang's draft attention (a lane reads its own slots' history)
    opt-tree:N[,THRESHOLD[,DEPTH]]    OPT-Tree
    talon:N,K[,CAP[,MU]]              TALON; CAP 0 is the paper's rule without a depth cap (default: the server's)
    sglang-talon:N,K[,CAP[,MU]]       the same with stock SGLang's draft attention
    talon-layers:N,K,LAYERS[,CAP[,MU]]  TALON with that many top-K layers (1 is TALON) before the gate
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from eval.policies.chain import Chain
from eval.policies.eagle import Eagle
from eval.policies.opt_tree import OptTree
from eval.policies.rounds import Draft, DraftRounds
from eval.policies.talon import LaneTalon, Talon, TalonLayers

__all__ = ["Chain", "Draft", "DraftRounds", "Eagle", "LaneTalon", "OptTree", "Policy", "Talon", "TalonLayers", "parse_policy"]


class Policy(Protocol):
    name: str

    def draft(self, rounds: DraftRounds) -> list[Draft]: ...


@dataclass(frozen=True)
class Spelling:
    example: str
    kinds: tuple[type, ...]  # of the arguments, in order
    required: int
    build: Callable[..., Policy]


SPELLINGS = {
    "chain": Spelling("chain:4", (int,), 1, Chain),
    "eagle3": Spelling("eagle3:4,4,16", (int, int, int), 3, Eagle),
    "sglang-eagle3": Spelling("sglang-eagle3:4,4,16", (int, int, int), 3, lambda *args: Eagle(*args, approximate=True)),
    "opt-tree": Spelling("opt-tree:16,0.5,10", (int, float, int), 1, OptTree),
    "talon": Spelling("talon:16,4,10,0.03", (int, int, int, float), 2, Talon),
    "sglang-talon": Spelling("sglang-talon:16,4,10,0.03", (int, int, int, float), 2, LaneTalon),
    "talon-layers": Spelling("talon-layers:16,4,2,10,0.03", (int, int, int, int, float), 3, TalonLayers),
}


def parse_policy(text: str) -> Policy:
    """`NAME:ARGS` -> policy. Raises ValueError with one sentence naming the text, what is wrong and an example."""
    name, _, rest = text.partition(":")
    if name not in SPELLINGS:
        raise ValueError(f"policy {text!r} is unknown; choose one of {', '.join(spelling.example for spelling in SPELLINGS.values())}")
    spelling = SPELLINGS[name]
    words = rest.split(",") if rest else []
    try:
        if not spelling.required <= len(words) <= len(spelling.kinds):
            raise ValueError(f"{len(words)} settings were given")
        return spelling.build(*(kind(word) for kind, word in zip(spelling.kinds, words)))
    except ValueError as error:
        raise ValueError(f"policy {text!r} cannot be read ({error}); an example is {spelling.example}") from None
