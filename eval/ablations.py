"""What eval/ablate.py measures: the paper's comparisons and ablations, as lists of policies.

Each at the paper's size (N=60, K=10; section 6.1, appendix E.1.2) and, where that costs little, at a size for a CPU (N=16, K=4).
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE, SMALL, SMALLEST = "60,10", "16,4", "8,2"
GATES = (0.001, 0.01, 0.03, 0.1, 0.2, 0.3)
BUDGETS = (8, 16, 32, 60, 96)
CAPS = (2, 3, 4, 6, 10, 0)


@dataclass(frozen=True)
class Row:
    """A policy's spelling in an ablation: its series, its value on the x axis (a number, or what to call it), what it is held against."""

    policy: str
    series: str
    value: float | str
    base: str


@dataclass(frozen=True)
class Ablation:
    name: str
    question: str
    axis: str
    rows: tuple[Row, ...]
    log: bool = False

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(row.series for row in self.rows))


def gates(size: str) -> list[Row]:
    return [Row(f"talon:{size},10,{gate:g}", f"N,K = {size}", gate, f"talon:{size},10,0.03") for gate in GATES]


def budgets() -> list[Row]:
    """K is the paper's 10, and a quarter of N below 40. EAGLE-3 prunes one and the same tree (K=10, D=8) to each N, as in the paper."""
    rows = []
    for nodes in BUDGETS:
        talon = f"talon:{nodes},{10 if nodes > 40 else nodes // 4}"
        rows.append(Row(talon, "TALON", nodes, talon))
        rows.append(Row(f"eagle3:10,8,{nodes}", "EAGLE-3", nodes, talon))
        rows.append(Row(f"opt-tree:{nodes}", "OPT-Tree", nodes, talon))
    return rows


def layers(size: str) -> list[Row]:
    base = f"talon:{size}"
    return [Row(base if k == 1 else f"talon-layers:{size},{k}", f"N,K = {size}", k, base) for k in range(4)]


def caps(size: str, gate: float) -> list[Row]:
    series = f"N,K = {size}, gate {gate:g}"
    return [Row(f"talon:{size},{cap},{gate:g}", series, str(cap or "none"), f"talon:{size},0,{gate:g}") for cap in CAPS]


def ancestors(exact: str, approximate: str, series: str) -> list[Row]:
    return [Row(exact, series, "exact", exact), Row(approximate, series, "SGLang's lanes", exact)]


# EAGLE-3 as stock SGLang serves it; its true ancestors are in ANCESTORS.
LARGE_EAGLE, SMALL_EAGLE, SMALLEST_EAGLE = "sglang-eagle3:10,8,60", "sglang-eagle3:4,4,16", "sglang-eagle3:2,3,8"
VERSUS = [
    *(Row(policy, "N = 60", policy, LARGE_EAGLE) for policy in ("talon:60,10", LARGE_EAGLE, "opt-tree:60", "opt-tree:60,0.1")),
    *(Row(policy, "N = 16", policy, SMALL_EAGLE) for policy in ("talon:16,4", "talon:16,4,10,0.1", SMALL_EAGLE, "opt-tree:16", "chain:4")),
    *(Row(policy, "N = 8", policy, SMALLEST_EAGLE) for policy in ("talon:8,2", SMALLEST_EAGLE)),
]
ANCESTORS = [
    *ancestors("talon:60,10", "sglang-talon:60,10", "TALON 60,10"),
    *ancestors("talon:16,4", "sglang-talon:16,4", "TALON 16,4"),
    *ancestors("eagle3:10,8,60", "sglang-eagle3:10,8,60", "EAGLE-3 10,8,60"),
    *ancestors("eagle3:4,4,16", "sglang-eagle3:4,4,16", "EAGLE-3 4,4,16"),
]
ABLATIONS = {
    one.name: one
    for one in (
        Ablation("versus", "TALON, EAGLE-3 and OPT-Tree, side by side", "policy", tuple(VERSUS)),
        Ablation("gate", "The gate mu", "mu", tuple(gates(LARGE) + gates(SMALL) + gates(SMALLEST)), log=True),
        Ablation("budget", "The node budget N", "N", tuple(budgets())),
        Ablation("layers", "Layers that take their K best before the gate rules", "top-K layers", tuple(layers(LARGE) + layers(SMALL))),
        Ablation("cap", "The depth cap", "cap", tuple(caps(LARGE, 0.03) + caps(LARGE, 0.2))),
        Ablation("ancestors", "True ancestors, or the history of a lane's own slots", "attention", tuple(ANCESTORS)),
    )
}
