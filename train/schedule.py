"""Which conversations share a micro-batch, in which order, and how many steps a run has.

A pure function of (lengths, settings, micro-batches per step, epoch): every process computes the same plan, a resumed run goes on in it
without replay, and as long as processes x accumulation stays the same, so do the steps, whatever the number of processes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

Row = list[int]  # numbers of the documents that stand in one row of a batch, one after the other
Plan = list[list[list[Row]]]  # optimiser steps -> micro-batches (one per process and accumulation step) -> rows

OPEN_ROWS = 64  # rows that wait for a document that fits; more would fill them better and shuffle less


def plan_epoch(lengths: list[int], budget: int, parts: int, seed: int, epoch: int, packing: bool = False) -> Plan:
    """Every document exactly once. A micro-batch takes at most `budget` tokens, padding included (or one longer document); a step has
    exactly `parts` of them, none empty.

    Without packing a row holds one document, and documents of similar length share a step. With packing rows of one width are filled
    from all documents in random order.
    Raises ValueError with fewer documents than parts.
    """
    if len(lengths) < parts:
        raise ValueError(f"{len(lengths)} training rows cannot feed {parts} micro-batches a step; use more rows or fewer processes.")
    rng = random.Random(f"{seed}/{epoch}")
    return _packed(lengths, budget, parts, rng) if packing else _padded(lengths, budget, parts, rng)


def _padded(lengths: list[int], budget: int, parts: int, rng: random.Random) -> Plan:
    # A little noise on the length mixes neighbours anew in each epoch at next to no padding.
    order = sorted(range(len(lengths)), key=lambda row: lengths[row] * rng.uniform(0.9, 1.1))
    steps: list[list[int]] = [[]]
    longest = 0
    for row in order:
        longest = max(longest, lengths[row])
        size = len(steps[-1])
        if size >= parts and longest * -(-(size + 1) // parts) > budget:
            steps.append([])
            longest = lengths[row]
        steps[-1].append(row)
    if len(steps[-1]) < parts:  # too few for every process: spread the tail over the steps before it
        tail = steps.pop()
        for index, row in enumerate(tail):
            steps[-1 - index % len(steps)].append(row)
    rng.shuffle(steps)
    return [[[[row] for row in step[part::parts]] for part in range(parts)] for step in steps]


def _packed(lengths: list[int], budget: int, parts: int, rng: random.Random) -> Plan:
    """Rows no wider than the longest document needs: attention works on rows, so a wider one would only add masked scores."""
    fitting = [document for document, length in enumerate(lengths) if length <= budget]
    rows_each = budget // max((lengths[document] for document in fitting), default=budget)
    rows = _fill(fitting, lengths, budget // rows_each, rng)
    batches = [rows[first : first + rows_each] for first in range(0, len(rows), rows_each)]
    batches += [[[document]] for document, length in enumerate(lengths) if length > budget]
    rng.shuffle(batches)
    steps = [batches[first : first + parts] for first in range(0, len(batches), parts)]
    if len(steps[-1]) < parts:
        rows = [row for batch in steps.pop() for row in batch]
        while len(rows) < parts and (fullest := max(rows, key=len))[1:]:  # halve rows until there is one for everybody
            rows.remove(fullest)
            rows += [fullest[::2], fullest[1::2]]
        if len(rows) >= parts:
            steps.append([rows[part::parts] for part in range(parts)])
        else:
            for index, row in enumerate(rows):
                steps[-1 - index % len(steps)][index % parts].append(row)
    return steps


def _fill(documents: list[int], lengths: list[int], width: int, rng: random.Random) -> list[Row]:
    """First fit in random order, over the rows that are open."""
    rng.shuffle(documents)
    shortest = min((lengths[document] for document in documents), default=0)
    rows, open_rows = [], []  # open: [room, row]
    for document in documents:
        place = next((place for place, (room, _) in enumerate(open_rows) if room >= lengths[document]), None)
        if place is None:
            if len(open_rows) == OPEN_ROWS:
                open_rows.pop(min(range(OPEN_ROWS), key=lambda place: open_rows[place][0]))
            place = len(open_rows)
            rows.append([])
            open_rows.append([width, rows[-1]])
        open_rows[place][0] -= lengths[document]
        open_rows[place][1].append(document)
        if open_rows[place][0] < shortest:
            open_rows.pop(place)
    return rows


@dataclass(frozen=True)
class Schedule:
    """All steps of a run. `per_epoch`: steps of each epoch; with a token budget the last epoch is cut where the budget is reached."""

    lengths: tuple[int, ...]
    budget: int
    parts: int
    seed: int
    packing: bool
    per_epoch: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.per_epoch)

    def epoch(self, number: int) -> Plan:
        return _plan(self.lengths, self.budget, self.parts, self.seed, number, self.packing)[: self.per_epoch[number]]

    def tokens(self, step: list[list[Row]]) -> int:
        return sum(self.lengths[document] for part in step for row in part for document in row)

    @property
    def all_tokens(self) -> int:
        return self.tokens_until(self.total)

    def tokens_until(self, steps: int) -> int:
        """Tokens of the run's first so many optimiser steps."""
        all_steps = (step for number in range(len(self.per_epoch)) for step in self.epoch(number))
        return sum(map(self.tokens, islice(all_steps, steps)))


def make_schedule(lengths: list[int], settings, parts: int) -> Schedule:
    """`settings`: the recipe's `train` section; `parts`: micro-batches of an optimiser step.

    `train.epochs` passes over all documents, or as many as `train.tokens` tokens (padding not counted) need, at least one step.
    Raises ValueError with fewer documents than parts.
    """
    frozen = tuple(lengths)
    fixed = (frozen, settings.micro_batch_tokens, parts, settings.seed)
    per_epoch, left = [], settings.tokens
    while len(per_epoch) < settings.epochs if left is None else left > 0:
        steps = _plan(*fixed, len(per_epoch), settings.packing)
        count = len(steps)
        if left is not None:
            count = 0
            while left > 0 and count < len(steps):
                left -= sum(lengths[document] for part in steps[count] for row in part for document in row)
                count += 1
        per_epoch.append(count)
    return Schedule(*fixed, settings.packing, tuple(per_epoch))


@lru_cache(maxsize=2)
def _plan(lengths: tuple[int, ...], budget: int, parts: int, seed: int, epoch: int, packing: bool) -> Plan:
    return plan_epoch(list(lengths), budget, parts, seed, epoch, packing)
