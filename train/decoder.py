"""A batched decode loop with preallocated keys and values, for models of the Llama family (Llama, Mistral, Qwen2, Qwen3).

`transformers.generate` grows its cache by concatenation and costs several times as much on a CPU. This loop calls the model's own modules,
so weights, norms and rotary embedding are the model's; only the cache and the attention call are ours.

Shape suffixes: B sequences, S slots, T positions, H hidden size, A heads, G key/value heads, d head size, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as fn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from talon_sglang.cpu.linear import packed_linear

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class SlotDecoder:
    """`slots` sequences decoded side by side, each at its own length.

    With `keep_layers` it also keeps, per position, the inputs of those layers and the final normed hidden state, in `kept_dtype`.
    Raises ValueError for a model of another family.
    """

    def __init__(self, model: nn.Module, slots: int, max_length: int, keep_layers: tuple[int, ...] = (), kept_dtype=torch.bfloat16):
        config = model.config
        if config.model_type not in FAMILIES:
            raise ValueError(f"The target is a {config.model_type!r} model; the built-in decode loop knows {', '.join(FAMILIES)}.")
        if model.lm_head.weight.device.type == "cpu":
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.forward = packed(module)
        self.model, self.keep_layers = model, keep_layers
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.groups = config.num_key_value_heads
        weight = model.lm_head.weight
        shape = (slots, self.groups, max_length, self.head_dim)
        self.keys = [weight.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.values = [weight.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.lengths_S = torch.zeros(slots, dtype=torch.long, device=weight.device)
        self.prefix: list[int] = []
        width = (len(keep_layers) + 1) * config.hidden_size
        self.kept_STX = weight.new_zeros((slots, max_length, width), dtype=kept_dtype) if keep_layers else None

    @torch.no_grad()
    def share_prefix(self, ids: list[int]) -> None:
        """Tokens that every later prompt begins with (a system message): they are computed once, here, and copied from then on."""
        if not ids:
            return
        self.prefill([0], [ids])
        self.prefix = list(ids)
        self.prefix_keys = [keys[:1, :, : len(ids)].clone() for keys in self.keys]
        self.prefix_values = [values[:1, :, : len(ids)].clone() for values in self.values]
        self.prefix_kept = None if self.kept_STX is None else self.kept_STX[:1, : len(ids)].clone()

    @torch.no_grad()
    def prefill(self, slots: list[int], prompts: list[list[int]]) -> torch.Tensor:
        """Start new sequences in `slots` -> logits after each prompt [len(slots), V]. Each must be longer than the shared prefix."""
        device, start = self.lengths_S.device, len(self.prefix)
        longest = max(map(len, prompts))
        ids_BT = torch.tensor([prompt[start:] + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        slots_B = torch.tensor(slots, device=device)
        positions_T = torch.arange(start, longest, device=device)
        visible_TC = torch.arange(longest, device=device) <= positions_T[:, None]  # C: the prefix and the new tokens
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)

        def attend(layer, q_BATd, k_BGTd, v_BGTd):
            if start:
                k_BGTd = torch.cat([self.prefix_keys[layer].expand(len(slots), -1, -1, -1), k_BGTd], dim=2)
                v_BGTd = torch.cat([self.prefix_values[layer].expand(len(slots), -1, -1, -1), v_BGTd], dim=2)
            self.keys[layer][slots_B, :, :longest] = k_BGTd
            self.values[layer][slots_B, :, :longest] = v_BGTd
            return fn.scaled_dot_product_attention(q_BATd, k_BGTd, v_BGTd, attn_mask=visible_TC, enable_gqa=True)

        def keep(kept_BTX):
            self.kept_STX[slots_B, start:longest] = kept_BTX
            if start:
                self.kept_STX[slots_B, :start] = self.prefix_kept

        hidden_BTH = self._forward(ids_BT, positions_T.expand(len(prompts), -1), attend, keep)
        self.lengths_S[slots_B] = lengths_B
        last_BH = hidden_BTH[torch.arange(len(prompts), device=device), lengths_B - 1 - start]
        return self.model.lm_head(last_BH).float()

    @torch.no_grad()
    def step(self, tokens_S: torch.Tensor) -> torch.Tensor:
        """Append one token to every slot -> logits [S, V]. Slots not in use are decoded too and their output is to be ignored."""
        rows_S = torch.arange(len(tokens_S), device=tokens_S.device)
        at_S = self.lengths_S.clamp(max=self.keys[0].shape[2] - 1)
        span = int(at_S.max()) + 1
        visible_S11T = (torch.arange(span, device=tokens_S.device) <= at_S[:, None])[:, None, None]

        def attend(layer, q_SA1d, k_SG1d, v_SG1d):
            keys, values = self.keys[layer], self.values[layer]
            keys[rows_S, :, at_S] = k_SG1d[:, :, 0]
            values[rows_S, :, at_S] = v_SG1d[:, :, 0]
            # One query per head: put the heads that share a key head side by side as "queries" of that key head.
            q_SGRd = q_SA1d[:, :, 0].unflatten(1, (self.groups, -1))
            context = fn.scaled_dot_product_attention(q_SGRd, keys[:, :, :span], values[:, :, :span], attn_mask=visible_S11T)
            return context.flatten(1, 2)[:, :, None]

        def keep(kept_S1X):
            self.kept_STX[rows_S, at_S] = kept_S1X[:, 0]

        hidden_S1H = self._forward(tokens_S[:, None], at_S[:, None], attend, keep)
        self.lengths_S += 1
        return self.model.lm_head(hidden_S1H[:, 0]).float()

    def kept(self, slot: int) -> torch.Tensor:
        """What `keep_layers` asked for, for the tokens read so far: [T, (len(keep_layers) + 1) * H]."""
        return self.kept_STX[slot, : int(self.lengths_S[slot])].clone()

    def select(self, slots: list[int]) -> None:
        """Keep only these slots, renumbered in this order (when few sequences are left, the rest would be dead weight)."""
        self.keys = [keys[slots] for keys in self.keys]
        self.values = [values[slots] for values in self.values]
        self.lengths_S = self.lengths_S[slots]
        if self.kept_STX is not None:
            self.kept_STX = self.kept_STX[slots]

    def _forward(self, ids_BT, positions_BT, attend, keep) -> torch.Tensor:
        """Final normed hidden states [B, T, H]."""
        inner = self.model.model
        hidden_BTH = inner.embed_tokens(ids_BT)
        cos, sin = inner.rotary_emb(hidden_BTH, positions_BT)
        kept = []
        for index, layer in enumerate(inner.layers):
            if index in self.keep_layers:
                kept.append(hidden_BTH)
            attn, normed_BTH = layer.self_attn, layer.input_layernorm(hidden_BTH)
            q, k, v = (project(normed_BTH).unflatten(-1, (-1, self.head_dim)) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
            if hasattr(attn, "q_norm"):
                q, k = attn.q_norm(q), attn.k_norm(k)
            q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            context_BATd = attend(index, q, k, v.transpose(1, 2))
            hidden_BTH = hidden_BTH + attn.o_proj(context_BATd.transpose(1, 2).flatten(2))
            hidden_BTH = hidden_BTH + layer.mlp(layer.post_attention_layernorm(hidden_BTH))
        hidden_BTH = inner.norm(hidden_BTH)
        if self.keep_layers:
            keep(torch.cat([*kept, hidden_BTH], dim=-1).to(self.kept_STX.dtype))
        return hidden_BTH


def packed(module: nn.Linear):
    """A forward for inference that is faster on a CPU, most of all when few rows come together, as they do in decoding."""

    def forward(x_XH):
        return packed_linear(x_XH.flatten(0, -2), module.weight, module.bias).unflatten(0, x_XH.shape[:-1])

    return forward
