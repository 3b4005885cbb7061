"""One broken checkpoint for each thing the doctor can find, and each fixable one is gone from the corrected copy."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from talon_sglang.draft_head import DraftHeadError, check_draft_head
from tests.train.heads import DRAFT, HIDDEN, VOCAB, config, draft_ids, edit, edit_weights, target_json, weights, write_head
from train.doctor import examine, fix, status
from train.findings import Answers
from train.layouts import read_checkpoint


@pytest.fixture
def head(tmp_path):
    return write_head(tmp_path / "head")


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target_json()))
    return folder


def found(head, target_config=None, answers=None):
    return {finding.code: finding for finding in examine(read_checkpoint(head), target_config or target_json(), answers)[0]}


def eagle(head, **changes):
    edit(head, eagle_config=config(head)["eagle_config"] | changes)


def rename(head, name):
    (head / "model.safetensors").rename(head / name)


def ids_as_d2t(state):
    state["d2t"] = draft_ids()


def shuffle(state):
    order = torch.arange(DRAFT).flip(0)
    state["d2t"] = (state["d2t"] + torch.arange(DRAFT))[order] - torch.arange(DRAFT)
    state["lm_head.weight"] = state["lm_head.weight"][order]


def poison(state):
    state["fc.weight"][1, 2] = float("nan")


def wrap(head):
    torch.save({"state_dict": weights(head), "step": 3}, head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()


def second_file(head):
    save_file({"norm.weight": torch.zeros(HIDDEN).bfloat16()}, head / "zzz.safetensors")


def stale_index(head):
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": "model-00001.safetensors"}}))


def subfolder(head):
    (head / "step-5").mkdir()
    rename(head, "step-5/model.safetensors")


def tensors(change):
    return lambda head: edit_weights(head, change)


FIXABLE = {  # name: (code, severity, how to break the head)
    "weights under another name": (
        "file-name",
        "error",
        lambda h: (torch.save(weights(h), h / "draft.ckpt"), rename(h, "x"), (h / "x").unlink()),
    ),
    "weights in a subfolder": ("file-name", "error", subfolder),
    "index of another checkpoint": ("file-index", "error", stale_index),
    "tensor in two files": ("file-clash", "warning", second_file),
    "wrapped state dict": ("file-wrapped", "error", wrap),
    "unread file": ("file-ignored", "note", lambda h: torch.save({}, h / "pytorch_model.bin")),
    "target_hidden_size null": ("target-hidden-null", "error", lambda h: edit(h, target_hidden_size=None)),
    "key prefix": ("key-prefix", "error", tensors(lambda s: {f"draft_model.{name}": t for name, t in s.items()})),
    "architecture": ("architecture", "error", lambda h: edit(h, architectures=["LlamaForCausalLM"])),
    "no architecture": ("architecture", "error", lambda h: edit(h, ("architectures",))),
    "model type": ("model-type", "error", lambda h: edit(h, model_type="qwen3")),
    "tied": ("tied-embeddings", "error", lambda h: edit(h, tie_word_embeddings=True)),
    "hidden size": ("size-hidden-size", "error", lambda h: edit(h, ("hidden_size",))),
    "intermediate size": ("size-intermediate-size", "error", lambda h: edit(h, intermediate_size=99)),
    "layers of the target": ("size-num-hidden-layers", "error", lambda h: edit(h, num_hidden_layers=8)),
    "head_dim": ("head-dim", "error", lambda h: edit(h, head_dim=16)),
    "heads": ("head-dim", "error", lambda h: edit(h, ("num_key_value_heads",))),
    "vocab size": ("vocab-size", "error", lambda h: edit(h, vocab_size=VOCAB + 1)),
    "no draft vocab size": ("draft-vocab-size", "error", lambda h: edit(h, ("draft_vocab_size",))),
    "null draft vocab size": ("draft-vocab-size", "error", lambda h: edit(h, draft_vocab_size=None)),
    "wrong draft vocab size": ("draft-vocab-size", "error", lambda h: edit(h, draft_vocab_size=DRAFT - 1)),
    "aux ids at the top": ("aux-place", "error", lambda h: edit(h, ("eagle_config",), eagle_aux_hidden_state_layer_ids=[1, 3, 4])),
    "aux inputs at the top": ("aux-place", "error", lambda h: edit(h, ("eagle_config",), eagle_aux_hidden_state_layer_ids=[2, 4, 5])),
    "aux switched off": ("aux-disabled", "error", lambda h: eagle(h, use_aux_hidden_state=False)),
    "num_aux": ("num-aux", "error", lambda h: edit(h, num_aux_hidden_states=4)),
    "input norm without its flag": (
        "norm-before-fc",
        "error",
        tensors(lambda s: s | {"input_norm.weight": torch.ones(3 * HIDDEN).bfloat16()}),
    ),
    "fc norms without their flag": (
        "fc-norm",
        "error",
        tensors(lambda s: s | {f"aux_norm_{n}.weight": torch.ones(HIDDEN).bfloat16() for n in ("low", "mid", "high")}),
    ),
    "attention bias": ("attention-bias", "error", lambda h: edit(h, attention_bias=True)),
    "short context": ("max-positions", "error", lambda h: edit(h, max_position_embeddings=64)),
    "rope theta": ("rope-theta", "warning", lambda h: edit(h, ("rope_parameters",), rope_theta=5e5)),
    "rope scaling": (
        "rope-scaling",
        "warning",
        lambda h: edit(h, ("rope_parameters",), rope_scaling={"rope_type": "linear", "factor": 4.0}),
    ),
    "rope conflict": ("rope-conflict", "note", lambda h: edit(h, rope_theta=5e5)),
    "rotary buffer": ("key-unknown", "note", tensors(lambda s: s | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)})),
    "embedding": ("embedding", "note", tensors(lambda s: s | {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN).bfloat16()})),
    "d2t missing, t2d there": ("d2t-missing", "error", tensors(lambda s: {n: t for n, t in s.items() if n != "d2t"})),
    "d2t holds ids": ("d2t-ids", "error", tensors(ids_as_d2t)),
    "d2t unsorted": ("d2t-unsorted", "warning", tensors(shuffle)),
    "d2t int32": ("d2t-dtype", "note", tensors(lambda s: s | {"d2t": s["d2t"].int()})),
    "d2t float32": ("d2t-dtype", "error", tensors(lambda s: s | {"d2t": s["d2t"].float()})),
    "t2d missing": ("t2d-missing", "note", tensors(lambda s: s.pop("t2d") is None)),
    "t2d of another head": ("t2d-mismatch", "warning", tensors(lambda s: s | {"t2d": s["t2d"].roll(1)})),
    "t2d uint8": ("t2d-dtype", "note", tensors(lambda s: s | {"t2d": s["t2d"].to(torch.uint8)})),
    "dtype missing": ("dtype", "warning", lambda h: edit(h, ("torch_dtype",))),
    "dtype of the target": ("dtype", "warning", lambda h: edit(h, torch_dtype="float16")),
    "float32 weights": ("dtype", "warning", tensors(lambda s: {n: t.float() if t.is_floating_point() else t for n, t in s.items()})),
}
STUCK = {
    "residual after the norm": ("norm-before-residual", lambda h: edit(h, norm_before_residual=True)),
    "activation": ("hidden-act", lambda h: edit(h, hidden_act="gelu")),
    "no EAGLE-3 head": (
        "architecture",
        lambda h: (edit(h, architectures=["GPT2LMHeadModel"]), edit_weights(h, lambda s: s.pop("fc.weight") is None)),
    ),
    "aux ids out of order": ("aux-invalid", lambda h: eagle(h, eagle_aux_hidden_state_layer_ids=[4, 3, 1])),
    "aux id beyond the target": ("aux-range", lambda h: eagle(h, eagle_aux_hidden_state_layer_ids=[1, 3, 8])),
    "unknown meaning of top aux ids": ("aux-place", lambda h: edit(h, ("eagle_config",), eagle_aux_hidden_state_layer_ids=[0, 3, 6])),
    "four aux layers, fc for three": ("num-aux", lambda h: eagle(h, eagle_aux_hidden_state_layer_ids=[0, 1, 3, 4])),
    "fc of another target": ("target-hidden", tensors(lambda s: s | {"fc.weight": torch.zeros(HIDDEN, 100).bfloat16()})),
    "lm_head missing": ("key-missing", tensors(lambda s: s.pop("lm_head.weight") is None)),
    "unknown part": ("key-unknown", tensors(lambda s: s | {"midlayer.self_attn.q_norm.weight": torch.ones(8).bfloat16()})),
    "shape": ("shape", tensors(lambda s: s | {"midlayer.mlp.down_proj.weight": torch.zeros(HIDDEN, 23).bfloat16()})),
    "d2t missing, t2d too": ("d2t-missing", tensors(lambda s: {n: t for n, t in s.items() if n not in ("d2t", "t2d")})),
    "d2t out of range": ("d2t-range", tensors(lambda s: s | {"d2t": s["d2t"] + 30})),
    "d2t with twins": ("d2t-duplicate", tensors(lambda s: s | {"d2t": -torch.arange(DRAFT)})),
    "d2t too short": ("d2t-size", tensors(lambda s: s | {"d2t": s["d2t"][:-1]})),
    "d2t in bf16": ("d2t-dtype", tensors(lambda s: s | {"d2t": s["d2t"].bfloat16()})),
    "NaN": ("not-finite", tensors(poison)),
    "another vocabulary": ("vocab-size", lambda h: (edit(h, vocab_size=50), edit_weights(h, lambda s: s | {"t2d": torch.ones(50).bool()}))),
}


def test_a_sound_head_gives_no_finding(head):
    assert found(head) == {}
    edit(head, max_position_embeddings=4096)
    assert examine(read_checkpoint(head))[0] == []  # nor without a target


@pytest.mark.parametrize("name", FIXABLE)
def test_a_fixable_fault_is_found_and_gone_from_the_corrected_copy(name, head, target, tmp_path):
    code, severity, damage = FIXABLE[name]
    before = weights(head)
    damage(head)
    finding = found(head)[code]
    assert finding.severity == severity and finding.repair and "\n" not in finding.problem + finding.fix
    findings, left = fix(head, tmp_path / "fixed", target_json())
    assert code in {f.code for f in findings} and left == [], left
    check_draft_head(tmp_path / "fixed", target)  # what TALON's server start says
    assert sorted(path.name for path in (tmp_path / "fixed").iterdir()) == ["config.json", "model.safetensors"]
    if name != "t2d of another head":  # the repair gives back the very head that was damaged
        after = {n: t for n, t in weights(tmp_path / "fixed").items() if n in before}
        assert after.keys() == before.keys()
        for key in before:
            assert torch.equal(after[key], before[key]) or name == "tensor in two files", key


@pytest.mark.parametrize("name", STUCK)
def test_what_cannot_be_fixed_is_said_and_nothing_is_written(name, head, tmp_path):
    code, damage = STUCK[name]
    damage(head)
    finding = found(head)[code]
    assert finding.severity == "error" and finding.repair is None and finding.fix
    _, left = fix(head, tmp_path / "fixed", target_json())
    assert code in {f.code for f in left} and not (tmp_path / "fixed").exists() and not (tmp_path / ".fixed.tmp").exists()


def test_questions_that_only_the_maker_can_answer(head, tmp_path):
    edit(head, norm_output=True)
    eagle(head, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    for code in ("norm-output", "aux-off-by-one"):
        assert found(head)[code].severity == "warning" and found(head)[code].repair is None
    plain, left = tmp_path / "plain", fix(head, tmp_path / "plain", target_json(), Answers("inputs", False))[1]
    assert left == [] and config(plain)["norm_output"] is False and found(plain) == {}
    assert config(plain)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    meant, left = tmp_path / "meant", fix(head, tmp_path / "meant", target_json(), Answers("outputs", True))[1]
    assert left == [] and config(meant)["norm_output"] is True and found(meant) == {}
    assert config(meant)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    again = fix(plain, tmp_path / "again", target_json(), Answers("inputs", False))[1]  # asked once, subtracted once
    assert again == [] and config(tmp_path / "again")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_a_small_target_needs_named_layers(head):
    edit(head, ("eagle_config",))
    assert "aux-missing" not in found(head)
    assert found(head, target_json() | {"num_hidden_layers": 6})["aux-missing"].severity == "error"


def test_a_size_that_no_tensor_tells_comes_from_the_target_or_not_at_all(head):
    edit(head, ("num_attention_heads", "head_dim"))
    assert found(head)["head-dim"].repair
    alone = {f.code: f for f in examine(read_checkpoint(head))[0]}
    assert alone["head-dim"].repair is None and "num_attention_heads is missing" in alone["size-missing"].problem


def test_a_bias_that_is_there_may_stay(head):
    edit(head, attention_bias=True)
    edit_weights(head, lambda s: s | {"midlayer.self_attn.o_proj.bias": torch.zeros(HIDDEN).bfloat16()})
    assert found(head) == {}


def test_suspicions_without_a_repair(head):
    edit_weights(head, lambda s: s | {"d2t": torch.zeros_like(s["d2t"]), "t2d": torch.arange(VOCAB) < DRAFT})
    assert found(head)["d2t-identity"].severity == "warning"
    edit(head, max_position_embeddings=2048)
    assert "max-positions" in {f.code for f in examine(read_checkpoint(head))[0]}  # without a target to compare with


def test_status_counts_the_worst(head):
    assert status(examine(read_checkpoint(head), target_json())[0]) == 0
    edit(head, ("torch_dtype",))
    assert status(examine(read_checkpoint(head), target_json())[0]) == 1
    edit(head, tie_word_embeddings=True)
    assert status(examine(read_checkpoint(head), target_json())[0]) == 2


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda h: (h / "model.safetensors").unlink(), "holds no weights"),
        (lambda h: (h / "model.safetensors").write_bytes(b"{}"), "damaged"),
        (lambda h: (h / "config.json").unlink(), "has no config.json"),
        (lambda h: (h / "config.json").write_text("[]"), "no JSON object"),
        (lambda h: (h / "model.safetensors.index.json").write_text("{}"), "damaged"),
    ],
)
def test_an_unreadable_folder_is_one_sentence(head, damage, message):
    damage(head)
    with pytest.raises(DraftHeadError, match=message) as caught:
        read_checkpoint(head)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command(head, target, repo_root, tmp_path):
    edit(head, tie_word_embeddings=True, architectures=["Eagle3LlamaForCausalLM"])

    def doctor(*args):
        command = [sys.executable, "train/doctor.py", *map(str, args)]
        return subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120, check=False)

    sick = doctor(head, "--target", target)
    assert sick.returncode == 2 and "tied-embeddings" in sick.stdout and "architecture" in sick.stdout and "--fix OUT" in sick.stdout
    cured = doctor(head, "--target", target / "config.json", "--fix", tmp_path / "fixed", "--json")
    answer = json.loads(cured.stdout)
    assert cured.returncode == 0 and {f["code"] for f in answer["findings"]} == {"tied-embeddings", "architecture"}
    assert answer["left"] == [] and answer["written"] == str(tmp_path / "fixed") and answer["layout"] == "angelslim"
    twice = doctor(head, "--fix", tmp_path / "fixed")
    assert twice.returncode == 2 and "exists already" in twice.stderr
    assert doctor(tmp_path / "none").returncode == 2
