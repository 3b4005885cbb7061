"""The frozen target: features for the draft head, and the hidden state its own logits come from.

Shape suffixes: B batch, T positions, H hidden size, F = 3H, V target vocabulary, N any number of rows.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from train.head import default_aux_layers


class FrozenTarget:
    """A causal language model of the Llama family that is only ever read.

    `aux_layers` are the 0-based layers whose inputs are the features (default: 2, L//2, L-3, i.e. `hidden_states[2]`, `[L//2]`, `[L-3]`
    of transformers).
    """

    def __init__(self, model: nn.Module, aux_layers: tuple[int, ...] | None = None):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.aux_layers = tuple(aux_layers or default_aux_layers(self.config.num_hidden_layers))

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu", aux_layers=None) -> "FrozenTarget":
        logging.disable_progress_bar()  # its bar for loading weights would break ours
        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device), aux_layers)

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def lm_head_VH(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def hidden(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> features [B, T, F] and final normed hidden states [B, T, H]. Rows are right-padded; `mask_BT` is true on real tokens."""
        taken: dict[int, torch.Tensor] = {}

        def keep(layer: int):
            def hook(_module, args, kwargs):
                taken[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        layers = self.model.model.layers
        handles = [layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in self.aux_layers]
        try:
            attention_mask = None if mask_BT is None else mask_BT.long()
            final_BTH = self.model.model(input_ids=ids_BT, attention_mask=attention_mask, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([taken[i] for i in self.aux_layers], dim=-1), final_BTH

    @torch.no_grad()
    def argmax(self, hidden_NH: torch.Tensor, chunk: int = 1024) -> torch.Tensor:
        """The target's greedy token after each row [N], over the full vocabulary."""
        return torch.cat([(rows @ self.lm_head_VH.t()).argmax(-1) for rows in hidden_NH.split(chunk)])
