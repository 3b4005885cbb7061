"""Reads the draft trees that a TALON server writes (`--talon-trace FILE`) and chooses the ones worth looking at."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class TraceError(RuntimeError):
    """A trace that cannot be used. `str()` is one sentence."""


@dataclass(frozen=True)
class DraftRound:
    """One draft tree of one request: nodes in order, root first, parents before children.

    tokens, parents (root: -1), depths (root: 0): per node
    log_probs: cumulative draft log-probability of the path to each node, 0.0 at the root
    accepted: nodes on the path that the target accepted, root included; bonus: the token the target added behind it
    """

    rid: str
    round: int
    seq_len: int
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]
    accepted: list[int]
    bonus: int
    degraded: bool

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def widths(self) -> list[int]:
        """Nodes per layer, the root's layer left out."""
        count = Counter(self.depths)
        return [count[depth] for depth in range(1, self.depth + 1)]

    def probability(self, node: int) -> float:
        """Draft probability of a node given its parent; 1.0 for the root."""
        parent = self.parents[node]
        return 1.0 if parent < 0 else math.exp(self.log_probs[node] - self.log_probs[parent])

    def children(self) -> list[list[int]]:
        """Children of each node, the likeliest first."""
        below: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                below[parent].append(node)
        return [sorted(nodes, key=lambda node: -self.log_probs[node]) for nodes in below]


def read_trace(path: Path) -> list[DraftRound]:
    """All rounds of a trace file. A cut-off last line (a server that was killed) is ignored; other bad lines raise TraceError."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise TraceError(f"The trace {path} cannot be read ({error.strerror}); start a TALON server with --talon-trace.") from error
    rounds = []
    for number, line in enumerate(lines, start=1):
        try:
            rounds.append(DraftRound(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise TraceError(f"Line {number} of {path} is no draft round ({error}); pass the file that --talon-trace named.") from error
    return rounds


def deepest_and_widest(rounds: Iterable[DraftRound]) -> tuple[DraftRound, DraftRound]:
    """The deepest tree and the one with the widest layer; among equals the one with the longer accepted path, then the earlier one.

    They are two different rounds unless the trace holds only one. Raises TraceError when no round drafted anything.
    """
    drafted = [one for one in rounds if not one.degraded and len(one.tokens) > 1]
    if not drafted:
        raise TraceError("The trace holds no draft tree; send at least one request of a few tokens to the TALON server.")
    deepest = max(drafted, key=lambda one: (one.depth, len(one.accepted)))
    others = [one for one in drafted if one is not deepest] or drafted
    return deepest, max(others, key=lambda one: (max(one.widths), len(one.accepted)))


def tokens_before(rounds: Iterable[DraftRound], shown: DraftRound) -> list[int]:
    """What the request had generated when `shown` was drafted, as far as the trace tells; ends with the root of `shown`."""
    earlier = sorted((one for one in rounds if one.rid == shown.rid and one.round < shown.round), key=lambda one: one.round)
    return [one.tokens[node] for one in earlier for node in one.accepted] + [shown.tokens[0]]
