"""Answers on a toy target with the real tokenizer: equal to transformers' greedy decoding, resumable, features included."""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.train.toy import toy_config
from train.answerer import Answerer, sample
from train.answers import Job
from train.data import Prompt, read_conversations
from train.dataset import FeatureSource
from train.features import compute_features, target_fingerprint
from train.masks import encode_chat
from train.recipe import AnswerSettings, FeatureSettings
from train.regenerate import regenerate
from train.store import FeatureStore
from train.target import FrozenTarget

PROMPTS = [{"id": f"p{i}", "category": "x", "turns": [" ".join(["word"] * (1 + i * 3 % 11)), "And then?"][: 1 + i % 2]} for i in range(9)]


@pytest.fixture(scope="module")
def toy_dir(target_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "target"
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    vocab = tokenizer.get_vocab().items()
    words = sorted(index for token, index in vocab if token[0] == "Ġ" and token[1:].isalpha() and len(token) > 5)[:200]
    torch.manual_seed(3)
    model = LlamaForCausalLM(toy_config(vocab=49152, hidden=32)).float()
    with torch.no_grad():  # it says whole words, whose text tokenises back to the same tokens, and now and then the end of turn
        head = torch.zeros_like(model.lm_head.weight)
        head[words] = 8 * model.lm_head.weight[words]
        head[2] = 20 * model.lm_head.weight[2]
        model.lm_head.weight.copy_(head)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def greedy(toy_dir, messages, count):
    model, tokenizer = LlamaForCausalLM.from_pretrained(toy_dir, dtype=torch.float32), AutoTokenizer.from_pretrained(toy_dir)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()
    return tokenizer.decode([token for token in out if token != 2])


def test_answers_equal_transformers_greedy_with_refilled_slots(toy_dir, prompts_file, tmp_path):
    out = tmp_path / "answers.jsonl"
    regenerate(toy_dir, prompts_file, out, AnswerSettings(precision="fp32", max_new_tokens=7, max_length=128, slots=3))
    rows = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == len(PROMPTS)
    for row in rows.values():
        for index in range(0, len(row["messages"]), 2):
            assert row["messages"][index + 1]["content"] == greedy(toy_dir, row["messages"][: index + 1], 7)
    assert {row["truncated"] for row in rows.values()} >= {True}
    assert read_conversations(out)[1].kept == len(PROMPTS)


def test_a_killed_run_goes_on_and_ends_with_the_same_file(toy_dir, prompts_file, tmp_path, capsys):
    settings = AnswerSettings(precision="fp32", max_new_tokens=6, max_length=128, slots=2, temperature=1.0, samples_per_prompt=2)
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    regenerate(toy_dir, prompts_file, whole, settings)
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 * len(PROMPTS) and len({json.loads(line)["messages"][1]["content"] for line in lines}) > len(PROMPTS)
    resumed.with_name("resumed.jsonl.settings.json").write_bytes(whole.with_name("whole.jsonl.settings.json").read_bytes())
    resumed.with_name("resumed.jsonl.partial").write_bytes(b"".join(lines[:5]) + lines[5][:20])
    regenerate(toy_dir, prompts_file, resumed, settings)
    assert sorted(resumed.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    before = resumed.stat().st_mtime_ns
    regenerate(toy_dir, prompts_file, resumed, settings)
    assert resumed.stat().st_mtime_ns == before and "up to date" in capsys.readouterr().out


def test_features_kept_while_decoding_equal_a_forward(toy_dir, prompts_file, tmp_path):
    out, settings = tmp_path / "answers.jsonl", FeatureSettings(folder=tmp_path / "features", dtype="bf16")
    regenerate(toy_dir, prompts_file, out, AnswerSettings(precision="fp32", max_new_tokens=9, max_length=128, slots=4), settings)
    target, tokenizer = FrozenTarget.load(toy_dir, torch.float32), AutoTokenizer.from_pretrained(toy_dir)
    source = FeatureSource(target, settings)
    chats = [encode_chat(tokenizer, c.messages, c.truncated) for c in read_conversations(out)[0]]
    found = [chat for chat in chats if chat in source.store]
    assert len(found) >= len(chats) - 1 and any(len(chat.spans) == 2 for chat in found)
    for chat in found:
        kept, fresh = source.get([chat])[0], compute_features(target, [chat])[0]
        torch.testing.assert_close(kept.aux_TF.float(), fresh.aux_TF, rtol=0.02, atol=0.02)
        torch.testing.assert_close(kept.final_PH.float(), fresh.final_PH, rtol=0.02, atol=0.02)
        assert kept.argmax_P.tolist() == fresh.argmax_P.tolist()
    source.prepare(chats, 0, 1, 500)
    assert all(chat in source.store for chat in chats)
    assert chats[0] not in FeatureStore(settings.folder, target_fingerprint(FrozenTarget(target.model, (1, 2, 3))), "bf16")


def test_inverse_transform_sampling_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = [sample(logits, 0.7, (i + 0.5) / 20000) for i in range(20000)]
    expected = torch.softmax(logits / 0.7, -1)
    for token in range(4):
        assert abs(draws.count(token) / 20000 - float(expected[token])) < 1e-3


def test_a_prompt_that_does_not_fit_is_counted(toy_dir):
    rows = []
    target, tokenizer = FrozenTarget.load(toy_dir, torch.float32), AutoTokenizer.from_pretrained(toy_dir)
    answerer = Answerer(target, tokenizer, AnswerSettings(max_new_tokens=4, max_length=64), rows.append, lambda count: None)
    answerer.run([Job(Prompt("long", "x", ["word " * 80]), 0), Job(Prompt("short", "x", ["word"]), 0)])
    assert {row["id"]: len(row["messages"]) for row in rows} == {"long": 0, "short": 2}
    assert dict(answerer.refused) == {"prompt and answer could exceed max_length 64": 1}


def test_limit_and_max_turns_ask_less(toy_dir, prompts_file, tmp_path):
    out = tmp_path / "answers.jsonl"
    regenerate(toy_dir, prompts_file, out, AnswerSettings(precision="fp32", max_new_tokens=3, max_length=128, limit=4, max_turns=1))
    rows = map(json.loads, out.read_text().splitlines())
    assert sorted((row["id"], len(row["messages"])) for row in rows) == [(f"p{i}", 2) for i in range(4)]
