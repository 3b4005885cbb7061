"""Choosing trees from a trace, and drawing them."""

import json
import math
import random
from dataclasses import asdict

import pytest
from matplotlib.image import imread
from rich.console import Console

from eval.picture import draw, drawable, name_of, prepare, rows_of, runs, text_tree, visible
from eval.trace import DraftRound, TraceError, deepest_and_widest, read_trace, tokens_before


def tree(parents, accepted=(0,), rid="a", number=0, degraded=False, conditional=None, tokens=None):
    """A round from its parent list; conditional probabilities default to falling with the node number."""
    conditional = conditional or [1 / (2 + i) for i in range(len(parents))]
    depths, log_probs = [], []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        log_probs.append(0.0 if parent < 0 else log_probs[parent] + math.log(conditional[node]))
    tokens = tokens or list(range(100, 100 + len(parents)))
    return DraftRound(rid, number, 9, tokens, list(parents), depths, log_probs, list(accepted), 7, degraded)


CHAIN = tree([-1, 0, 1, 2, 3, 0], accepted=[0, 1, 2])
WIDE = tree([-1, 0, 0, 0, 0, 1], accepted=[0, 1], number=1)
SMALL = tree([-1, 0, 0], number=2)
DEGRADED = tree([-1], number=3, degraded=True)


def random_tree(rng, nodes):
    parents = [-1] + [rng.randrange(node) for node in range(1, nodes)]
    path, children = [0], [[child for child in range(nodes) if parents[child] == node] for node in range(nodes)]
    while children[path[-1]] and rng.random() < 0.7:
        path.append(rng.choice(children[path[-1]]))
    return tree(parents, path, conditional=[rng.uniform(1e-4, 1) for _ in range(nodes)])


def decode(ids):
    return " ".join(f"w{token}" for token in ids)


def plain_text(one):
    console = Console(width=120, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(text_tree(prepare("", [one], one, decode)))
    return capture.get()


def test_a_trace_is_read_as_written_and_a_cut_last_line_is_ignored(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps(asdict(one)) for one in (CHAIN, WIDE)]
    path.write_text("\n".join([*lines, lines[0][:50]]))
    assert read_trace(path) == [CHAIN, WIDE]
    path.write_text("\n".join([lines[0][:50], *lines]))
    with pytest.raises(TraceError, match="Line 1 of"):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "absent")


def test_deepest_and_widest_are_chosen_by_depth_and_by_the_widest_layer():
    assert deepest_and_widest([DEGRADED, SMALL, WIDE, CHAIN]) == (CHAIN, WIDE)
    assert deepest_and_widest([SMALL]) == (SMALL, SMALL)
    with pytest.raises(TraceError, match="holds no draft tree"):
        deepest_and_widest([DEGRADED])


def test_among_equals_the_longer_accepted_path_wins_and_then_the_earlier():
    unlucky, lucky = tree([-1, 0, 1, 2], number=4), tree([-1, 0, 1, 2], accepted=[0, 1, 2, 3], number=5)
    assert deepest_and_widest([unlucky, lucky, SMALL])[0] is lucky
    again = tree([-1, 0, 1, 2], accepted=[0, 1, 2, 3], number=6)
    assert deepest_and_widest([unlucky, lucky, again])[0] is lucky


def test_one_tree_that_is_both_still_shows_two_trees():
    both = tree([-1, 0, 0, 0, 1, 4])
    assert deepest_and_widest([SMALL, both]) == (both, SMALL)


def test_the_text_before_a_tree_is_what_earlier_rounds_of_the_request_accepted():
    first = tree([-1, 0, 1], accepted=[0, 1], tokens=[10, 11, 12])
    second = tree([-1, 0], accepted=[0], number=1, tokens=[7, 13])
    third = tree([-1, 0], number=2, tokens=[7, 14])
    stranger = tree([-1, 0], rid="b", tokens=[50, 51])
    assert tokens_before([third, first, stranger, second], third) == [10, 11, 7, 7]


def test_every_leaf_has_a_row_of_its_own_and_first_children_run_straight():
    rng = random.Random(3)
    for _ in range(50):
        one = prepare("", [], random_tree(rng, rng.randint(2, 40)), decode)
        rows, children = rows_of(one), one.children()
        leaves = [node for node in range(len(rows)) if not children[node]]
        assert sorted(rows[leaf] for leaf in leaves) == list(range(len(leaves)))
        assert all(rows[below[0]] == rows[node] for node, below in enumerate(children) if below)


def test_the_text_shows_every_node_once_and_marks_the_accepted_path():
    rng = random.Random(4)
    for _ in range(20):
        one = random_tree(rng, 20)
        text = plain_text(one)
        words = text.split()
        assert all(words.count(f"w{token}") == 1 for token in [*one.tokens, one.bonus])
        marked = {words[i + 1] for i, word in enumerate(words) if word == "●"}
        assert marked == {f"w{one.tokens[node]}" for node in one.accepted} | {f"w{one.bonus}"}


def test_a_chain_stays_on_one_line_and_shows_conditional_probabilities():
    one = tree([-1, 0, 1, 2, 0], accepted=[0], conditional=[1, 0.5, 0.25, 0.004, 0.13])
    lines = [line.rstrip() for line in plain_text(one).splitlines()]
    assert lines == ["● w100", "├── ● w7 bonus", "├── w101 0.50 → w102 0.25 → w103 4e-3", "└── w104 0.13"]


def test_tokens_are_made_visible():
    texts = {1: " the", 2: "\n\n", 3: "\ufffd", 4: "\t[b]x", 5: "é"}
    assert [name_of(token, lambda ids: texts[ids[0]]) for token in texts] == ["␣the", r"\n\n", "#3", r"\t[b]x", "é"]
    assert visible("a b\n", space=" ") == r"a b\n"
    assert drawable("é␣") == "é␣"
    assert drawable("日") == r"\u65e5"
    assert runs([10, 1, 1, 3]) == [(10, 1), (1, 2), (3, 1)]


def test_the_picture_grows_with_the_trees(tmp_path):
    def size(*trees):
        draw([prepare("A tree", [one], one, decode) for one in trees], tmp_path / "out.png")
        return imread(tmp_path / "out.png").shape[:2]

    chain_height, chain_width = size(tree([-1, *range(30)]))
    wide_height, wide_width = size(tree([-1] + [0] * 30))
    assert chain_width > 2 * wide_width
    assert wide_height > 3 * chain_height
    both_height, both_width = size(tree([-1, *range(30)]), tree([-1] + [0] * 30))
    assert both_width == chain_width
    assert both_height == pytest.approx(chain_height + wide_height, abs=2)
    assert not list(tmp_path.glob("*.tmp"))


def test_dollar_signs_and_brackets_are_drawn_not_parsed(tmp_path):
    texts = {100: "$x_{", 101: "$", 102: "[red]", 7: r"\frac"}
    one = tree([-1, 0, 0], accepted=[0, 1])
    shown = prepare("t", [one], one, lambda ids: "".join(texts[token] for token in ids))
    draw([shown], tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 0
    console = Console(width=100)
    with console.capture() as capture:
        console.print(text_tree(shown))
    assert "[red]" in capture.get()
