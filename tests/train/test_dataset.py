"""What a run trains on is what train/lint.py announces."""

import pytest

from tests.train.chat_templates import tokenizer_for
from tests.train.test_data import CASES, A, Q, msgs, write
from train.dataset import load_dataset
from train.recipe import Recipe, RecipeError


def recipe_for(tmp_path, file, **train) -> Recipe:
    settings = {"epochs": 1, "micro_batch_tokens": 64, "learning_rate": 1e-3, "precision": "fp32", "max_length": 150, "held_out": 0.3}
    return Recipe.model_validate(
        {
            "target": tmp_path,
            "output_dir": tmp_path / "run",
            "answers": {"file": file},
            "features": {"mode": "online"},
            "head": {"draft_vocab_size": 310},
            "train": {**settings, **train},
        }
    )


def test_every_row_is_trained_held_out_or_accounted_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TALON_CACHE", str(tmp_path / "cache"))
    rows = [{**msgs(Q, {**A, "content": f"It is {i}."}), "id": f"r{i}", "source": "ab"[i % 2]} for i in range(30)]
    file = write(tmp_path, rows + [row for row, outcome, _ in CASES.values() if outcome.startswith("dropped")])
    data = load_dataset(recipe_for(tmp_path, file), tokenizer_for("chatml"), 500)
    assert len(data.train) + len(data.held_out) == 30 and data.held_out
    assert f"{len(rows) + sum(o.startswith('dropped') for _, o, _ in CASES.values())} rows read, 30 kept" in data.notes
    assert set(data.coverage_by_source) == {"a", "b"} and "310 tokens cover" in data.notes
    assert len(data.vocab.ids_Vd) == 310 and (tmp_path / "cache" / "vocab").is_dir()


def test_an_answer_file_in_another_order_has_the_same_split_and_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setenv("TALON_CACHE", str(tmp_path / "cache"))
    rows = [{**msgs(Q, {**A, "content": f"It is {i}."}), "id": f"r{i}"} for i in range(30)]
    one = load_dataset(recipe_for(tmp_path, write(tmp_path, rows, "a.jsonl")), tokenizer_for("chatml"), 500)
    two = load_dataset(recipe_for(tmp_path, write(tmp_path, rows[::-1], "b.jsonl")), tokenizer_for("chatml"), 500)
    assert sorted(chat.ids for chat in one.train) == sorted(chat.ids for chat in two.train)
    assert one.vocab.ids_Vd.tolist() == two.vocab.ids_Vd.tolist()


def test_nothing_to_train_on_says_why(tmp_path):
    with pytest.raises(RecipeError, match="no trainable conversation .*1 dropped .no question is followed by an answer"):
        load_dataset(recipe_for(tmp_path, write(tmp_path, [msgs(Q)])), tokenizer_for("chatml"), 500)
