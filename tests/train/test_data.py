import json

import pytest

from train.data import read_conversations, read_prompts, read_prompts_with_report


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
]


def test_every_layout_gives_its_user_turns(tmp_path):
    prompts, report = read_prompts_with_report(write(tmp_path, GOOD))
    assert [prompt.turns for prompt in prompts] == [["one", "two"], ["one"], ["one", "two"], ["one"], ["one", "two"], ["one"]]
    assert [prompt.id for prompt in prompts] == ["a", "7", "b", "c", "d", "row-6"]
    assert report.kept == 6 and not report.refused


BAD = [
    ("{cut", "not JSON"),
    ("17", "not a JSON object"),
    ({"text": "x"}, "none of turns, conversations, messages, data, prompt"),
    ({"turns": []}, "no user turn"),
    ({"turns": ["a", 3]}, "a turn whose text is not a string"),
    ({"turns": ["  "]}, "an empty turn"),
    ({"conversations": []}, "no user turn"),
    ({"conversations": [{"value": "x"}]}, "a turn without a role"),
    ({"conversations": ["x"]}, "a turn is not an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool' is not user, assistant or system"),
    ({"messages": [{"role": None, "content": "x"}]}, "a turn without a role"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
    ('{"turns": ["\\ud800"]}', "text with half a surrogate pair"),
]


@pytest.mark.parametrize("row,reason", BAD)
def test_a_bad_row_is_counted_with_its_reason_and_its_neighbours_are_kept(tmp_path, row, reason):
    prompts, report = read_prompts_with_report(write(tmp_path, [GOOD[0], row, GOOD[1]]))
    assert [prompt.id for prompt in prompts] == ["a", "7"] and dict(report.refused) == {reason: 1}


def test_bytes_that_are_not_utf8_cost_one_row(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"turns": ["a\xe2\x80\xa8b"]}\r\n\r\n{"turns": ["\xff"]}\n{"turns": ["c"]}')
    prompts, report = read_prompts_with_report(path)
    assert [prompt.turns for prompt in prompts] == [["a\u2028b"], ["c"]] and dict(report.refused) == {"not UTF-8": 1}


def test_json_array_text_file_limit_and_split(tmp_path):
    array = tmp_path / "array.json"
    array.write_text(json.dumps(GOOD, indent=1))
    assert len(read_prompts(array)) == 6 and len(read_prompts(array, limit=2)) == 2
    assert [p.turns for p in read_prompts(write(tmp_path, ["first", "", "second "], "p.txt"))] == [["first"], ["second"]]
    rows = [{"turns": ["a"], "split": "eval"}, {"turns": ["b"], "split": "train"}, {"turns": ["c"]}]
    assert [p.turns for p in read_prompts(write(tmp_path, rows), split="train")] == [["b"], ["c"]]


def turns(*roles):
    return {"messages": [{"role": role, "content": f"{role}{i}"} for i, role in enumerate(roles)]}


@pytest.mark.parametrize(
    "row,roles",
    [
        (turns("user", "assistant"), ["user", "assistant"]),
        (turns("system", "user", "assistant"), ["system", "user", "assistant"]),
        (turns("assistant", "user", "assistant"), ["user", "assistant"]),
        (turns("user", "assistant", "user"), ["user", "assistant"]),
        (turns("user", "assistant", "user", "user", "assistant"), ["user", "assistant"]),
        (turns("user", "assistant", "assistant", "user"), ["user", "assistant"]),
        (turns("user", "assistant", "system", "user"), ["user", "assistant"]),
        (turns("user", "user", "assistant"), None),
        (turns("user"), None),
        (turns("system", "assistant"), None),
    ],
)
def test_conversations_keep_the_longest_good_beginning(tmp_path, row, roles):
    found, report = read_conversations(write(tmp_path, [row]))
    assert [[m["role"] for m in c.messages] for c in found] == ([roles] if roles else [])
    assert sum(report.refused.values()) == (0 if roles else 1)


def test_truncated_belongs_to_the_last_answer_only(tmp_path):
    whole, cut = turns("user", "assistant") | {"truncated": True}, turns("user", "assistant", "assistant") | {"truncated": True}
    assert [c.truncated for c in read_conversations(write(tmp_path, [whole, cut]))[0]] == [True, False]
