"""The EAGLE-3 draft head, with the parameter names that SGLang loads.

One decoder layer whose attention reads cat(embedding, hidden), a projection `fc` from the target's three auxiliary features, a final norm
and a head over the draft vocabulary. The token embedding is the target's own, frozen, and not part of the checkpoint.
The arithmetic follows SGLang 0.5.23, `srt/models/llama_eagle3.py`.

Shape suffixes: B batch, T positions, H hidden size, F = 3H target features, D = 2H layer input, A attention heads, G key/value heads,
d head size, Vd draft vocabulary.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as fn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from talon_sglang.draft_head import ARCHITECTURE
from train.layouts import default_aux_layers


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head; everything but the draft vocabulary comes from the target."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | list | None
    aux_layers: tuple[int, int, int]  # 0-based target layers whose INPUTS are the features

    @classmethod
    def from_target(cls, target: LlamaConfig, draft_vocab_size: int, aux_layers: tuple[int, ...] | None = None) -> "HeadConfig":
        heads = target.num_attention_heads
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
            hidden_act="silu",  # the only one that SGLang's head knows, whatever the target uses
            rms_norm_eps=target.rms_norm_eps,
            rope_parameters=_full_rotary(dict(target.rope_parameters)),
            max_position_embeddings=target.max_position_embeddings,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
            aux_layers=tuple(aux_layers or default_aux_layers(target.num_hidden_layers)),
        )

    @classmethod
    def from_json(cls, path: Path) -> "HeadConfig":
        raw = json.loads(path.read_text())
        ids = raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        values = {name: raw.get(name) for name in cls.__dataclass_fields__ if name != "aux_layers"}
        return cls(**values, aux_layers=tuple(i + 1 for i in ids))

    def to_json(self) -> dict:
        """The `config.json` that SGLang reads. Its layer ids name the layer whose OUTPUT is captured, hence the minus one."""
        values = asdict(self)
        aux_layers = values.pop("aux_layers")
        rope = self.rope_parameters
        scaled = {k: v for k, v in rope.items() if k != "rope_theta"} if rope.get("rope_type", "default") != "default" else None
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **values,
            "rope_theta": rope["rope_theta"],  # the older spelling, for readers that know only that one
            "rope_scaling": scaled,
            "tie_word_embeddings": False,  # true would make SGLang use the embedding and drop the trained lm_head
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [i - 1 for i in aux_layers]},
        }

    def llama(self) -> LlamaConfig:
        """The same sizes as a transformers config (for its rotary embedding)."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
        )


def _full_rotary(rope: dict) -> dict:
    """The target's rotary settings for a head that attends to everything and rotates whole heads: of several kinds of layers (Gemma 3) the
    ones with full attention, without Phi's unrotated part."""
    rope = dict(rope.get("full_attention", rope))
    rope.pop("partial_rotary_factor", None)
    return rope


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (float64 stays float64)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(fn.silu(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nn.Module):
    """The projections only: who attends to whom is the caller's business (training-time test, serving and the reference differ there)."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)


class Midlayer(nn.Module):
    def __init__(self, config: HeadConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)


class Eagle3Head(nn.Module):
    """The draft head as separate pieces; `train.ttt` composes them for training, `train.reference` restates them for checking.

    Raises ValueError for a target whose activation is not SiLU (the only one SGLang's Llama head has).
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act is {config.hidden_act!r}, but SGLang's EAGLE-3 head needs 'silu'; choose another target.")
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # Not a submodule: casting the head to bf16 must not cast the rotary frequencies.
        self._rotary = (LlamaRotaryEmbedding(config.llama()),)

    def layer_inputs(self, embeds_BTH, state_BTH):
        """-> [B, T, 2H]: what the attention projections read."""
        return torch.cat([self.midlayer.input_layernorm(embeds_BTH), self.midlayer.hidden_norm(state_BTH)], dim=-1)

    def queries(self, inputs_BTD, positions_BT):
        """-> [B, A, T, d], rotated."""
        return self._heads(self.midlayer.self_attn.q_proj(inputs_BTD), self.config.num_attention_heads, positions_BT)

    def keys_values(self, inputs_BTD, positions_BT):
        """-> two tensors [B, G, T, d], the keys rotated."""
        groups = self.config.num_key_value_heads
        keys_BGTd = self._heads(self.midlayer.self_attn.k_proj(inputs_BTD), groups, positions_BT)
        return keys_BGTd, self._heads(self.midlayer.self_attn.v_proj(inputs_BTD), groups, None)

    def finish(self, state_BTH, context_BATd):
        """Output projection, residuals and MLP -> the layer's un-normed output [B, T, H], which is also the next step's state."""
        context_BTX = context_BATd.transpose(1, 2).flatten(2)
        hidden_BTH = state_BTH + self.midlayer.self_attn.o_proj(context_BTX)
        return hidden_BTH + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden_BTH))

    def logits(self, state):
        """-> [..., Vd]"""
        return self.lm_head(self.norm(state))

    def _heads(self, x_BTX, heads: int, positions_BT):
        x_BATd = x_BTX.unflatten(-1, (heads, self.config.head_dim)).transpose(1, 2)
        return x_BATd if positions_BT is None else rotate(x_BATd, *self._rotary[0](x_BATd, positions_BT))


def rotate(x_BATd, cos_BTd, sin_BTd):
    """Rotary position embedding in the half-split layout."""
    first, second = x_BATd.chunk(2, dim=-1)
    return x_BATd * cos_BTd[:, None] + torch.cat([-second, first], dim=-1) * sin_BTd[:, None]


def draft_token_ids(d2t_Vd: torch.Tensor) -> torch.Tensor:
    """Draft index -> target token id; the checkpoint stores the offsets `id - index`."""
    return d2t_Vd + torch.arange(len(d2t_Vd))


def load_head(head_dir: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Eagle3Head, torch.Tensor]:
    """Read an exported head: (module in eval mode, target ids of the draft vocabulary [Vd]).

    Raises RuntimeError (from `load_state_dict`) when a key is missing, unknown or of another shape.
    """
    head_dir = Path(head_dir)
    config = HeadConfig.from_json(head_dir / "config.json")
    state = load_file(head_dir / "model.safetensors")
    ids_Vd = draft_token_ids(state.pop("d2t"))
    state.pop("t2d", None)
    head = Eagle3Head(config)
    head.load_state_dict(state)
    return head.to(dtype).eval(), ids_Vd
