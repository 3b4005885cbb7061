"""The starter prompts are well formed, balanced, free of near-duplicates, and share nothing with the evaluation sets."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
STARTER = REPO / "train" / "prompts" / "starter.jsonl"
EVAL_SETS = REPO.parent / "shared" / "data" / "eval"
CATEGORIES = ("chat", "math", "code", "summary", "qa", "writing")


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Runs of n words; a text shorter than n words is one run, so that short duplicates are found too."""
    tokens = words(text)
    return {tuple(tokens[i : i + n]) for i in range(max(1, len(tokens) - n + 1))}


def near_duplicates(texts: dict[str, str], n: int, limit: float) -> list[tuple[str, str]]:
    """Pairs of ids whose texts have a Jaccard similarity of word n-grams of `limit` or more."""
    grams = {key: ngrams(text, n) for key, text in texts.items()}
    return [(a, b) for a, b in itertools.combinations(grams, 2) if len(grams[a] & grams[b]) >= limit * len(grams[a] | grams[b])]


def load(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return load(STARTER)


def test_every_row_has_the_documented_fields(rows):
    for row in rows:
        assert list(row) == ["id", "category", "split", "turns"], row
        assert row["turns"] and all(isinstance(turn, str) and turn == turn.strip() != "" for turn in row["turns"]), row["id"]
        assert re.fullmatch(rf"{row['category']}-\d{{3}}", row["id"]), row["id"]
    assert len({row["id"] for row in rows}) == len(rows)


def test_categories_and_splits_are_balanced(rows):
    expected = {(category, split): count for category in CATEGORIES for split, count in (("train", 80), ("eval", 6))}
    assert Counter((row["category"], row["split"]) for row in rows) == expected


def test_any_prefix_of_the_file_is_a_balanced_mix(rows):
    """Readers take the first `limit` rows: categories take turns, so that any limit sees all six, and training rows come first."""
    assert [row["category"] for row in rows] == list(CATEGORIES) * 86
    assert [row["split"] for row in rows] == ["train"] * 480 + ["eval"] * 36


def test_only_chat_has_second_turns_and_a_third_of_it_does(rows):
    longer = [row for row in rows if len(row["turns"]) > 1]
    assert {row["category"] for row in longer} == {"chat"}
    assert all(len(row["turns"]) == 2 for row in longer)
    assert 0.30 <= len(longer) / 86 <= 0.37


def test_summaries_have_something_to_summarise(rows):
    lengths = {row["id"]: len(words(row["turns"][0])) for row in rows if row["category"] == "summary"}
    assert {key: n for key, n in lengths.items() if not 80 <= n <= 210} == {}


def test_python_in_code_prompts_compiles(rows):
    """A signature with its docstring is a complete definition in Python; a prompt with a broken one could not be completed."""
    checked = 0
    for row in rows:
        source = re.search(r'^(?:import|from|def|class) .*"""(?:\n(?=[ \n])|$)', row["turns"][0], re.DOTALL | re.MULTILINE)
        if row["category"] == "code" and source:
            compile(source.group(), row["id"], "exec")
            checked += 1
    assert checked >= 40


def test_no_two_rows_are_alike(rows):
    # Two-word runs catch short look-alikes ("capital of X") that five-word runs cannot see.
    texts = {row["id"]: "\n".join(row["turns"]) for row in rows}
    assert near_duplicates(texts, n=5, limit=0.5) == []
    assert near_duplicates(texts, n=2, limit=0.6) == []


def test_near_duplicates_are_found():
    texts = {"a": "What is the capital of Norway?", "b": "what is the capital of norway", "c": "Which sea lies east of Italy?"}
    assert near_duplicates(texts, n=5, limit=0.5) == [("a", "b")]


def test_nothing_is_shared_with_the_evaluation_sets(rows):
    if not EVAL_SETS.is_dir():
        pytest.skip(f"needs the evaluation sets in {EVAL_SETS.relative_to(REPO.parent)} beside the clone")
    theirs = set()
    for path in sorted(EVAL_SETS.glob("*.jsonl")):
        for row in load(path):
            for turn in row["turns"]:
                theirs |= ngrams(turn, 8)
    assert len(theirs) > 10_000  # the sets were really read
    shared = {row["id"]: gram for row in rows for turn in row["turns"] for gram in ngrams(turn, 8) & theirs}
    assert shared == {}
