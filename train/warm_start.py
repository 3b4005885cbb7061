"""Where a head begins: from the target's own last layer instead of random weights.

Hidden-side columns of the attention are the last layer's and `fc` passes the high feature through, so at step 0 the fresh head nearly is
the target's last layer, applied a little early. Embedding-side columns start small and random behind a unit norm: they have no counterpart
in the target, and with zeros behind the last layer's own norm they took longer to learn to read the token.

Shape suffixes: H hidden size, Vd draft vocabulary.
"""

import torch
from torch import nn

from train.head import Eagle3Head
from train.target import FrozenTarget


@torch.no_grad()
def warm_start(head: Eagle3Head, target: FrozenTarget, ids_Vd: torch.Tensor, std: float = 0.02) -> None:
    """Copy what fits from the target into `head`. What has no counterpart there is random: a mixture of experts has no single MLP. Biases
    and query/key norms of the target have no place in the head."""
    layer, mid, hidden = target.decoder.layers[-1], head.midlayer, head.config.hidden_size
    head.lm_head.weight.copy_(target.lm_head_VH[ids_Vd])
    head.norm.weight.copy_(norm_scale(target.decoder.norm))
    head.fc.weight.zero_()
    head.fc.weight[:, 2 * hidden :].copy_(torch.eye(hidden))
    projections = _attention_rows(layer.self_attn, head)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(mid.self_attn, name).weight
        nn.init.normal_(weight, std=std)
        weight[:, hidden:].copy_(projections[name])
    mid.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
    for name, weight in _mlp_rows(layer).items():
        ours = getattr(mid.mlp, name).weight
        ours.copy_(weight) if weight is not None and weight.shape == ours.shape else nn.init.normal_(ours, std=std)
    before_mlp = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)  # Gemma has norms on both sides
    mid.hidden_norm.weight.copy_(norm_scale(layer.input_layernorm))
    mid.input_layernorm.weight.fill_(1.0)
    mid.post_attention_layernorm.weight.copy_(norm_scale(before_mlp))


def random_start(head: Eagle3Head, std: float = 0.02) -> None:
    """Normal weights, unit norms."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)


def norm_scale(norm: nn.Module) -> torch.Tensor:
    """What a root-mean-square norm multiplies with [H]. Gemma stores that minus one, so the norm itself is asked."""
    weight_H = norm.weight
    answer_H = norm(torch.ones_like(weight_H)[None])[0]
    return weight_H if torch.allclose(answer_H, weight_H, rtol=0.02) else 1 + weight_H


def _attention_rows(attention: nn.Module, head: Eagle3Head) -> dict[str, torch.Tensor]:
    names = ("q_proj", "k_proj", "v_proj")
    if hasattr(attention, "qkv_proj"):  # Phi: the three in one
        sizes = [getattr(head.midlayer.self_attn, name).weight.shape[0] for name in names]
        return dict(zip(names, attention.qkv_proj.weight.split(sizes)))
    return {name: getattr(attention, name).weight for name in names}


def _mlp_rows(layer: nn.Module) -> dict[str, torch.Tensor | None]:
    """None: the layer has no such matrix."""
    mlp = getattr(layer, "mlp", None)
    if isinstance(getattr(mlp, "gate_up_proj", None), nn.Linear):  # Phi: two in one
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        return {"gate_proj": gate, "up_proj": up, "down_proj": mlp.down_proj.weight}
    return {name: getattr(getattr(mlp, name, None), "weight", None) for name in ("gate_proj", "up_proj", "down_proj")}
