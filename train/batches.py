"""From encoded chats to batches: the tensors of a micro-batch and the index tensors that the loss needs.

A row holds one chat, or several one after the other (packing). Positions count from 0 in every chat, and nothing in a row sees, reads or
predicts anything of another chat. The number of supervised positions of a whole optimiser step is known in every process without talking.

Shape suffixes: B batch, T positions of a row, K training-time-test steps, Q query rows (rows that carry loss at any
step), P positions whose target distribution is needed, N those of one chat, F target features, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from train.features import Features, predicting
from train.masks import Encoded, supervised_steps
from train.schedule import Row


@dataclass
class Batch:
    """One micro-batch, right-padded. Row r reads feature r and token r+1+k at step k (see train.masks)."""

    ids_BT: torch.Tensor
    positions_BT: torch.Tensor  # in the chat that stands there, from 0
    features_BTF: torch.Tensor
    final_PH: torch.Tensor  # the target's final hidden state at the positions that a query predicts from
    argmax_P: torch.Tensor  # the target's greedy token there, over the full vocabulary
    rows_BQ: torch.Tensor  # row number of each query; 0 on padding
    wanted_KBQ: torch.Tensor  # index into P of what query q predicts at step k; -1: no loss there

    def to(self, device, dtype: torch.dtype) -> "Batch":
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

        return Batch(**{field.name: move(getattr(self, field.name)) for field in fields(self)})


def make_batch(chats: list[Encoded], features: list[Features], ttt_steps: int, rows: list[Row] | None = None) -> Batch:
    """Place, pad and index. `rows[b]`: which of the chats stand in row b (default: one each, in order).

    `features[i]` must reach to `chats[i].useful_length`.
    """
    rows = [[index] for index in range(len(chats))] if rows is None else rows
    longest = max(sum(len(chats[index].ids) for index in row) for row in rows)
    first = features[0].aux_TF
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    positions_BT = torch.arange(longest).repeat(len(rows), 1)
    features_BTF = torch.zeros(len(rows), longest, first.shape[1], dtype=first.dtype)
    finals, argmaxes, queries, wanted, predicted = [], [], [], [], 0
    for b, row in enumerate(rows):
        at, queries_here, wanted_here = 0, [], []
        for chat, feature in ((chats[index], features[index]) for index in row):
            length, useful = len(chat.ids), chat.useful_length
            ids_BT[b, at : at + length] = torch.tensor(chat.ids)
            positions_BT[b, at:] = torch.arange(longest - at)
            features_BTF[b, at : at + useful] = feature.aux_TF[:useful]
            query_Q, wanted_KQ = _index(chat, ttt_steps)
            finals.append(feature.final_PH)
            argmaxes.append(feature.argmax_P)
            queries_here.append(query_Q + at)
            wanted_here.append(torch.where(wanted_KQ < 0, -1, wanted_KQ + predicted))
            at, predicted = at + length, predicted + len(feature.argmax_P)
        queries.append(torch.cat(queries_here))
        wanted.append(torch.cat(wanted_here, dim=1))
    width = max(map(len, queries))
    rows_BQ = torch.zeros(len(rows), width, dtype=torch.long)
    wanted_KBQ = torch.full((ttt_steps, len(rows), width), -1, dtype=torch.long)
    for b, (query_Q, wanted_KQ) in enumerate(zip(queries, wanted)):
        rows_BQ[b, : len(query_Q)] = query_Q
        wanted_KBQ[:, b, : len(query_Q)] = wanted_KQ
    return Batch(ids_BT, positions_BT, features_BTF, torch.cat(finals), torch.cat(argmaxes).long(), rows_BQ, wanted_KBQ)


def _index(chat: Encoded, ttt_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> rows that carry loss at any step [Q], index into the chat's predicting positions by step and row [K, Q], -1 for no loss."""
    span_ids_T = chat.span_ids()
    masks_KT = torch.stack([supervised_steps(span_ids_T, step) for step in range(ttt_steps)])
    predicting_N = predicting(chat)  # position p predicts token p+1; at step 0 row r predicts from position r+1
    slot_T = torch.full((len(chat.ids) + ttt_steps + 1,), -1, dtype=torch.long)
    slot_T[predicting_N] = torch.arange(len(predicting_N))
    query_Q = masks_KT.any(0).nonzero()[:, 0]
    wanted_KQ = torch.stack([torch.where(mask_T[query_Q], slot_T[query_Q + 1 + k], -1) for k, mask_T in enumerate(masks_KT)])
    return query_Q, wanted_KQ


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

    def batch(self, rows: list[Row]) -> Batch:
        numbers = [number for row in rows for number in row]
        place = {number: index for index, number in enumerate(numbers)}
        chats = [self.chats[number] for number in numbers]
        return make_batch(chats, self.get_features(chats), self.ttt_steps, [[place[number] for number in row] for row in rows])

    def counts(self, step: list[list[Row]]) -> torch.Tensor:
        """Supervised positions of a whole optimiser step [K]."""
        return supervised_counts([self.chats[number] for part in step for row in part for number in row], self.ttt_steps)
