import random
from types import SimpleNamespace

import pytest

from train.schedule import make_schedule, plan_epoch

SIZES = pytest.mark.parametrize("rows,budget,parts", [(1, 50, 1), (7, 64, 2), (100, 300, 1), (101, 300, 3), (64, 16, 4), (33, 10_000, 4)])
PACKING = pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])


def some_lengths(rows: int) -> list[int]:
    rng = random.Random(rows)
    return [rng.randint(2, 90) for _ in range(rows)]


def padded(part, lengths) -> int:
    return len(part) * max(sum(lengths[document] for document in row) for row in part)


@SIZES
@PACKING
def test_plan_takes_every_document_once_within_the_budget(rows, budget, parts, packing):
    lengths = some_lengths(rows)
    for epoch in range(3):
        plan = plan_epoch(lengths, budget, parts, 0, epoch, packing)
        assert sorted(document for step in plan for part in step for row in part for document in row) == list(range(rows))
        assert all(len(step) == parts and all(part and all(part) for part in step) for step in plan)
        assert packing or all(len(row) == 1 for step in plan for part in step for row in part)
        over = [part for step in plan for part in step if len(sum(part, [])) > 1 and padded(part, lengths) > budget]
        assert len(over) <= parts * parts  # only where the tail that could not feed every process was spread
    again = plan_epoch(lengths, budget, parts, 0, 2, packing)
    assert plan == again and (rows < 20 or plan != plan_epoch(lengths, budget, parts, 0, 1, packing))


def test_packing_wastes_little_and_mixes_lengths():
    """Lengths as in real chats: many short, few long. The rows are nearly full, in any order of lengths."""
    rng = random.Random(0)
    lengths = [min(2048, int(rng.lognormvariate(5.5, 0.9)) + 8) for _ in range(3000)]
    plan = plan_epoch(lengths, 8192, 2, 0, 0, packing=True)
    spent = sum(padded(part, lengths) for step in plan for part in step)
    assert sum(lengths) / spent > 0.93
    firsts = [lengths[step[0][0][0]] for step in plan]
    assert max(firsts) > 4 * min(firsts)


@PACKING
def test_the_same_steps_for_any_number_of_processes(packing):
    """The plan knows micro-batches, not processes: 4 x 1, 2 x 2 and 1 x 4 train the same steps."""
    settings = SimpleNamespace(micro_batch_tokens=120, seed=3, epochs=2, tokens=None, packing=packing)
    lengths = some_lengths(60)
    assert make_schedule(lengths, settings, 4) == make_schedule(lengths, settings, 2 * 2)


@PACKING
@pytest.mark.parametrize("tokens", [1, 700, 2500, 9000])
def test_a_token_budget_is_met_by_the_last_step_and_not_before(tokens, packing):
    settings = SimpleNamespace(micro_batch_tokens=120, seed=3, epochs=None, tokens=tokens, packing=packing)
    lengths = some_lengths(60)
    schedule = make_schedule(lengths, settings, 2)
    steps = [step for epoch in range(len(schedule.per_epoch)) for step in schedule.epoch(epoch)]
    assert len(steps) == schedule.total and schedule.all_tokens == sum(map(schedule.tokens, steps))
    assert schedule.all_tokens >= tokens > schedule.all_tokens - schedule.tokens(steps[-1])
    whole = SimpleNamespace(**{**vars(settings), "tokens": None, "epochs": 5})
    assert make_schedule(lengths, whole, 2).epoch(0)[: schedule.per_epoch[0]] == schedule.epoch(0)


@PACKING
def test_plan_refuses_fewer_documents_than_parts(packing):
    with pytest.raises(ValueError, match="2 training rows cannot feed 3"):
        plan_epoch([5, 5], 100, 3, 0, 0, packing)
