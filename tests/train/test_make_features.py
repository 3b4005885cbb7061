"""train/make_features.py on a toy: fills, finds what is there, checks and prunes; what it says beforehand is what it takes."""

import json
import re
import sys

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from tests.train.chat_templates import tokenizer_for
from tests.train.toy import toy_config
from train import make_features


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    torch.manual_seed(0)
    LlamaForCausalLM(toy_config(vocab=500, hidden=128)).save_pretrained(folder / "target")
    tokenizer_for("chatml").save_pretrained(folder / "target")
    rows = [
        {"id": f"r{i}", "messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": "It is good. " * (i + 4)}]}
        for i in range(12)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": str(folder / "target"),
        "output_dir": str(folder / "run"),
        "answers": {"file": str(folder / "answers.jsonl")},
        "features": {"folder": str(folder / "store")},
        "head": {"draft_vocab_size": 310},
        "train": {"epochs": 1, "micro_batch_tokens": 200, "learning_rate": 0.01, "precision": "fp32"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def run(toy, monkeypatch, capsys):
    monkeypatch.setenv("TALON_CACHE", str(toy / "cache"))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["make_features", "--recipe", str(toy / "recipe.yaml"), *words])
        code = make_features.main()
        return code, "".join(capsys.readouterr())

    return run


def size_in(pattern: str, text: str) -> float:
    number, unit = re.search(pattern + r" ([\d.]+) (kB|MB)", text).groups()
    return float(number) * {"kB": 1e3, "MB": 1e6}[unit]


def test_the_store_is_filled_checked_and_pruned(toy, run):
    code, out = run()
    shards = list((toy / "store").glob("features-*"))
    size = sum(path.stat().st_size for path in shards)
    assert code == 0 and len(shards) == 1 and "12 conversations, " in out
    assert size_in("12 conversations will take", out) == pytest.approx(size, rel=0.02)
    before = shards[0].stat().st_mtime_ns
    assert run()[0] == 0 and shards[0].stat().st_mtime_ns == before  # nothing is computed twice
    assert run("--check") == (0, run("--check")[1]) and shards[0].exists()
    shards[0].write_bytes(shards[0].read_bytes()[:-1] + b"x")
    code, out = run("--check")
    assert code == 1 and f"{shards[0].name} is damaged" in out and not shards[0].exists()
    assert run()[0] == 0 and shards[0].exists()
    code, out = run("--set", "features.dtype=bf16")
    assert code == 0 and "1 shards (" in out and "are of other settings" in out and len(list((toy / "store").glob("features-*"))) == 2
    code, out = run("--set", "features.dtype=bf16", "--prune")
    assert code == 0 and "1 shards of other settings deleted" in out and not shards[0].exists()


def test_a_recipe_without_a_store_is_refused(run):
    code, out = run("--set", "features.mode=online")
    assert code == 2 and out == (
        "make_features: `features.mode` is 'online', which stores nothing; use --set features.mode=store --set features.folder=DIR.\n"
    )
