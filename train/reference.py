"""The draft head restated as slowly and plainly as possible, one row at a time: the oracle for training, the simulator and the server.

Nothing here uses `train.head`'s arithmetic, so an error there shows. Row i of a sequence holds the target feature f_i, the embedding of
token x_{i+1} and position i; it predicts x_{i+2}. A drafted token's row holds the previous row's un-normed output instead of a feature.

Shape suffixes: n committed rows, H hidden size, F = 3H, A heads, G key/value heads, d head size, V and Vd target and draft vocabulary.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class ReferenceHead:
    """A head as a bag of tensors.

    `weights` has the checkpoint's keys, `config` is its config.json, `embedding_VH` the target's input embedding.
    `dtype` float32 or float64.
    """

    def __init__(self, weights: dict, config: dict, embedding_VH: torch.Tensor, dtype: torch.dtype = torch.float32):
        self.w = {name: tensor.to(dtype) for name, tensor in weights.items() if tensor.is_floating_point()}
        self.config = config
        self.embedding_VH = embedding_VH.to(dtype)
        self.dtype = dtype
        offsets_Vd = weights["d2t"]
        self.draft_ids_Vd = torch.tensor([index + int(offset) for index, offset in enumerate(offsets_Vd)])
        self.inv_freq, self.rope_scale = _rotary_frequencies(config)

    @classmethod
    def from_dirs(cls, head_dir: str | Path, target_dir: str | Path, dtype: torch.dtype = torch.float32) -> "ReferenceHead":
        """Read an exported head and the embedding of its target."""
        config = json.loads((Path(head_dir) / "config.json").read_text())
        return cls(load_file(Path(head_dir) / "model.safetensors"), config, read_embedding(target_dir), dtype)

    def chain_log_probs(self, features_nF: torch.Tensor, tokens: list[int], path: list[int]) -> torch.Tensor:
        """Draft log-probabilities [len(path) + 1, Vd]: after the committed tokens, then after each token of `path`.

        `tokens` are the n+1 committed tokens x_0..x_n, `features_nF` the target's features of positions 0..n-1, `path` drafted token ids of
        the target vocabulary. Every row attends to the committed rows and to the path rows before it.
        Raises ValueError when the lengths do not fit.
        """
        count = len(features_nF)
        if len(tokens) != count + 1 or count == 0:
            raise ValueError(f"{len(tokens)} tokens and {count} features were given; n features need n+1 tokens and n >= 1.")
        keys, values, rows = [], [], []
        state_H = None
        for row in range(count + len(path)):
            if row < count:
                hidden_H, token = self.w["fc.weight"] @ features_nF[row].to(self.dtype), tokens[row + 1]
            else:
                hidden_H, token = state_H, path[row - count]
            state_H = self._layer(hidden_H, self.embedding_VH[token], row, keys, values)
            if row >= count - 1:
                logits_Vd = self.w["lm_head.weight"] @ self._norm(state_H, "norm")
                rows.append(torch.log_softmax(logits_Vd, dim=-1))
        return torch.stack(rows)

    def _layer(self, hidden_H, embed_H, position: int, keys: list, values: list):
        """One row through the layer; its key and value are appended, so it attends to all rows so far and itself."""
        config, prefix = self.config, "midlayer."
        heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        inputs_D = torch.cat([self._norm(embed_H, prefix + "input_layernorm"), self._norm(hidden_H, prefix + "hidden_norm")])
        query = (self.w[prefix + "self_attn.q_proj.weight"] @ inputs_D).view(heads, size)
        key = (self.w[prefix + "self_attn.k_proj.weight"] @ inputs_D).view(groups, size)
        query, key = self._rotate(query, position), self._rotate(key, position)
        keys.append(key)
        values.append((self.w[prefix + "self_attn.v_proj.weight"] @ inputs_D).view(groups, size))
        contexts = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = torch.stack([query[head] @ past[group] for past in keys]) / size**0.5
            weights = torch.softmax(scores, dim=0)
            contexts.append(sum(weight * past[group] for weight, past in zip(weights, values)))
        hidden_H = hidden_H + self.w[prefix + "self_attn.o_proj.weight"] @ torch.cat(contexts)
        inner = self._norm(hidden_H, prefix + "post_attention_layernorm")
        gate, up = self.w[prefix + "mlp.gate_proj.weight"] @ inner, self.w[prefix + "mlp.up_proj.weight"] @ inner
        return hidden_H + self.w[prefix + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def _norm(self, x, name: str):
        return x / torch.sqrt((x * x).mean() + self.config["rms_norm_eps"]) * self.w[name + ".weight"]

    def _rotate(self, x_Ad, position: int):
        # Angles in float32, as transformers and SGLang compute them.
        angles = (position * self.inv_freq).repeat(2)
        first, second = x_Ad.chunk(2, dim=-1)
        turned = x_Ad * angles.cos().to(self.dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(self.dtype)
        return turned * self.rope_scale


def _rotary_frequencies(config: dict):
    rope = config["rope_parameters"]
    if rope.get("rope_type", "default") == "default":
        size = config["head_dim"]
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
    fields = {k: v for k, v in config.items() if k not in ("architectures", "eagle_config", "rope_theta", "rope_scaling", "model_type")}
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](AutoConfig.for_model("llama", **fields), "cpu")


def read_embedding(target_dir: str | Path) -> torch.Tensor:
    """The target's input embedding [V, H], without loading the rest of the model. Raises KeyError when no file holds it."""
    for path in sorted(Path(target_dir).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if name.endswith("embed_tokens.weight"):
                    return file.get_tensor(name)
    raise KeyError(f"No safetensors file in {target_dir} holds `embed_tokens.weight`; pass the folder of the target model.")
