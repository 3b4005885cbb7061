"""From encoded chats to batches: which rows go together, in which order, and the index tensors that the loss needs.

The order is a pure function of (lengths, settings, epoch), the same in every process: a resumed run continues in it without replay, and the
number of supervised positions of a whole optimiser step is known everywhere without talking.

Shape suffixes: B batch, T positions, K training-time-test steps, Q query rows (rows that carry loss at any step), P positions whose target
distribution is needed, F target features, H hidden size.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from train.features import Features, predicting
from train.masks import Encoded, supervised_steps

Plan = list[list[list[int]]]  # optimiser steps -> micro-batches (one per process and accumulation step) -> row numbers


def plan_epoch(lengths: list[int], budget: int, parts: int, seed: int, epoch: int) -> Plan:
    """Every row exactly once. A micro-batch pads to at most `budget` tokens (or holds a single row); a step has exactly `parts` of them.

    Rows of similar length share a step; which ones, and the order of the steps, change with the epoch.
    Raises ValueError with fewer rows than parts.
    """
    if len(lengths) < parts:
        raise ValueError(f"{len(lengths)} training rows cannot feed {parts} micro-batches a step; use more rows or fewer processes.")
    rng = random.Random(f"{seed}/{epoch}")
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
    return [[step[part::parts] for part in range(parts)] for step in steps]


@dataclass
class Batch:
    """One micro-batch, right-padded. Row r reads feature r and token r+1+k at step k (see train.masks)."""

    ids_BT: torch.Tensor
    features_BTF: torch.Tensor
    final_PH: torch.Tensor  # the target's final hidden state at the positions that a query predicts from
    argmax_P: torch.Tensor  # the target's greedy token there, over the full vocabulary
    rows_BQ: torch.Tensor  # row number of each query; 0 on padding
    wanted_KBQ: torch.Tensor  # index into P of what query q predicts at step k; -1: no loss there

    def to(self, device, dtype: torch.dtype) -> "Batch":
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

        return Batch(**{field.name: move(getattr(self, field.name)) for field in fields(self)})


def make_batch(chats: list[Encoded], features: list[Features], ttt_steps: int) -> Batch:
    """Pad and index. `features[i]` must reach to `chats[i].useful_length`."""
    longest = max(len(chat.ids) for chat in chats)
    first = features[0].aux_TF
    ids_BT = torch.zeros(len(chats), longest, dtype=torch.long)
    features_BTF = torch.zeros(len(chats), longest, first.shape[1], dtype=first.dtype)
    finals, argmaxes, rows, wanted = [], [], [], []
    offset = 0
    for index, (chat, feature) in enumerate(zip(chats, features)):
        length = chat.useful_length
        ids_BT[index, : len(chat.ids)] = torch.tensor(chat.ids)
        features_BTF[index, :length] = feature.aux_TF[:length]
        span_ids_T = chat.span_ids()
        # Position p predicts token p+1; at step 0 row r predicts from position r+1.
        predicting_N = predicting(chat)
        slot_T = torch.full((longest + ttt_steps + 1,), -1, dtype=torch.long)
        slot_T[predicting_N] = offset + torch.arange(len(predicting_N))
        offset += len(predicting_N)
        finals.append(feature.final_PH)
        argmaxes.append(feature.argmax_P)
        masks_KT = torch.stack([supervised_steps(span_ids_T, step) for step in range(ttt_steps)])
        rows.append(masks_KT.any(0).nonzero()[:, 0])
        wanted.append(torch.stack([torch.where(mask[rows[-1]], slot_T[rows[-1] + 1 + k], -1) for k, mask in enumerate(masks_KT)]))
    width = max(map(len, rows))
    rows_BQ = torch.zeros(len(chats), width, dtype=torch.long)
    wanted_KBQ = torch.full((ttt_steps, len(chats), width), -1, dtype=torch.long)
    for index, (row, want) in enumerate(zip(rows, wanted)):
        rows_BQ[index, : len(row)] = row
        wanted_KBQ[:, index, : len(row)] = want
    return Batch(ids_BT, features_BTF, torch.cat(finals), torch.cat(argmaxes).long(), rows_BQ, wanted_KBQ)


def supervised_counts(chats: list[Encoded], ttt_steps: int) -> torch.Tensor:
    """How many positions carry loss at each step, by the span rule -> int64 [K]."""
    lengths = [end - start for chat in chats for start, end in chat.spans]
    starts = [start for chat in chats for start, _ in chat.spans]
    # Step k wants rows start-1-k .. end-3-k; those before row 0 do not exist.
    return torch.tensor(
        [sum(max(length - 1 - max(step + 1 - start, 0), 0) for length, start in zip(lengths, starts)) for step in range(ttt_steps)]
    )


class BatchLoader:
    """Encoded chats plus a way to get their features -> batches."""

    def __init__(self, chats: list[Encoded], get_features: Callable[[list[Encoded]], list[Features]], ttt_steps: int):
        self.chats, self.get_features, self.ttt_steps = chats, get_features, ttt_steps

    def batch(self, rows: list[int]) -> Batch:
        chats = [self.chats[row] for row in rows]
        return make_batch(chats, self.get_features(chats), self.ttt_steps)

    def counts(self, step: list[list[int]]) -> torch.Tensor:
        """Supervised positions of a whole optimiser step [K]."""
        return supervised_counts([self.chats[row] for part in step for row in part], self.ttt_steps)
