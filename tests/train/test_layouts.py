"""Heads of other makers: what the doctor says, the corrected copy is the original head, and SGLang's own class loads all of it."""

import json
import subprocess
import sys

import pytest
import torch

from tests.train.heads import DRAFT, LAYOUTS, VOCAB, config, draft_ids, edit, target_json, weights, write_head
from train.doctor import examine, fix
from train.layouts import detect_layout, effective_rope, flatten_speculators, read_checkpoint

EXPECTED = {  # besides these codes nothing may be found
    "safeailab": {"architecture", "dtype"},
    "specforge": {"embedding"},
    "speculators": {"config-nested", "architecture"},
    "angelslim": {"architecture", "tied-embeddings"},
    "modelopt": {"rope-scaling", "d2t-unsorted", "t2d-missing"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Toy target, our own export of a head, and its corrected copies out of each foreign layout."""
    root = tmp_path_factory.mktemp("layouts")
    (root / "target").mkdir()
    (root / "target" / "config.json").write_text(json.dumps(target_json()))
    write_head(root / "own")
    for name, convert in LAYOUTS.items():
        convert(write_head(root / name))
        fix(root / name, root / f"{name}-fixed", target_json())
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_foreign_layout_is_recognised_explained_and_brought_back_to_ours(name, folders):
    head = read_checkpoint(folders / name)
    assert head.layout == ("sglang" if name == "specforge" else name)
    assert {finding.code for finding in examine(head, target_json())[0]} == EXPECTED[name]
    fixed, own = weights(folders / f"{name}-fixed"), weights(folders / "own")
    assert fixed.keys() == own.keys()
    for key, tensor in own.items():
        torch.testing.assert_close(
            fixed[key], tensor, rtol=0, atol=2e-3 if name == "safeailab" else 0
        )  # fp16 in between rounds tiny values
    ours, theirs = config(folders / "own"), config(folders / f"{name}-fixed")
    for field in (
        "hidden_size",
        "head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "draft_vocab_size",
    ):
        assert theirs[field] == ours[field], field
    assert theirs["rms_norm_eps"] == ours["rms_norm_eps"] and effective_rope(theirs) == effective_rope(ours)
    ids = (theirs.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids", [1, 3, 4]
    )  # the last are SGLang's defaults for 8 layers
    assert ids == [1, 3, 4]


@pytest.mark.slow
def test_sglangs_own_class_loads_every_corrected_copy(folders, repo_root):
    pytest.importorskip("sglang", reason="needs SGLang")
    heads = [folders / "own", *(folders / f"{name}-fixed" for name in LAYOUTS)]
    command = [sys.executable, "tests/train/sglang_load.py", str(folders / "target"), *map(str, heads)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(results) == 1 + len(LAYOUTS)
    for head, result in results.items():
        assert result["unfilled"] == [] and result["arrived"], (head, result["unfilled"])
        assert result["ids"] == draft_ids().tolist(), head


@pytest.mark.slow
def test_without_the_doctor_sglang_leaves_a_wrongly_named_head_random(folders, repo_root, tmp_path):
    """The check above can fail: a head whose tensors are prefixed loads without a word and stays unfilled."""
    pytest.importorskip("sglang", reason="needs SGLang")
    from tests.train.heads import edit_weights

    head = write_head(tmp_path / "head")
    edit_weights(head, lambda s: {("draft_model." + n if n not in ("d2t", "t2d") else n): t for n, t in s.items()})
    code = (
        "import sys; sys.argv = ['x', *sys.argv[1:]]\n"
        "from tests.train import sglang_load as s\nfrom talon_sglang.cpu import activate\nactivate()\n"
        "s.compare = lambda model, *_: print('\\n' + str(all(p.isnan().all().item() for p in model.parameters())))\n"
        "s.load(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, str(folders / "target"), str(head)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and done.stdout.strip().splitlines()[-1] == "True", done.stderr[-2000:]


def test_speculators_fields_that_were_left_out_get_transformers_defaults():
    flat = flatten_speculators(
        {
            "transformer_layer_config": {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1},
            "eagle_aux_hidden_state_layer_ids": [2, 18, 33, 36],
            "draft_vocab_size": 10,
            "norm_before_residual": False,
            "norm_before_fc": True,
        }
    )
    assert flat["num_attention_heads"] == 32 and flat["head_dim"] == 128 and flat["model_type"] == "llama"  # Qwen3Config's defaults
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 17, 32] and "eagle_aux_hidden_state_layer_ids" not in flat
    assert flat["norm_before_fc"] is True and "transformer_layer_config" not in flat


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, (10000.0, "default")),
        ({"rope_theta": 5e5}, (5e5, "default")),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, (5e5, "default")),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, (1e4, "default")),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}, "rope_parameters": {"rope_theta": 1e4}},
            (5e5, "linear"),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, (10000.0, "linear")),
    ],
)
def test_the_rotary_settings_are_read_as_transformers_reads_them(config, expected, tmp_path):
    from transformers import AutoConfig

    ours = effective_rope(config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192, **config}))
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (ours["rope_theta"], ours["rope_type"]) == expected == (float(theirs["rope_theta"]), theirs["rope_type"])


def test_an_index_decides_which_files_are_read(tmp_path):
    head = write_head(tmp_path / "head")
    state = weights(head)
    from safetensors.torch import save_file

    save_file({"norm.weight": state.pop("norm.weight")}, head / "a.safetensors")
    save_file(state, head / "b.safetensors")
    (head / "model.safetensors").unlink()
    assert len(read_checkpoint(head).tensors) == 15
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "b.safetensors"}}))
    found = read_checkpoint(head)
    assert "norm.weight" not in found.tensors and found.files.ignored == ["a.safetensors"]
    edit(head, draft_vocab_size=DRAFT, vocab_size=VOCAB)
    codes = {finding.code for finding in examine(found, target_json())[0]}
    assert {"file-ignored", "key-missing"} <= codes


def test_layouts_are_told_by_their_marks(tmp_path):
    assert detect_layout({"speculators_model_type": "eagle3"}) == "speculators"
    assert detect_layout({"eagle_config": {"use_last_layernorm": True}}) == "modelopt"
    assert detect_layout({"architectures": ["Eagle3LlamaForCausalLM"]}) == "angelslim"
    assert detect_layout({}) == "sglang"
