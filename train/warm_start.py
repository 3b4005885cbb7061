"""Where a head begins: from the target's own last layer instead of random weights.

Hidden-side columns of the attention are the last layer's and `fc` passes the high feature through, so at step 0 the fresh head nearly is
the target's last layer, applied a little early. Embedding-side columns start small and random behind a unit norm: they have no counterpart
in the target, and with zeros behind the last layer's own norm they took longer to learn to read the token.
"""

import torch
from torch import nn

from train.head import Eagle3Head
from train.target import FrozenTarget


@torch.no_grad()
def warm_start(head: Eagle3Head, target: FrozenTarget, ids_Vd: torch.Tensor, std: float = 0.02) -> None:
    """Copy what fits from a Llama-type target into `head`. Biases and query/key norms of the target have no place in the head."""
    layer, mid, hidden = target.model.model.layers[-1], head.midlayer, head.config.hidden_size
    head.lm_head.weight.copy_(target.lm_head_VH[ids_Vd])
    head.norm.weight.copy_(target.model.model.norm.weight)
    head.fc.weight.zero_()
    head.fc.weight[:, 2 * hidden :].copy_(torch.eye(hidden))
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(mid.self_attn, name).weight
        nn.init.normal_(weight, std=std)
        weight[:, hidden:].copy_(getattr(layer.self_attn, name).weight)
    mid.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mid.mlp, name).weight.copy_(getattr(layer.mlp, name).weight)
    mid.hidden_norm.weight.copy_(layer.input_layernorm.weight)
    mid.input_layernorm.weight.fill_(1.0)
    mid.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)


def random_start(head: Eagle3Head, std: float = 0.02) -> None:
    """Normal weights, unit norms."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
