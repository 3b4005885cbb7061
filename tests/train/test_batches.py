import random

import pytest
import torch

from train.batches import make_batch, plan_epoch, supervised_counts
from train.features import Features
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


@pytest.mark.parametrize("rows,budget,parts", [(1, 50, 1), (7, 64, 2), (100, 300, 1), (101, 300, 3), (64, 16, 4), (33, 10_000, 4)])
def test_plan_takes_every_row_once_within_the_budget(rows, budget, parts):
    rng = random.Random(rows)
    lengths = [rng.randint(2, 90) for _ in range(rows)]
    for epoch in range(3):
        plan = plan_epoch(lengths, budget, parts, 0, epoch)
        assert sorted(row for step in plan for part in step for row in part) == list(range(rows))
        assert all(len(step) == parts and all(step) for step in plan)
        over = [part for step in plan for part in step if len(part) > 1 and len(part) * max(lengths[row] for row in part) > budget]
        assert len(over) <= parts * parts  # only where the tail that could not feed every process was spread
    assert plan == plan_epoch(lengths, budget, parts, 0, 2) and (rows < 20 or plan != plan_epoch(lengths, budget, parts, 0, 1))


def test_plan_refuses_fewer_rows_than_parts():
    with pytest.raises(ValueError, match="2 training rows cannot feed 3"):
        plan_epoch([5, 5], 100, 3, 0, 0)
