"""Load heads into SGLang's own class with SGLang's own loader, in a process of its own and without a server; print what arrived as JSON.

    python tests/train/sglang_load.py TARGET HEAD [HEAD ...]

All parameters are NaN before the load, so what the loader does not fill shows. Per head: the names left unfilled, whether every tensor of
the file arrived unchanged, and the target ids of the draft vocabulary.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch

RANKS = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "moe_ep")


def load(target: str, head: str) -> dict:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    speculative = dict(speculative_algorithm="EAGLE3", speculative_draft_model_path=head, speculative_num_steps=1)
    speculative |= dict(speculative_eagle_topk=1, speculative_num_draft_tokens=2)
    args = ServerArgs(
        model_path=target, device="cpu", skip_tokenizer_init=True, attention_backend="torch_native", dtype="bfloat16", **speculative
    )
    set_global_server_args_for_scheduler(args)
    config = ModelConfig.from_server_args(args, model_path=head, is_draft_model=True)
    alone = {f"{name}_{what}": value for name in RANKS for what, value in (("rank", 0), ("size", 1))}
    group = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    torch.set_default_dtype(torch.bfloat16)
    with get_parallel().override(**alone, pp_group=group, tp_group=group, attn_tp_group=group):
        model = LlamaForCausalLMEagle3(config.hf_config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        loader = DefaultModelLoader(LoadConfig())
        model.load_weights(loader._get_weights_iterator(DefaultModelLoader.Source.init_new(config, model)))
    return compare(model, Path(head), config.hf_config.draft_vocab_size)


def compare(model, head: Path, draft_size: int) -> dict:
    from train.layouts import read_checkpoint

    found = dict(model.named_parameters())
    found["lm_head.weight"] = found["lm_head.weight"][:draft_size]  # SGLang pads the rows
    unfilled = [name for name, tensor in found.items() if not torch.isfinite(tensor).all() and "embed_tokens" not in name]
    files = read_checkpoint(head).tensors
    arrived = all(torch.equal(served(found, name), tensor) for name, tensor in files.items() if name not in ("d2t", "t2d"))
    return {"unfilled": unfilled, "arrived": arrived, "ids": model.hot_token_id.tolist()}


def served(found: dict, name: str) -> torch.Tensor:
    """The slice of SGLang's parameters that a tensor of the file ends up in."""
    name = name.replace("midlayer.", "layers.0.")
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for index, part in enumerate(parts):
            if part in name:
                whole = found["model." + name.replace(part, fused)]
                hidden = found["model.fc.weight"].shape[0]
                rows = whole.shape[0] // 2 if fused == "gate_up_proj" else hidden  # the toy's q_proj is square in H
                size = rows if fused == "gate_up_proj" or index == 0 else (whole.shape[0] - rows) // 2
                start = index * rows if fused == "gate_up_proj" else (0 if index == 0 else rows + (index - 1) * size)
                return whole[start : start + size]
    return found[name] if name in found else found["model." + name]


if __name__ == "__main__":
    from talon_sglang.cpu import activate

    activate()
    results = {head: load(sys.argv[1], head) for head in sys.argv[2:]}
    print("\n" + json.dumps(results))
