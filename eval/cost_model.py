"""What a round costs, from fitted lines: no server and no clock in here.

Each part of a round is a line, milliseconds = fixed + slope * size:
    plain     a decode forward of the target; size: sequences
    verify    the target's forward over all trees; size: nodes of all trees together
    draft     one draft forward; size: its lanes, all sequences together
    extend    the draft's forward over what was accepted; size: its rows, all sequences together
    plain overhead, overhead    the rest of a round, from its start to the start of the next; size: sequences

A batch drafts as long as its deepest tree grows and extends as many rows as its longest accepted path has (stock EAGLE3: always N).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PARTS = ("plain", "plain overhead", "verify", "draft", "extend", "overhead")


@dataclass(frozen=True)
class Line:
    fixed: float
    slope: float

    def at(self, size: float) -> float:
        return self.fixed + self.slope * size


@dataclass(frozen=True)
class Sample:
    """Median milliseconds of `count` measurements of one part at one size."""

    part: str
    size: float
    ms: float
    count: int


def fit(samples: Iterable[Sample]) -> Line:
    """Least squares of the relative error, with neither number below zero. Raises ValueError for no samples."""
    found = list(samples)
    if not found:
        raise ValueError("there is nothing to fit a line to")
    size, ms = np.array([s.size for s in found]), np.array([s.ms for s in found])
    line = np.linalg.lstsq(np.stack([1 / ms, size / ms], axis=1), np.ones(len(ms)), rcond=None)[0] if len(set(size)) > 1 else (-1, 0)
    if min(line) >= 0:
        return Line(*map(float, line))
    ones = {"constant": 1 / ms, "through zero": size / ms}
    scale = {name: float(column.sum() / (column**2).sum()) for name, column in ones.items()}
    error = {name: float(((scale[name] * column - 1) ** 2).sum()) for name, column in ones.items()}
    return Line(scale["constant"], 0.0) if error["constant"] <= error["through zero"] else Line(0.0, scale["through zero"])


@dataclass(frozen=True)
class CostModel:
    lines: dict[str, Line]

    @classmethod
    def fitted(cls, samples: Iterable[Sample]) -> CostModel:
        """Raises ValueError naming the part that has no sample."""
        by_part = {part: [] for part in PARTS}
        for sample in samples:
            by_part[sample.part].append(sample)
        for part, found in by_part.items():
            if not found:
                raise ValueError(f"no sample of {part!r} was measured; measure with at least one batch size and one N")
        return cls({part: fit(found) for part, found in by_part.items()})

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """Of a file of eval/cost.py. Raises ValueError when it is none."""
        try:
            return cls({part: Line(**line) for part, line in json.loads(path.read_text())["lines"].items()})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file of eval/cost.py ({error!r}); pass the JSON that its --out named") from error

    def plain_ms(self, batch: int) -> float:
        return self.lines["plain"].at(batch) + self.lines["plain overhead"].at(batch)

    def plain_tokens_per_s(self, batch: int) -> float:
        return 1e3 * batch / self.plain_ms(batch)

    def round_ms(self, figure: dict, nodes: int, batch: int, full_extend: bool = False) -> float:
        """Expected milliseconds of a round of `batch` sequences. `figure`: an Acceptance of eval/accept.py as JSON; `nodes`: N;
        `full_extend`: the draft extend always runs N rows a sequence, as stock EAGLE3's does.
        """
        draft = sum(
            self.lines["draft"].fixed * at_least_one(share, batch) + self.lines["draft"].slope * batch * lanes
            for share, lanes in zip(figure["forwarded"], figure["lanes"])
        )
        rows = nodes if full_extend else 1 + sum(at_least_one(share, batch) for share in figure["accepts"])
        parts = self.lines["verify"].at(batch * nodes) + self.lines["extend"].at(batch * rows) + self.lines["overhead"].at(batch)
        return draft + parts

    def tokens_per_s(self, figure: dict, nodes: int, batch: int, full_extend: bool = False) -> float:
        """Of all sequences together, while they decode; prefill and queueing are not in it."""
        return 1e3 * batch * figure["emitted"] / self.round_ms(figure, nodes, batch, full_extend)


def at_least_one(share: float, batch: int) -> float:
    """The chance that something which befalls one sequence with chance `share` befalls any of a batch."""
    return 1 - (1 - min(share, 1.0)) ** batch
