"""Does an EAGLE-3 head fit its target, and will SGLang 0.5.23 load all of it?

SGLang drops unknown tensors and leaves missing ones at random values, both without a word (`models/llama_eagle3.py`, load_weights); such a
head serves with an accept length of 1. So TALON checks names and shapes
before the start, and train/export.py before it finishes.
"""

from __future__ import annotations

import json
from pathlib import Path

from talon_sglang.settings import TalonError

ARCHITECTURE = "LlamaForCausalLMEagle3"


class DraftHeadError(TalonError):
    """One sentence: which head, what is wrong with it, what to do."""


def check_draft_head(head: str | Path, target: str | Path) -> None:
    """Check a head's folder (or hub name) against its target's. Raises DraftHeadError."""
    head_dir, target_dir = local_folder(head, "draft head"), local_folder(target, "target model")
    config, target_config = read_config(head_dir, "draft head"), read_config(target_dir, "target model")
    target_config = target_config.get("text_config") or target_config
    check_config(head_dir, config, target_config)
    shapes = tensor_shapes(head_dir)
    check_tensors(head_dir, shapes, expected_tensors(config, target_config))
    if "d2t" in shapes:
        check_d2t(head_dir, config)


def expected_tensors(config: dict, target_config: dict) -> dict[str, tuple[int, ...]]:
    """Name (SafeAILab spelling) to shape of every tensor SGLang must find for this config."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv_heads, inner = config.get("num_key_value_heads") or heads, config["intermediate_size"]
    target_hidden = config.get("target_hidden_size") or target_config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, target_hidden * num_aux(config)), "norm.weight": (hidden,)}
    if config.get("bias"):
        shapes["fc.bias"] = (hidden,)
    for i in range(config.get("num_hidden_layers", 1)):
        wide = 2 * hidden if i == 0 else hidden
        layer = "midlayer." if i == 0 else f"layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (heads * size, wide),
            layer + "self_attn.k_proj.weight": (kv_heads * size, wide),
            layer + "self_attn.v_proj.weight": (kv_heads * size, wide),
            layer + "self_attn.o_proj.weight": (hidden, heads * size),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
            layer + "hidden_norm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
        if i == 0:
            shapes[layer + "input_layernorm.weight"] = (hidden,)
        if config.get("attention_bias") or config.get("bias"):  # of SGLang's attention only o_proj has one here
            shapes[layer + "self_attn.o_proj.bias"] = (hidden,)
    draft_vocab = config["draft_vocab_size"]
    if draft_vocab is not None:  # null: SGLang shares the target's lm_head
        shapes["lm_head.weight"] = (draft_vocab, hidden)
        if draft_vocab != config["vocab_size"]:
            shapes["d2t"] = (draft_vocab,)
    eagle = config.get("eagle_config") or {}
    if eagle.get("norm_before_fc", config.get("norm_before_fc")):
        shapes["input_norm.weight"] = (target_hidden * num_aux(config),)
    if config.get("fc_norm") or config.get("use_aux_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(num_aux(config))}
    return shapes


def num_aux(config: dict) -> int:
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return config.get("num_aux_hidden_states") or len(ids or (0, 0, 0))


def check_config(head_dir: Path, config: dict, target_config: dict) -> None:
    def fail(problem: str, fix: str):
        raise DraftHeadError(f"{head_dir / 'config.json'}: {problem}; {fix}")

    architecture = (config.get("architectures") or ["none"])[0]
    if architecture != ARCHITECTURE:
        fail(
            f"architectures is {architecture}, not the EAGLE-3 class that SGLang loads",
            f"set it to [{ARCHITECTURE!r}] if this is an EAGLE-3 head for a text model",
        )
    if "draft_vocab_size" not in config:
        fail("draft_vocab_size is missing, which SGLang reads unconditionally", "set it to the number of rows of lm_head")
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(config.get(field), int):
            fail(f"{field} is {config.get(field)}", "set it to the head's own size")
    if config.get("tie_word_embeddings", True):
        fail("tie_word_embeddings is true or missing, with which SGLang would drop the trained lm_head", "set it to false")
    if config["vocab_size"] != target_config["vocab_size"]:
        fail(
            f"vocab_size is {config['vocab_size']}, the target's is {target_config['vocab_size']}",
            "use the head that was trained for this target",
        )
    if config["draft_vocab_size"] is not None and not 0 < config["draft_vocab_size"] <= config["vocab_size"]:
        fail(
            f"draft_vocab_size is {config['draft_vocab_size']}, outside 1 .. vocab_size {config['vocab_size']}",
            "set it to the number of rows of lm_head",
        )
    target_hidden = config.get("target_hidden_size", config["hidden_size"])
    if target_hidden != target_config["hidden_size"]:
        fail(
            f"the head expects target hidden states of {target_hidden}, the target has {target_config['hidden_size']}",
            "use the head that was trained for this target",
        )
    if "eagle_aux_hidden_state_layer_ids" in config:
        fail("eagle_aux_hidden_state_layer_ids stands at the top level, where SGLang ignores it", "move it into eagle_config")
    check_layers(config, target_config, fail)


def check_layers(config: dict, target_config: dict, fail) -> None:
    """SGLang captures the input of layer id + 1 (the output of layer id); without ids, the inputs of layers 2, L//2 and L-3."""
    layers = target_config["num_hidden_layers"]
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        if layers < 7:
            fail(
                f"it names no aux layers, and the default ones need a target of at least 7 layers where this one has {layers}",
                "set eagle_config.eagle_aux_hidden_state_layer_ids",
            )
    elif sorted(set(ids)) != list(ids) or not all(isinstance(i, int) and 0 <= i < layers for i in ids):
        fail(f"eagle_aux_hidden_state_layer_ids is {ids}", f"use ascending layer numbers below the target's {layers} layers")


def check_tensors(head_dir: Path, shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    ignored = {"t2d", "embed_tokens.weight"}  # SGLang skips the one and replaces the other by the target's
    missing = sorted(set(expected) - set(shapes))
    unknown = sorted(set(shapes) - set(expected) - ignored)
    if missing:
        raise DraftHeadError(
            f"{head_dir} lacks the tensor {missing[0]} ({len(missing)} missing), which SGLang would leave at random values; export the "
            "head again"
        )
    if unknown:
        raise DraftHeadError(
            f"{head_dir} holds the tensor {unknown[0]} ({len(unknown)} unknown), which SGLang would drop silently; export the head "
            "again, or correct its config"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise DraftHeadError(
                f"{head_dir}: {name} has the shape {list(shapes[name])} where config.json makes it {list(shape)}; use the config that "
                "the head was trained with"
            )


def check_d2t(head_dir: Path, config: dict) -> None:
    """d2t[i] is the offset from draft id i to target id."""
    import torch

    d2t = load_tensor(head_dir, "d2t").long()
    target_ids = d2t + torch.arange(d2t.numel())
    if target_ids.min() < 0 or target_ids.max() >= config["vocab_size"] or target_ids.unique().numel() != target_ids.numel():
        raise DraftHeadError(
            f"{head_dir}: d2t does not hold offsets to distinct target ids (d2t[i] + i); if it holds the ids themselves, subtract 0, 1, "
            "2, ..."
        )


# ---------------------------------------------------------------- files


def local_folder(path: str | Path, what: str) -> Path:
    """The folder itself, or the snapshot of a hub name (which SGLang would download anyway)."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.bin"] if what == "draft head" else ["config.json"])
        )
    except Exception as error:
        raise DraftHeadError(
            f"the {what} {path} is neither a folder nor a model that the hub gives ({type(error).__name__}); check the path"
        ) from error


def read_config(folder: Path, what: str) -> dict:
    try:
        return json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise DraftHeadError(f"the {what} {folder} has no config.json; name the folder that holds it") from error
    except json.JSONDecodeError as error:
        raise DraftHeadError(f"{folder / 'config.json'} is not valid JSON ({error}); write it again") from error


def plain_name(name: str) -> str:
    """The SafeAILab spelling of a tensor name; SGLang accepts `model.` in front and `layers.0.` for `midlayer.`."""
    name = name.removeprefix("model.")
    name = "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
    for i, legacy in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        name = name.replace(legacy, f"fc_norm.{i}")
    return name


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                shapes |= {plain_name(name): tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
        except SafetensorError as error:
            raise DraftHeadError(f"{file} is damaged ({error}); copy or export it again") from error
    if shapes:
        return shapes
    shapes = {plain_name(name): tuple(tensor.shape) for file in sorted(folder.glob("*.bin")) for name, tensor in load_bin(file).items()}
    if not shapes:
        raise DraftHeadError(f"{folder} holds neither *.safetensors nor *.bin; name the folder that holds the head's weights")
    return shapes


def load_tensor(folder: Path, wanted: str):
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                if plain_name(name) == wanted:
                    return tensors.get_tensor(name)
    return next(tensor for file in sorted(folder.glob("*.bin")) for name, tensor in load_bin(file).items() if plain_name(name) == wanted)


def load_bin(file: Path) -> dict:
    import torch

    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
