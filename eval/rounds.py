"""Rounds laid along an answer, and what is counted about them; no model in here.

A round starts at a root, the answer's token `start`. It *emits* tokens: one for each visited node of the tree whose token does not end the
answer, the root included: the token after the last accepted node is the target's own (the bonus). The next round starts at the last emitted
token. Emission stops at the token limit.

At temperature 0 the visited nodes are known. Above it, the tree being a function of the prefix alone, a node is visited with the
probability of its path under the target, so the expected number of emitted tokens is the sum of these probabilities over the nodes: the
same mean as the sampled outcome, without its noise. That rounds start where the *sampled* one ended, and that their number is random, does
not bias the sum over an answer (outcome minus expectation is a martingale; the last round is a stopping time).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields

from eval.policies import Draft
from talon_sglang.tree import DraftTree


@dataclass(frozen=True)
class Round:
    """`start`: the root's place in the answer; `path`: the accepted nodes below the root; `emitted`: tokens, bonus included."""

    start: int
    draft: Draft
    path: list[int]
    emitted: int


def follow(draft: Draft, start: int, answer: list[int]) -> Round:
    """Lay one round along a known answer, of which nothing is known past its end."""
    tree, node, path = draft.tree, 0, []
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens)) if i}
    for token in answer[start + 1 :]:
        node = child.get((node, token))
        if node is None:
            break
        path.append(node)
    return Round(start, draft, path, min(len(path) + 1, len(answer) - 1 - start))


def visit_probabilities(tree: DraftTree, path: Collection[int]) -> list[float]:
    """The sampled outcome as probabilities: 1 at the root and the accepted nodes, 0 elsewhere."""
    visited = {0, *path}
    return [1.0 if node in visited else 0.0 for node in range(len(tree))]


@dataclass
class Tally:
    """Sums over the rounds of one prompt under one policy.

    emitted: tokens, expected (equal to `sampled` at temperature 0); sampled: tokens of the sampled outcomes; forwards: draft forwards, the
    draft extend included; drafted, accepted: tree nodes without roots; offered[d-1]: rounds that came to depth d-1, went on, and had
    nodes one deeper; reached[d-1]: rounds that came to depth d; depths: rounds by tree depth; widths: layers by number of nodes;
    width_at[d-1]: nodes at depth d; lanes[i], forwarded[i]: nodes forwarded by the i-th draft forward after the draft extend, and rounds
    that had one; degraded: rounds whose draft failed.
    """

    rounds: int = 0
    emitted: float = 0.0
    sampled: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: float = 0.0
    degraded: int = 0
    offered: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    width_at: list[int] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    forwarded: list[int] = field(default_factory=list)
    depths: Counter = field(default_factory=Counter)
    widths: Counter = field(default_factory=Counter)

    def add(self, one: Round, probabilities: list[float], limit: int, end_ids: Collection[int] = ()) -> None:
        """Count one round. `probabilities`: each node's chance to be visited; `limit`: the most tokens that could still be emitted."""
        tree, depth = one.draft.tree, max(one.draft.tree.depths)
        self.rounds, self.sampled, self.forwards = self.rounds + 1, self.sampled + one.emitted, self.forwards + one.draft.forwards
        self.drafted, self.degraded = self.drafted + len(tree) - 1, self.degraded + tree.degraded
        for sums in (self.offered, self.reached, self.width_at):
            sums.extend([0] * (depth - len(sums)))
        for sums in (self.lanes, self.forwarded):
            sums.extend([0] * (len(one.draft.lanes) - len(sums)))
        for i, lanes in enumerate(one.draft.lanes):
            self.lanes[i] += lanes
            self.forwarded[i] += 1
        widths = Counter(tree.depths[1:])
        self.depths[depth] += 1
        self.widths.update(widths.values())
        reach, going_on = [0.0] * (depth + 1), [0.0] * (depth + 1)  # chance to come to a depth; and to need a further token there
        ended = set()  # end tokens and all below them: never read, an end token being the last one
        for node, (token, parent, at) in enumerate(zip(tree.tokens, tree.parents, tree.depths)):
            if parent in ended:
                ended.add(node)
                continue
            if at <= limit:
                reach[at] += probabilities[node]
            if node and token in end_ids:
                ended.add(node)
            elif at < limit:
                going_on[at] += probabilities[node]
        self.emitted += sum(going_on)
        self.accepted += sum(reach[1:])
        for at in range(1, depth + 1):
            self.width_at[at - 1] += widths[at]
            self.reached[at - 1] += reach[at]
            self.offered[at - 1] += going_on[at - 1]

    def to_json(self) -> dict:
        return {one.name: getattr(self, one.name) for one in fields(self)}  # asdict would break the Counters

    @classmethod
    def from_json(cls, data: dict) -> Tally:
        counters = {name: Counter({int(key): count for key, count in data[name].items()}) for name in ("depths", "widths")}
        return cls(**{**data, **counters})


@dataclass(frozen=True)
class Acceptance:
    """What a table shows of one policy over some prompts.

    accept_length: tokens per target forward as SGLang counts them (the first token, which prefill gives, included); standard_error: of
    that, over prompts; sampled_*: the same from the sampled outcomes alone; emitted: tokens a round emits (without the first token);
    accepted_at[d-1]: share of the rounds that accept at depth d, of those that came there; accepts[d-1]: of all rounds; lanes[i]: nodes a
    round forwards in the i-th draft forward after the draft extend, over all rounds; forwarded[i]: share of the rounds that have one.
    """

    prompts: int
    rounds: int
    accept_length: float
    standard_error: float | None
    sampled_accept_length: float
    sampled_standard_error: float | None
    emitted: float
    draft_forwards: float
    budget_accepted: float | None
    accepted_at: list[float]
    width_at: list[float]
    depths: dict[int, float]
    widths: dict[int, float]
    accepts: list[float]
    lanes: list[float]
    forwarded: list[float]
    degraded_rounds: int


def acceptance(tallies: Iterable[Tally]) -> Acceptance:
    """Figures over prompts. Raises ValueError when no prompt had a round."""
    found = list(tallies)
    rounds = sum(tally.rounds for tally in found)
    if not rounds:
        raise ValueError("No answer is longer than one token, so there is no round to count; use longer answers or other prompts.")
    drafted, depths, widths = sum(t.drafted for t in found), _total(t.depths for t in found), _total(t.widths for t in found)
    most = max(len(tally.lanes) for tally in found)
    deepest = max(len(tally.reached) for tally in found)
    offered, reached, width_at = (_columns(found, name, deepest) for name in ("offered", "reached", "width_at"))
    deep_enough = [sum(count for depth, count in depths.items() if depth > at) for at in range(deepest)]
    lengths, counts, sampled = ([1 + t.emitted for t in found], [t.rounds for t in found], [1 + t.sampled for t in found])
    return Acceptance(
        prompts=len(found),
        rounds=rounds,
        accept_length=sum(lengths) / rounds,
        standard_error=ratio_error(lengths, counts),
        sampled_accept_length=sum(sampled) / rounds,
        sampled_standard_error=ratio_error(sampled, counts),
        emitted=sum(tally.emitted for tally in found) / rounds,
        draft_forwards=sum(tally.forwards for tally in found) / rounds,
        budget_accepted=sum(tally.accepted for tally in found) / drafted if drafted else None,
        accepted_at=[got / tried if tried else 0.0 for got, tried in zip(reached, offered)],
        width_at=[nodes / trees for nodes, trees in zip(width_at, deep_enough)],
        depths={depth: count / rounds for depth, count in sorted(depths.items())},
        widths={width: count / sum(widths.values()) for width, count in sorted(widths.items())},
        accepts=[got / rounds for got in reached],
        lanes=[count / rounds for count in _columns(found, "lanes", most)],
        forwarded=[count / rounds for count in _columns(found, "forwarded", most)],
        degraded_rounds=sum(tally.degraded for tally in found),
    )


def ratio_error(above: list[float], below: list[float]) -> float | None:
    """Standard error of sum(above) / sum(below) over independent pairs (linearised); None for fewer than two."""
    if len(above) < 2:
        return None
    ratio = sum(above) / sum(below)
    residuals = sum((a - ratio * b) ** 2 for a, b in zip(above, below))
    return math.sqrt(residuals * len(above) / (len(above) - 1)) / sum(below)


def paired_difference(ours: list[Tally], theirs: list[Tally]) -> tuple[float, float | None]:
    """(accept length of `ours` minus that of `theirs`, its standard error), both measured on the same prompts in the same order: what
    makes a prompt easy for both cancels. The error is linearised, and None for fewer than two prompts."""
    ratios, residuals = [], [0.0] * len(ours)
    for sign, tallies in ((1, ours), (-1, theirs)):
        rounds = sum(tally.rounds for tally in tallies)
        ratio = sum(1 + tally.emitted for tally in tallies) / rounds
        ratios.append(ratio)
        residuals = [old + sign * (1 + t.emitted - ratio * t.rounds) / rounds for old, t in zip(residuals, tallies, strict=True)]
    count = len(ours)
    error = math.sqrt(sum(one**2 for one in residuals) * count / (count - 1)) if count > 1 else None
    return ratios[0] - ratios[1], error


def _columns(tallies: list[Tally], name: str, length: int) -> list[float]:
    lists = [getattr(tally, name) for tally in tallies]
    return [sum(values[i] for values in lists if i < len(values)) for i in range(length)]


def _total(counters: Iterable[Counter]) -> Counter:
    return sum(counters, Counter())
