"""The arithmetic of the comparison against slow, literal versions of its definitions."""

import itertools
import random
import statistics

import pytest

from eval.stats import (
    AnswerRow,
    Block,
    SetResult,
    bootstrap_median,
    figures,
    histogram,
    latency,
    pairs,
    same_share,
    throughput_ratio,
    time_ratio,
)


def result(rows, wall_s=1.0, forwards=None, rounds=None, session=1):
    counters = None if forwards is None else {"draft_forwards": forwards, "rounds": rounds}
    return SetResult([Block(session, wall_s, counters, rows)])


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
    assert ratio.value == pytest.approx(statistics.median(expected))
    assert ratio.count == 11
    assert min(expected) <= ratio.low <= ratio.value <= ratio.high <= max(expected)


def test_ids_pair_within_their_set_and_only_where_both_answered():
    run = {"a": result([row("1"), row("2"), row("3", tokens=0)]), "b": result([row("1", latency_s=9.0)])}
    base = {"a": result([row("3"), row("1", latency_s=2.0)]), "b": result([row("1", latency_s=3.0)])}
    assert [(ours.latency_s, theirs.latency_s) for ours, theirs in pairs(run, base, ["a", "b"])] == [(1.0, 2.0), (9.0, 3.0)]


def test_swapping_the_runs_inverts_the_ratio():
    rng = random.Random(2)
    run, base = random_run(rng, {"a": 9}), random_run(rng, {"a": 9})
    assert time_ratio(run, base, ["a"]).value == pytest.approx(1 / time_ratio(base, run, ["a"]).value)


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
    assert found.faster_than_plain.value == pytest.approx(2.0)
    assert figures(plain, plain, ["a"]).faster_than_plain is None
    assert figures(plain, plain, ["a"]).accept_length is None


def test_same_share_compares_ids_not_lengths():
    base = {"a": result([row("1", ids=(1, 2)), row("2", ids=(1, 2))])}
    assert same_share({"a": result([row("1", ids=(1, 2)), row("2", ids=(1, 3))])}, base, ["a"]) == 0.5


def test_throughput_is_the_ratio_of_sums_and_its_interval_that_of_all_resamples_of_blocks():
    ours = [([row("1", 10), row("2", 20)], 2.0), ([row("3", 8)], 1.0), ([row("4", 40)], 5.0)]
    theirs = [([row("1", 10), row("2", 20)], 6.0), ([row("3", 8)], 1.5), ([row("4", 40)], 7.0)]
    run, base = ({"a": SetResult([Block(1, wall_s, None, rows) for rows, wall_s in blocks])} for blocks in (ours, theirs))

    def ratio(picked):
        tokens = [sum(one.tokens for one in ours[i][0]) for i in picked]
        return sum(tokens) / sum(ours[i][1] for i in picked) / (sum(tokens) / sum(theirs[i][1] for i in picked))

    exact = sorted(ratio(picked) for picked in itertools.product(range(3), repeat=3))
    found = throughput_ratio(run, base, ["a"])
    assert found.value == pytest.approx(ratio(range(3)))
    assert (found.low, found.high) == pytest.approx((exact[0], exact[-1]))  # 1 resample in 27 is all of the worst block: 3.7 %
    assert found.count == 3


def test_runs_of_different_starts_were_not_measured_in_turn():
    one, same, later = ({"a": result([row("1")], session=session)} for session in (1, 1, 2))
    assert time_ratio(one, same, ["a"]).in_turn
    assert not time_ratio(one, later, ["a"]).in_turn


def test_tokens_of_a_chunk_share_its_time_and_the_first_chunk_is_the_first_tokens():
    rows = [AnswerRow("1", 6, 2, 1.0, [], None, [[1, 0.4], [4, 0.2], [1, 0.1]]), AnswerRow("2", 1, 0, 1.0, [], None, [[1, 0.6]])]
    found = latency(rows)
    assert found.first[0] == pytest.approx(500)
    assert found.token[0] == pytest.approx(50)  # of 50, 50, 50, 50, 100
    assert found.chunk[0] == pytest.approx(150)
    assert latency([row("1")]) is None


def test_histograms_are_summed_and_sorted_as_numbers():
    rows = [AnswerRow(str(i), 1, 1, 1.0, [], {"tree_depths": counts}) for i, counts in enumerate(({"2": 3, "10": 1}, {"10": 4, "3": 1}))]
    assert list(histogram(rows, "tree_depths").items()) == [("2", 3), ("3", 1), ("10", 5)]
    assert histogram([row("1")], "tree_depths") is None
