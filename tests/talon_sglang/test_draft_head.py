"""Each way in which SGLang would silently serve a broken head is one sentence here."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from talon_sglang.draft_head import DraftHeadError, check_draft_head
from tests.toy import write_toy


@pytest.fixture
def folders(tmp_path):
    return write_toy(tmp_path)


def edit_config(head, **changes):
    config = json.loads((head / "config.json").read_text()) | changes
    (head / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "REMOVE"}))


def edit_weights(head, change):
    weights = load_file(head / "model.safetensors")
    change(weights)
    save_file(weights, head / "model.safetensors")


def refused(folders, pattern):
    target, head = folders
    with pytest.raises(DraftHeadError, match=pattern) as caught:
        check_draft_head(head, target)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)  # one line: what; what to do


def test_a_good_head_passes_in_each_spelling(folders):
    target, head = folders
    check_draft_head(head, target)
    weights = load_file(head / "model.safetensors")
    save_file({f"model.{name}".replace("midlayer", "layers.0"): tensor for name, tensor in weights.items()}, head / "model.safetensors")
    check_draft_head(head, target)
    (head / "model.safetensors").unlink()
    torch.save(weights, head / "pytorch_model.bin")
    check_draft_head(head, target)


@pytest.mark.parametrize(
    "changes, pattern",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is LlamaForCausalLM"),
        ({"draft_vocab_size": "REMOVE"}, "draft_vocab_size is missing"),
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"vocab_size": 65}, "vocab_size is 65, the target's is 64"),
        ({"hidden_size": 64, "draft_vocab_size": 64}, "target hidden states of 64, the target has 128"),
        ({"eagle_config": None}, "needs? a target of at least 7 layers where this one has 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, r"\[0, 2, 4\]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "top level"),
        ({"head_dim": 32}, r"q_proj.weight has the shape \[128, 256\] where config.json makes it \[64, 256\]"),
        ({"draft_vocab_size": 32}, "lacks the tensor d2t"),
        ({"norm_before_fc": True}, "lacks the tensor input_norm.weight"),
        ({"num_hidden_layers": 2}, "lacks the tensor layers.1"),
    ],
)
def test_a_wrong_config_is_named(folders, changes, pattern):
    edit_config(folders[1], **changes)
    refused(folders, pattern)


def test_missing_unknown_and_damaged_weights(folders):
    head = folders[1]
    edit_weights(head, lambda w: w.pop("lm_head.weight"))
    refused(folders, "lacks the tensor lm_head.weight")
    edit_weights(head, lambda w: w.update({"lm_head.weight": torch.zeros(64, 128), "adapter.weight": torch.zeros(1)}))
    refused(folders, "adapter.weight .* drop silently")
    (head / "model.safetensors").write_bytes(b"not a checkpoint")
    refused(folders, "damaged")
    (head / "model.safetensors").unlink()
    refused(folders, "neither")


def test_d2t_must_hold_offsets_to_distinct_ids(folders):
    head = folders[1]
    edit_config(head, draft_vocab_size=8)

    def shrink(weights):
        weights["lm_head.weight"] = torch.zeros(8, 128)
        weights["d2t"] = torch.arange(8)  # ids 0, 2, 4, ...: fine

    edit_weights(head, shrink)
    check_draft_head(head, folders[0])
    edit_weights(head, lambda w: w.update(d2t=torch.tensor([0, 0, 0, 0, 0, 0, 0, 60])))
    refused(folders, "d2t does not hold offsets")
    edit_weights(head, lambda w: w.update(d2t=torch.tensor([1, 0, 0, 0, 0, 0, 0, 0])))
    refused(folders, "distinct")


def test_folders_that_are_not_there(folders, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target, head = folders
    with pytest.raises(DraftHeadError, match="the draft head /nowhere/at/all is neither a folder nor a model"):
        check_draft_head("/nowhere/at/all", target)
    (head / "config.json").write_text("{")
    refused(folders, "not valid JSON")
    (head / "config.json").unlink()
    refused(folders, re.escape(f"the draft head {head} has no config.json"))
