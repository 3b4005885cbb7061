import random

import pytest
import torch

from train.batches import make_batch, supervised_counts
from train.features import Features, predicting
from train.masks import Encoded, supervised_steps


def random_chat(rng: random.Random) -> Encoded:
    length = rng.randint(2, 30)
    cuts = sorted(rng.sample(range(1, length + 1), min(length, 2 * rng.randint(1, 3)) // 2 * 2))
    spans = list(zip(cuts[::2], cuts[1::2])) or [(1, length)]
    return Encoded([rng.randrange(50) for _ in range(length)], spans)


@pytest.mark.parametrize("seed", range(200))
def test_span_rule_counts_and_indices_equal_brute_force(seed):
    chat = random_chat(random.Random(seed))
    steps = 6

    def span_of(position):
        return next((n for n, (a, b) in enumerate(chat.spans) if a <= position < b), None)

    def wants(row, step):
        seen, predicted = row + 1 + step, row + 2 + step
        return predicted < len(chat.ids) and span_of(seen) is not None and span_of(seen) == span_of(predicted)

    for step in range(steps):
        assert supervised_steps(chat.span_ids(), step).tolist() == [wants(row, step) for row in range(len(chat.ids))]
    assert supervised_counts([chat], steps).tolist() == [sum(wants(row, step) for row in range(len(chat.ids))) for step in range(steps)]
    if not chat.predicted or not any(wants(row, 0) for row in range(len(chat.ids))):
        return
    # The final hidden state holds its own position, so an index into it tells which position it means.
    length = chat.useful_length
    positions_P = torch.tensor([p for p in range(1, length) if span_of(p) is not None and span_of(p) == span_of(p + 1)])
    batch = make_batch([chat], [Features(torch.zeros(length, 3), positions_P[:, None].float(), positions_P.int())], steps)
    found = {
        (row, step): int(batch.argmax_P[wanted])
        for step in range(steps)
        for row, wanted in zip(batch.rows_BQ[0].tolist(), batch.wanted_KBQ[step, 0].tolist())
        if wanted >= 0
    }
    assert found == {(row, step): row + 1 + step for step in range(steps) for row in range(len(chat.ids)) if wants(row, step)}
    assert batch.final_PH[:, 0].tolist() == batch.argmax_P.tolist()


@pytest.mark.parametrize("seed", range(30))
def test_a_packed_row_holds_what_its_chats_hold_alone(seed):
    """Every query of a packed batch: the same tokens, positions, features and targets as in a batch of its own."""
    rng, steps = random.Random(seed), 4
    chats = [random_chat(rng) for _ in range(5)]
    chats = [chat for chat in chats if supervised_counts([chat], 1).item()] or [Encoded([1, 2, 3, 4], [(1, 4)])]
    counts = [len(predicting(chat)) for chat in chats]
    features = [Features(torch.randn(chat.useful_length, 6), torch.randn(n, 2), torch.randint(50, (n,))) for chat, n in zip(chats, counts)]
    order = rng.sample(range(len(chats)), len(chats))
    cut = rng.randint(0, len(chats))
    rows = [row for row in (order[:cut], order[cut:]) if row]
    packed = make_batch(chats, features, steps, rows)
    assert packed.ids_BT.shape == (len(rows), max(sum(len(chats[i].ids) for i in row) for row in rows))
    for b, row in enumerate(rows):
        found = list(queries(packed, b))
        expected = [query for i in row for query in queries(make_batch([chats[i]], [features[i]], steps), 0)]
        assert len(found) == len(expected)
        for (ours, our_tensors), (theirs, their_tensors) in zip(found, expected):
            assert ours == theirs and all(map(torch.equal, our_tensors, their_tensors))


def queries(batch, b):
    """Of each query row: its position, the step-0 inputs of its chat up to it, and per step what it reads and predicts."""
    for q, row in enumerate(batch.rows_BQ[b].tolist()):
        wanted_K = batch.wanted_KBQ[:, b, q].tolist()
        if max(wanted_K) < 0:
            continue
        position = int(batch.positions_BT[b, row])
        first = row - position
        tensors = [batch.ids_BT[b, first + 1 : row + 2], batch.features_BTF[b, first : row + 1]]
        read = [int(batch.ids_BT[b, row + 1 + k]) for k, wanted in enumerate(wanted_K) if wanted >= 0]
        tensors += [batch.final_PH[wanted] for wanted in wanted_K if wanted >= 0]
        yield (position, read, [int(batch.argmax_P[wanted]) for wanted in wanted_K if wanted >= 0]), tensors
