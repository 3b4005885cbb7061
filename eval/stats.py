"""The arithmetic of a comparison between servers, free of I/O.

A run is what one server answered: {set name: SetResult}. Two runs are compared prompt by prompt, because prompts differ far more from each
other than servers do: the ratio of each prompt's own two times is taken first, the median over prompts second.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

BOOTSTRAP_RESAMPLES = 5000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class AnswerRow:
    """One request. tokens: generated tokens; rounds: verified drafts (0 without speculation); latency_s: seconds, prefill included."""

    id: str
    tokens: int
    rounds: int
    latency_s: float
    output_ids: list[int]

    @property
    def s_per_token(self) -> float:
        return self.latency_s / self.tokens


@dataclass(frozen=True)
class SetResult:
    """One prompt set on one server.

    wall_s: seconds from the first request to the last answer
    draft_forwards: draft forwards summed over request-rounds, None without speculation
    draft_rounds: the request-rounds that `draft_forwards` was counted over
    degraded_rounds: request-rounds that fell back to plain decoding
    """

    wall_s: float
    draft_forwards: float | None
    draft_rounds: float | None
    degraded_rounds: float | None
    answers: list[AnswerRow]

    @classmethod
    def from_json(cls, data: dict) -> "SetResult":
        return cls(**{**data, "answers": [AnswerRow(**row) for row in data["answers"]]})

    def to_json(self) -> dict:
        return asdict(self)


Run = Mapping[str, SetResult]


@dataclass(frozen=True)
class Ratio:
    """How many times faster a run is than its base: median over `prompts` prompts, and a bootstrap interval of that median."""

    median: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True)
class Figures:
    """What the table shows for one run over one prompt set (or all of them). Fields are None where they have no meaning."""

    prompts: int
    tokens: int
    tokens_per_s: float
    accept_length: float | None
    draft_forwards_per_round: float | None
    degraded_rounds: float | None
    same_as_plain: float | None
    faster_than_plain: Ratio | None


def figures(run: Run, plain: Run | None, sets: Iterable[str]) -> Figures:
    """Figures of `run` over `sets` together. Only sets that `plain` has too count for the comparison with it."""
    sets = list(sets)
    results = [run[name] for name in sets]
    answers = [row for result in results for row in result.answers]
    tokens = sum(row.tokens for row in answers)
    rounds = sum(row.rounds for row in answers)
    both = [name for name in sets if plain is not None and name in plain]
    return Figures(
        prompts=len(answers),
        tokens=tokens,
        tokens_per_s=tokens / sum(result.wall_s for result in results),
        accept_length=tokens / rounds if rounds else None,
        draft_forwards_per_round=_quotient(_total(results, "draft_forwards"), _total(results, "draft_rounds")),
        degraded_rounds=_total(results, "degraded_rounds"),
        same_as_plain=same_share(run, plain, both) if both else None,
        faster_than_plain=time_ratio(run, plain, both) if both and run is not plain else None,
    )


def time_ratio(run: Run, base: Run, sets: Iterable[str]) -> Ratio:
    """Median over prompts of (base seconds per token) / (run seconds per token): above 1, `run` is faster. ValueError without pairs."""
    ratios = [theirs.s_per_token / ours.s_per_token for ours, theirs in pairs(run, base, sets)]
    if not ratios:
        raise ValueError("The two runs share no answered prompt, so there is nothing to pair; measure both with the same prompts.")
    low, high = bootstrap_median(ratios)
    return Ratio(float(np.median(ratios)), low, high, len(ratios))


def same_share(run: Run, base: Run, sets: Iterable[str]) -> float:
    """Share of the paired prompts (0 to 1) whose output ids are equal, token for token."""
    same = [ours.output_ids == theirs.output_ids for ours, theirs in pairs(run, base, sets)]
    return sum(same) / len(same) if same else float("nan")


def pairs(run: Run, base: Run, sets: Iterable[str]) -> list[tuple[AnswerRow, AnswerRow]]:
    """(run's row, base's row) for each prompt that both answered with at least one token, matched by set and id."""
    found = []
    for name in sets:
        theirs = {row.id: row for row in base[name].answers}
        found += [(row, theirs[row.id]) for row in run[name].answers if row.id in theirs and row.tokens and theirs[row.id].tokens]
    return found


def bootstrap_median(values: Iterable[float], resamples: int = BOOTSTRAP_RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval (`CONFIDENCE`) of the median of `values`, resampled with replacement; the seed makes reruns equal."""
    values = np.asarray(list(values), dtype=float)
    picks = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    medians = np.median(values[picks], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return float(low), float(high)


def _total(results: list[SetResult], name: str) -> float | None:
    values = [getattr(result, name) for result in results]
    return None if any(value is None for value in values) else sum(values)


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
