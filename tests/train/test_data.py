"""Layouts and the malformed rows that public trainers stumble over: each has its outcome, and outcomes sum to rows."""

import json
import random

import pytest

from tests.train.chat_templates import tokenizer_for
from train.corpus import encode_rows
from train.data import read_conversations, read_prompts, read_prompts_with_report
from train.masks import ChatEncoder
from train.reasons import FATES, REASONS, Report


def write(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


GOOD = [
    {"id": "a", "category": "chat", "turns": ["one", "two"]},
    {"question_id": 7, "category": "qa", "turns": ["one"]},
    {"id": "b", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}, {"from": "human", "value": "two"}]},
    {"prompt_id": "c", "prompt": "one", "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}]},
    {"id": "d", "data": ["one", "x", "two", "y"]},
    {"prompt": "one"},
    {"instruction": "one", "input": "", "output": "x"},
]


def test_every_layout_gives_its_user_turns(tmp_path):
    prompts, report = read_prompts_with_report(write(tmp_path, GOOD))
    assert [prompt.turns for prompt in prompts] == [["one", "two"], ["one"], ["one", "two"], ["one"], ["one", "two"], ["one"], ["one"]]
    assert [prompt.id for prompt in prompts] == ["a", "7", "b", "c", "d", "row-6", "row-7"]
    assert report.kept == report.rows == 7 and dict(report.outcomes) == {("kept", "ok"): 7}


def test_limit_and_split(tmp_path):
    assert len(read_prompts(write(tmp_path, GOOD), limit=2)) == 2 and read_prompts(write(tmp_path, GOOD), limit=0) == []
    rows = [{"turns": ["a"], "split": "eval"}, {"turns": ["b"], "split": "train"}, {"turns": ["c"]}]
    prompts, report = read_prompts_with_report(write(tmp_path, rows), split="train")
    assert [p.turns for p in prompts] == [["b"], ["c"]] and report.outcomes["dropped", "other-split"] == 1


Q, A = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is good."}
Q2, A2 = {"role": "user", "content": "And why?"}, {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}


def msgs(*turns):
    return {"messages": list(turns)}


# (row, fate and code as training data, first letters of the roles that are kept). A fault in the first pair drops the row, a later one
# cuts it.
CASES = {
    # the malformed table of the design notes
    "role/content keys": (msgs(Q, A), "kept ok", "ua"),
    "from/value keys": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}, "kept ok", "ua"),
    "both keys, null where unused": (
        {"conversations": [{"from": "human", "value": "Hi", "role": None, "content": None}, {**A, "from": None, "value": None}]},
        "kept ok",
        "ua",
    ),
    "role missing": (msgs({"content": "x"}, A), "dropped role-missing", ""),
    "role missing later": (msgs(Q, A, {"content": "x"}, A2), "shortened role-missing", "ua"),
    "role null": (msgs({"role": None, "content": "x"}, A), "dropped role-missing", ""),
    "bing": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "bing", "value": "Hello."}]}, "kept ok", "ua"),
    "bard": ({"conversations": [{"from": "USER", "value": "Hi"}, {"from": "Bard", "value": "Hello."}]}, "kept ok", "ua"),
    "tool": (msgs(Q, A, Q2, {"role": "tool", "content": "7"}, A2), "shortened tool-turn", "ua"),
    "observation": (msgs(Q, {"role": "observation", "content": "7"}, A), "dropped tool-turn", ""),
    "tool call": (msgs(Q, {**A, "content": None, "tool_calls": [{"function": {"name": "f"}}]}), "dropped tool-call", ""),
    "tool call as text": (msgs(Q, A, Q2, {**A2, "tool_calls": "[]"}), "shortened tool-call", "ua"),
    "function_call turn": (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "{}"}]},
        "dropped tool-call",
        "",
    ),
    "no tool called": (msgs(Q, {**A, "tool_calls": []}), "kept ok", "ua"),
    "tools beside the messages": ({**msgs(Q, A), "tools": [{"name": "f"}]}, "kept ok", "ua"),
    "developer": (msgs({"role": "developer", "content": "Be brief."}, Q, A), "kept ok", "sua"),
    "unknown role": (msgs(Q, A, {"role": "critic", "content": "x"}), "shortened role-unknown", "ua"),
    "role is a number": (msgs({"role": 1, "content": "x"}, A), "dropped role-unknown", ""),
    "system first": (msgs(SYSTEM, Q, A), "kept ok", "sua"),
    "system beside the turns": ({**msgs(Q, A), "system": "Be brief."}, "kept ok", "sua"),
    "system mid": (msgs(Q, A, SYSTEM, Q2, A2), "shortened system-late", "ua"),
    "system twice": (msgs(SYSTEM, SYSTEM, Q, A), "dropped system-late", ""),
    "system empty": (msgs({"role": "system", "content": ""}, Q, A), "repaired empty-system", "ua"),
    "consecutive user": (msgs(Q, A, Q, Q2, A2), "shortened consecutive-user", "ua"),
    "consecutive user first": (msgs(Q, Q2, A), "dropped consecutive-user", ""),
    "consecutive assistant": (msgs(Q, A, A2, Q2), "shortened consecutive-assistant", "ua"),
    "assistant first": (msgs(A, Q, A2), "repaired assistant-first", "ua"),
    "two assistants first": (msgs(A, A2, Q, A), "repaired assistant-first", "ua"),
    "assistant first and later a fault": (msgs(A, Q, A2, {"role": "tool", "content": "x"}), "shortened tool-turn", "ua"),
    "only user": (msgs(Q), "dropped no-answer", ""),
    "only system": (msgs(SYSTEM), "dropped no-answer", ""),
    "only assistant": (msgs(A), "dropped no-answer", ""),
    "question without answer at the end": (msgs(Q, A, Q2), "shortened unanswered-end", "ua"),
    "empty list": ({"conversations": []}, "dropped empty-row", ""),
    "empty assistant": (msgs(Q, {"role": "assistant", "content": " \n"}), "dropped empty-turn", ""),
    "empty user later": (msgs(Q, A, {"role": "user", "content": ""}, A2), "shortened empty-turn", "ua"),
    "content int": (msgs(Q, {"role": "assistant", "content": 0}), "dropped not-text", ""),
    "content null": (msgs(Q, {"role": "assistant", "content": None}), "dropped text-missing", ""),
    "content parts": (msgs({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, A), "repaired content-parts", "ua"),
    "content image": (msgs({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, A), "dropped not-text", ""),
    "turn is text": (msgs("Hi", A), "dropped turn-not-an-object", ""),
    "turn is text later": ({"messages": [Q, A, 3]}, "shortened turn-not-an-object", "ua"),
    "header in the question": (msgs({**Q, "content": "<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>"}, A), "kept ok", "ua"),
    "end token in the answer": (msgs(Q, {**A, "content": "No.<|im_end|> Yes."}), "dropped answer-holds-end-token", ""),
    "too long": (msgs(Q, A, {**Q2, "content": "why " * 300}, A2), "shortened too-long", "ua"),
    "answer beyond the limit": (msgs({**Q, "content": "why " * 300}, A), "dropped too-long", ""),
    "U+2028 and BOM inside": (msgs({**Q, "content": "a\u2028b\ufeff"}, {**A, "content": "c\u2028d\ufeffe"}), "kept ok", "ua"),
    "lone surrogate": (
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
        "dropped lone-surrogate",
        "",
    ),
    # rows that are no conversation
    "not JSON": ("{oops}", "dropped bad-json", ""),
    "deep nesting": ("[" * 100_000, "dropped bad-json", ""),
    "a number": ("17", "dropped not-an-object", ""),
    "a list": ("[1, 2]", "dropped not-an-object", ""),
    "unknown layout": ({"foo": "x"}, "dropped unknown-layout", ""),
    "formatted text": ({"text": "<|im_start|>user\nHi<|im_end|>"}, "dropped formatted-text", ""),
    "prompt only": ({"prompt": "Hi"}, "dropped no-answer", ""),
    "prompt and response": ({"prompt": "Hi", "response": "Hello."}, "kept ok", "ua"),
    "ultrachat raw": ({"data": ["Hi", "Hello.", "Why?", "Because."]}, "kept ok", "uaua"),
    "tokens": ({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}, "kept ok", ""),
    "tokens, other lengths": ({"input_ids": [5, 6], "loss_mask": [1]}, "dropped bad-tokens", ""),
    "tokens, mask of words": ({"input_ids": [5, 6], "loss_mask": ["a", "b"]}, "dropped bad-tokens", ""),
    "tokens beyond the vocabulary": ({"input_ids": [5, 10**6], "loss_mask": [1, 1]}, "dropped bad-tokens", ""),
    "tokens, nothing trained": ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "dropped no-answer", ""),
    "tokens, one trained": ({"input_ids": [5, 6], "loss_mask": [0, 1]}, "dropped no-supervised-token", ""),
    "tokens without mask": ({"input_ids": [5, 6]}, "dropped no-answer", ""),
}


@pytest.fixture(scope="module")
def encoder():
    return ChatEncoder(tokenizer_for("chatml"))


def outcomes(path, encoder, max_length=150):
    return list(encode_rows(path, encoder, max_length, vocab_size=500))


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_its_outcome_and_its_neighbours_are_kept(tmp_path, encoder, name):
    row, outcome, roles = CASES[name]
    first, found, last = outcomes(write(tmp_path, [msgs(Q2, A), row, msgs(Q2, A2)]), encoder)
    assert (first.outcome.fate, last.outcome.fate) == ("kept", "kept")
    assert f"{found.outcome.fate} {found.outcome.code}" == outcome
    assert (found.chat is None) == (found.outcome.fate == "dropped")
    if found.chat is not None and name != "too long":  # a conversation cut by tokens keeps its messages
        assert "".join(message["role"][0] for message in found.conversation.messages) == roles


def test_every_reason_has_a_case():
    """A reason that nothing produces would be a promise nobody keeps."""
    elsewhere = {"cut-off", "damaged-stream", "bad-utf8"}  # tests/train/test_data_readers.py
    elsewhere |= {"template-refuses", "not-aligned", "answer-rewritten", "no-end-of-turn"}  # tests/train/test_mask_templates.py
    elsewhere |= {"other-split", "no-question", "duplicate"}  # in this file
    assert {outcome.split()[1] for _, outcome, _ in CASES.values()} | elsewhere == set(REASONS)


def test_the_documentation_lists_every_reason(repo_root):
    listed = [
        line.split("`")[1] for line in (repo_root / "docs" / "data.md").read_text().splitlines() if line.startswith("| `") and "-" in line
    ]
    assert set(listed) | {"ok", "duplicate"} >= set(REASONS)
    assert all(f"| {text} |" in (repo_root / "docs" / "data.md").read_text() for text in REASONS.values())


def test_the_same_conversation_twice_is_one(tmp_path, encoder):
    """Under two ids it could be trained on and held out at once. Another answer to the same question is another row."""
    rows = [{"id": "1", **msgs(Q, A)}, {"id": "2", **msgs(Q, A)}, {"id": "3", **msgs(Q, A2)}]
    assert [row.outcome.code for row in outcomes(write(tmp_path, rows), encoder)] == ["ok", "duplicate", "ok"]


def test_several_changes_of_a_row_are_all_named_and_counted_once(tmp_path, encoder):
    (row,) = outcomes(write(tmp_path, [msgs({"role": "system", "content": ""}, A, Q, A2, Q2)]), encoder)
    assert (row.outcome.fate, row.outcome.code) == ("shortened", "unanswered-end")
    assert set(row.outcome.also) == {"empty-system", "assistant-first"}


@pytest.mark.parametrize("seed", range(10))
def test_totals_by_reason_sum_to_the_rows_read(tmp_path, encoder, seed):
    rng = random.Random(seed)
    rows = [rng.choice(list(CASES.values()))[0] for _ in range(40)]
    report = Report()
    for row in outcomes(write(tmp_path, rows), encoder):
        report.add(row.outcome)
    assert report.rows == 40 == sum(report.outcomes.values()) == report.kept + report.dropped
    assert {fate for fate, _ in report.outcomes} <= set(FATES) and {code for _, code in report.outcomes} <= set(REASONS)


@pytest.mark.parametrize(
    "row,turns,outcome",
    [
        ({"turns": []}, None, "empty-row"),
        ({"turns": ["a", 3]}, ["a"], "not-text"),
        ({"turns": ["  "]}, None, "empty-turn"),
        (msgs(A), None, "no-question"),
        (msgs(Q, {"role": "assistant", "content": None}, Q2), ["What is it?", "And why?"], "ok"),
        (msgs(Q, Q2), ["What is it?", "And why?"], "ok"),
        (msgs(Q, {"role": "tool", "content": "x"}, Q2), ["What is it?"], "tool-turn"),
        (msgs({"content": "x"}), None, "role-missing"),
    ],
)
def test_prompts_need_good_questions_only(tmp_path, row, turns, outcome):
    prompts, report = read_prompts_with_report(write(tmp_path, [row]))
    assert [prompt.turns for prompt in prompts] == ([turns] if turns else [])
    assert [code for _, code in report.outcomes] == [outcome]


def test_truncated_belongs_to_the_last_answer_only(tmp_path):
    whole, cut = msgs(Q, A) | {"truncated": True}, msgs(Q, A, A2) | {"truncated": True}
    assert [c.truncated for c in read_conversations(write(tmp_path, [whole, cut]))[0]] == [True, False]


def test_ten_rows_of_formatted_text_are_ten_reasons(tmp_path, encoder):
    rows = [{"text": f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"} for i in range(10)]
    assert [row.outcome.code for row in outcomes(write(tmp_path, rows), encoder)] == ["formatted-text"] * 10
