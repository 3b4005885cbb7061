"""The arithmetic of a comparison between servers, free of I/O.

A run is what one server answered under one load: {set name: SetResult}. Two runs are compared prompt by prompt, because prompts differ far
more from each other than servers do: the ratio of each prompt's own two times is taken first, the median over prompts second.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

BOOTSTRAP_RESAMPLES = 5000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class AnswerRow:
    """One request. tokens: generated tokens; rounds: verified drafts (0 without speculation); latency_s: seconds, prefill included.

    talon: the server's own report about the request (`meta_info["talon"]`), TALON only
    chunks: of a streamed answer, [tokens, seconds since the chunk before]; the first one's seconds are the time to the first token
    """

    id: str
    tokens: int
    rounds: int
    latency_s: float
    output_ids: list[int]
    talon: dict | None = None
    chunks: list[list[float]] | None = None

    @property
    def s_per_token(self) -> float:
        return self.latency_s / self.tokens


@dataclass(frozen=True)
class Block:
    """Some prompts of a set, sent to one server while the other servers waited.

    session: which start of the servers; blocks of two runs with the same session were measured in turn
    wall_s: seconds from the first request to the last answer
    counters: what the server's own counters grew by (COUNTERS), None where it has none
    """

    session: int
    wall_s: float
    counters: dict[str, float] | None
    answers: list[AnswerRow]

    @classmethod
    def from_json(cls, data: dict) -> "Block":
        return cls(**{**data, "answers": [AnswerRow(**row) for row in data["answers"]]})

    def to_json(self) -> dict:
        empty = ("talon", "chunks")
        rows = [{key: value for key, value in asdict(row).items() if value is not None or key not in empty} for row in self.answers]
        return {"session": self.session, "wall_s": self.wall_s, "counters": self.counters, "answers": rows}


# Draft forwards and degraded rounds are counted over request-rounds; drafted and accepted nodes without roots.
COUNTERS = ("draft_forwards", "rounds", "degraded_rounds", "drafted_nodes", "accepted_nodes")


@dataclass(frozen=True)
class SetResult:
    """One prompt set on one server, under one load."""

    blocks: list[Block]

    @property
    def answers(self) -> list[AnswerRow]:
        return [row for block in self.blocks for row in block.answers]

    @property
    def wall_s(self) -> float:
        return sum(block.wall_s for block in self.blocks)

    def total(self, counter: str) -> float | None:
        """None where the server does not count it."""
        values = [(block.counters or {}).get(counter) for block in self.blocks]
        return None if any(value is None for value in values) else sum(values)


Run = Mapping[str, SetResult]


@dataclass(frozen=True)
class Ratio:
    """How many times faster a run is than its base, with a bootstrap interval.

    count: what was resampled, prompts or blocks
    in_turn: all of it was measured in turn, so that a machine that slows down meanwhile slows both
    """

    value: float
    low: float
    high: float
    count: int
    in_turn: bool


@dataclass(frozen=True)
class Latency:
    """Milliseconds, [median, 95 %, 99 %], of streamed answers.

    first: from the request to the first token
    token: between tokens, the tokens of a chunk sharing its time; chunk: between chunks, which is what a reader sees
    """

    first: list[float]
    token: list[float]
    chunk: list[float]


@dataclass(frozen=True)
class Figures:
    """What the table shows for one run over one prompt set (or all of them). Fields are None where they have no meaning.

    faster_than_plain: speed of a request per token; more_than_plain: tokens per second of all requests together
    depths, widths: request-rounds by depth of the tree, by nodes of its widest layer
    """

    prompts: int
    tokens: int
    tokens_per_s: float
    accept_length: float | None
    draft_forwards_per_round: float | None
    budget_accepted: float | None
    degraded_rounds: float | None
    same_as_plain: float | None
    faster_than_plain: Ratio | None
    more_than_plain: Ratio | None
    latency: Latency | None
    depths: dict[str, int] | None
    widths: dict[str, int] | None


def figures(run: Run, plain: Run | None, sets: Iterable[str], greedy: bool = True) -> Figures:
    """Figures of `run` over `sets` together. Only sets that `plain` has too count for the comparison with it.

    Sampled answers (`greedy` false) differ between any two runs, so equality has no meaning there.
    """
    sets = list(sets)
    results = [run[name] for name in sets]
    answers = [row for result in results for row in result.answers]
    tokens, rounds = sum(row.tokens for row in answers), sum(row.rounds for row in answers)
    both = [name for name in sets if plain is not None and name in plain]
    compared = bool(both) and run is not plain and bool(pairs(run, plain, both))
    return Figures(
        prompts=len(answers),
        tokens=tokens,
        tokens_per_s=tokens / sum(result.wall_s for result in results),
        accept_length=tokens / rounds if rounds else None,
        draft_forwards_per_round=_quotient(_total(results, "draft_forwards"), _total(results, "rounds")),
        budget_accepted=_quotient(_total(results, "accepted_nodes"), _total(results, "drafted_nodes")),
        degraded_rounds=_total(results, "degraded_rounds"),
        same_as_plain=same_share(run, plain, both) if both and greedy else None,
        faster_than_plain=time_ratio(run, plain, both) if compared else None,
        more_than_plain=throughput_ratio(run, plain, both) if compared else None,
        latency=latency(answers),
        depths=histogram(answers, "tree_depths"),
        widths=histogram(answers, "tree_widths"),
    )


def time_ratio(run: Run, base: Run, sets: Iterable[str]) -> Ratio:
    """Median over prompts of (base seconds per token) / (run seconds per token): above 1, `run` is faster. ValueError without pairs."""
    sets = list(sets)
    ratios = [theirs.s_per_token / ours.s_per_token for ours, theirs in pairs(run, base, sets)]
    if not ratios:
        raise ValueError("The two runs share no answered prompt, so there is nothing to pair; measure both with the same prompts.")
    low, high = bootstrap_median(ratios)
    return Ratio(float(np.median(ratios)), low, high, len(ratios), measured_in_turn(run, base, sets))


def throughput_ratio(run: Run, base: Run, sets: Iterable[str]) -> Ratio:
    """(run tokens per second) / (base tokens per second) over the blocks that both have; the interval resamples blocks, pair by pair."""
    sets = list(sets)
    paired = [(ours, theirs) for name in sets for ours, theirs in zip(run[name].blocks, base[name].blocks)]
    columns_P4 = np.array([[*_tokens_and_s(ours), *_tokens_and_s(theirs)] for ours, theirs in paired], dtype=float)
    picks_RP = np.random.default_rng(0).integers(len(paired), size=(BOOTSTRAP_RESAMPLES, len(paired)))
    ratios_R = _throughput_quotient(columns_P4[picks_RP].sum(axis=1))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios_R, [tail, 1 - tail])
    value = _throughput_quotient(columns_P4.sum(axis=0))
    return Ratio(float(value), float(low), float(high), len(paired), measured_in_turn(run, base, sets))


def measured_in_turn(run: Run, base: Run, sets: Iterable[str]) -> bool:
    return all(ours.session == theirs.session for name in sets for ours, theirs in zip(run[name].blocks, base[name].blocks))


def same_share(run: Run, base: Run, sets: Iterable[str]) -> float | None:
    """Share of the paired prompts (0 to 1) whose output ids are equal, token for token; None without a pair."""
    same = [ours.output_ids == theirs.output_ids for ours, theirs in pairs(run, base, sets)]
    return sum(same) / len(same) if same else None


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


def latency(answers: Iterable[AnswerRow]) -> Latency | None:
    """None when no answer was streamed."""
    streamed = [row.chunks for row in answers if row.chunks]
    if not streamed:
        return None
    later = [chunk for chunks in streamed for chunk in chunks[1:]]
    # The first chunk is the first token's; tokens that came with it have no time of their own.
    per_token = [seconds / tokens for tokens, seconds in later for _ in range(int(tokens))]
    return Latency(percentiles(chunks[0][1] for chunks in streamed), percentiles(per_token), percentiles(s for _, s in later))


def percentiles(seconds: Iterable[float]) -> list[float]:
    """[median, 95 %, 99 %] in milliseconds; empty for nothing."""
    values = list(seconds)
    return [1000 * float(value) for value in np.percentile(values, [50, 95, 99])] if values else []


def histogram(answers: Iterable[AnswerRow], name: str) -> dict[str, int] | None:
    """Sum of the servers' own counts by value, in order of the value; None where no answer has any."""
    total: Counter = Counter()
    for row in answers:
        total.update({int(value): count for value, count in (row.talon or {}).get(name, {}).items()})
    return {str(value): total[value] for value in sorted(total)} or None


def _tokens_and_s(block: Block) -> tuple[int, float]:
    return sum(row.tokens for row in block.answers), block.wall_s


def _throughput_quotient(columns: np.ndarray) -> np.ndarray:
    """[..., (our tokens, our seconds, their tokens, their seconds)] -> how many times their tokens per second ours are."""
    return columns[..., 0] / columns[..., 1] / (columns[..., 2] / columns[..., 3])


def _total(results: list[SetResult], counter: str) -> float | None:
    values = [result.total(counter) for result in results]
    return None if any(value is None for value in values) else sum(values)


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
