"""A small sound head on disk, and edits that turn it into other makers' layouts or break it in one way."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.train.toy import toy_config
from train.head import Eagle3Head, HeadConfig

VOCAB, DRAFT, HIDDEN = 96, 40, 32


def target_json() -> dict:
    """The config.json of the toy target: 8 layers, so the default aux layers are the inputs of 2, 4 and 5."""
    config = toy_config(vocab=VOCAB, hidden=HIDDEN).to_dict()
    return {name: value for name, value in config.items() if value is not None} | {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def draft_ids() -> torch.Tensor:
    return torch.arange(VOCAB)[torch.arange(VOCAB) % 12 < 5]


def write_head(folder: Path) -> Path:
    """A head in our own export layout, bf16."""
    torch.manual_seed(3)
    config = HeadConfig.from_target(toy_config(vocab=VOCAB, hidden=HIDDEN), DRAFT)
    state = {name: torch.randn_like(tensor).bfloat16() for name, tensor in Eagle3Head(config).state_dict().items()}
    ids_Vd = draft_ids()
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids_Vd] = True
    folder.mkdir(parents=True)
    save_file(state | {"d2t": ids_Vd - torch.arange(DRAFT), "t2d": t2d}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, drop: tuple[str, ...] = (), **changes) -> None:
    """Change or drop fields of config.json."""
    merged = {name: value for name, value in (config(folder) | changes).items() if name not in drop}
    (folder / "config.json").write_text(json.dumps(merged))


def edit_weights(folder: Path, change) -> None:
    """`change(state)` edits the dict of tensors or returns a new one."""
    state = weights(folder)
    state = change(state) or state
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / "model.safetensors")


# ---------------------------------------------------------------- other makers


def as_safeailab(folder: Path) -> None:
    """pytorch_model.bin in fp16, a hand-copied Llama config without EAGLE fields."""
    state = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in weights(folder).items()}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    edit(folder, ("eagle_config", "rope_parameters", "rope_scaling"), architectures=["LlamaForCausalLM"], torch_dtype="float16")


def as_specforge(folder: Path) -> None:
    """`midlayer.` in safetensors; no aux layer ids when the defaults were used; with an embedding, as `--to hf` writes it."""
    edit_weights(folder, lambda state: state | {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN).bfloat16()})
    edit(folder, ("eagle_config",))


def as_speculators(folder: Path) -> None:
    """`layers.0.`, a nested config that leaves out transformers' defaults, layer ids at the top that name inputs."""
    edit_weights(folder, lambda state: {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()})
    flat = config(folder)
    layer_fields = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
    )
    layer = {name: flat[name] for name in (*layer_fields, "max_position_embeddings", "num_hidden_layers", "rope_theta")}
    layer = {name: value for name, value in layer.items() if name != "rms_norm_eps"}  # equals transformers' default, so it is left out
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "toy", "architectures": ["LlamaForCausalLM"]}},
        "transformer_layer_config": layer | {"model_type": "llama"},
        "draft_vocab_size": DRAFT,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(nested))


def as_angelslim(folder: Path) -> None:
    """The class under another name, tied embeddings by mistake, no aux layer ids."""
    edit(folder, ("eagle_config",), architectures=["Eagle3LlamaForCausalLM"], tie_word_embeddings=True)


def as_modelopt(folder: Path) -> None:
    """`layers.0.`, d2t in the order of frequency, no t2d, a YaRN factor that was not trained."""

    def change(state):
        size = len(state["d2t"])
        order = torch.randperm(size, generator=torch.Generator().manual_seed(5))
        ids_Vd = (state["d2t"] + torch.arange(size))[order]
        state |= {"d2t": ids_Vd - torch.arange(size), "lm_head.weight": state["lm_head.weight"][order]}
        del state["t2d"]
        return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}

    edit_weights(folder, change)
    eagle = config(folder)["eagle_config"] | {"use_last_layernorm": True, "use_input_layernorm_in_first_layer": True}
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 256}
    edit(folder, ("rope_parameters",), eagle_config=eagle, rope_scaling=yarn)


LAYOUTS = {
    "safeailab": as_safeailab,
    "specforge": as_specforge,
    "speculators": as_speculators,
    "angelslim": as_angelslim,
    "modelopt": as_modelopt,
}
