"""eval/prompts.py: which prompts --prompts, --sets and --limit name, and what is said when there are none."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval import prompts
from eval.prompts import UsageError, load_sets


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "ChatTokenizer", lambda _target: SimpleNamespace(encode=lambda turns: turns[0]))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "sets").mkdir()
    for name, texts in (("chat", ["a", "b", "c"]), ("code", ["d", "e" * 60])):
        rows = [{"id": f"{name}-{i}", "category": name, "turns": [text, "second turn"]} for i, text in enumerate(texts)]
        for file in (f"sets/{name}.jsonl", "all.jsonl"):
            with (tmp_path / file).open("a") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
    return Namespace(target=tmp_path, prompts=tmp_path / "sets", sets=None, limit=None, max_new_tokens=8)


@pytest.mark.parametrize("place", ["sets", "all.jsonl"])
def test_a_folder_has_a_set_a_file_and_a_file_a_set_a_category(args, place, capsys):
    args.prompts = args.target / place
    chat = [("chat-0", "a"), ("chat-1", "b"), ("chat-2", "c")]
    assert load_sets(args) == {"chat": chat, "code": [("code-0", "d")]}  # first turns; the long one has no room for an answer
    assert "code: 1 of 2 prompts are longer than 56 tokens and are left out." in capsys.readouterr().out
    args.sets, args.limit = ["chat"], 2
    assert load_sets(args) == {"chat": chat[:2]}


def test_sets_of_the_hub_are_streamed_and_cut(args, monkeypatch):
    calls = []
    rows = {"openai/gsm8k": {"question": "1 + 1?"}, "tatsu-lab/alpaca": {"instruction": "Sort.", "input": "3 1 2"}}

    def load_dataset(repository, config, *, split, streaming):
        calls.append((repository, config, split, streaming))
        return (rows[repository] for _ in range(1000))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    args.prompts, args.sets, args.limit = Path("hub"), ["gsm8k", "alpaca"], 2
    assert load_sets(args) == {
        "gsm8k": [("gsm8k-0", "1 + 1?"), ("gsm8k-1", "1 + 1?")],
        "alpaca": [("alpaca-0", "Sort.\n\n3 1 2"), ("alpaca-1", "Sort.\n\n3 1 2")],
    }
    assert calls == [("openai/gsm8k", "main", "test", True), ("tatsu-lab/alpaca", None, "train", True)]


@pytest.mark.parametrize("place", ["hub", "sets", "all.jsonl"])
def test_a_set_that_is_not_there_is_named(args, place):
    args.prompts = Path("hub") if place == "hub" else args.target / place
    args.sets = ["poems"]
    with pytest.raises(UsageError, match="--sets names poems, which --prompts"):
        load_sets(args)


def test_a_hub_that_cannot_be_reached_is_one_sentence(args, monkeypatch):
    def load_dataset(*_args, **_kwargs):
        raise ConnectionError("no route to host\nand many more lines")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    args.prompts = Path("hub")
    with pytest.raises(UsageError) as error:
        load_sets(args)
    sentence = "mt_bench (HuggingFaceH4/mt_bench_prompts) cannot be read from the hub (no route to host); pass a folder of prompt files."
    assert str(error.value) == sentence
