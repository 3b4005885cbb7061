"""The arithmetic of the comparison against slow, literal versions of its definitions."""

import itertools
import random
import statistics

import pytest

from eval.stats import AnswerRow, SetResult, bootstrap_median, figures, pairs, same_share, time_ratio


def result(rows, wall_s=1.0, forwards=None, rounds=None):
    return SetResult(wall_s, forwards, rounds, None if forwards is None else 0, rows)


def row(name, tokens=10, rounds=5, latency_s=1.0, ids=(1, 2)):
    return AnswerRow(name, tokens, rounds, latency_s, list(ids))


def random_run(rng, names):
    return {
        name: result([row(f"p{i}", rng.randint(1, 64), rng.randint(1, 30), rng.uniform(0.1, 5), [rng.randint(0, 1)]) for i in range(count)])
        for name, count in names.items()
    }


def test_the_ratio_is_the_median_over_prompts_of_the_ratio_of_their_own_times():
    rng = random.Random(1)
    run, base = random_run(rng, {"a": 7, "b": 4}), random_run(rng, {"a": 7, "b": 4})
    expected = []
    for name in ("a", "b"):
        for ours in run[name].answers:
            theirs = next(one for one in base[name].answers if one.id == ours.id)
            expected.append((theirs.latency_s / theirs.tokens) / (ours.latency_s / ours.tokens))
    ratio = time_ratio(run, base, ["a", "b"])
    assert ratio.median == pytest.approx(statistics.median(expected))
    assert ratio.prompts == 11
    assert min(expected) <= ratio.low <= ratio.median <= ratio.high <= max(expected)


def test_ids_pair_within_their_set_and_only_where_both_answered():
    run = {"a": result([row("1"), row("2"), row("3", tokens=0)]), "b": result([row("1", latency_s=9.0)])}
    base = {"a": result([row("3"), row("1", latency_s=2.0)]), "b": result([row("1", latency_s=3.0)])}
    assert [(ours.latency_s, theirs.latency_s) for ours, theirs in pairs(run, base, ["a", "b"])] == [(1.0, 2.0), (9.0, 3.0)]


def test_swapping_the_runs_inverts_the_ratio():
    rng = random.Random(2)
    run, base = random_run(rng, {"a": 9}), random_run(rng, {"a": 9})
    assert time_ratio(run, base, ["a"]).median == pytest.approx(1 / time_ratio(base, run, ["a"]).median)


def test_without_a_common_prompt_there_is_no_ratio():
    with pytest.raises(ValueError, match="share no answered prompt"):
        time_ratio({"a": result([row("1")])}, {"a": result([row("2")])}, ["a"])


def test_bootstrap_interval_agrees_with_all_possible_resamples():
    values = [0.7, 1.0, 1.2, 1.9, 2.5]
    medians = sorted(statistics.median(sample) for sample in itertools.product(values, repeat=len(values)))
    exact = [medians[int(q * (len(medians) - 1))] for q in (0.025, 0.975)]
    assert bootstrap_median(values) == pytest.approx(exact)
    assert bootstrap_median(values) == bootstrap_median(values)
    assert bootstrap_median([3.0]) == (3.0, 3.0)


def test_figures_sum_before_they_divide():
    plain = {"a": result([row("1", 10, 0, 2.0), row("2", 30, 0, 3.0, (9,))], 5.0), "b": result([row("1", 20, 0, 1.0)], 1.0)}
    run = {"a": result([row("1", 10, 5, 1.0), row("2", 30, 10, 1.0)], 2.0, 40, 16), "b": result([row("1", 20, 10, 2.0)], 2.0, 20, 8)}
    found = figures(run, plain, ["a", "b"])
    assert (found.prompts, found.tokens) == (3, 60)
    assert found.tokens_per_s == pytest.approx(60 / 4)
    assert found.accept_length == pytest.approx(60 / 25)
    assert found.draft_forwards_per_round == pytest.approx(60 / 24)
    assert found.same_as_plain == pytest.approx(2 / 3)
    assert found.faster_than_plain.median == pytest.approx(2.0)
    assert figures(plain, plain, ["a"]).faster_than_plain is None
    assert figures(plain, plain, ["a"]).accept_length is None


def test_same_share_compares_ids_not_lengths():
    base = {"a": result([row("1", ids=(1, 2)), row("2", ids=(1, 2))])}
    assert same_share({"a": result([row("1", ids=(1, 2)), row("2", ids=(1, 3))])}, base, ["a"]) == 0.5
