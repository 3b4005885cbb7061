"""The frozen target: features for the draft head, and the hidden state its own logits come from.

Shape suffixes: B batch, T positions, H hidden size, F = 3H, V target vocabulary, N any number of rows.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from train.layouts import default_aux_layers

FEWEST_LAYERS = 7  # below, the default layers 2, L//2, L-3 are not three ascending ones


class FrozenTarget:
    """A causal language model that is only ever read; any decoder-only architecture of transformers whose logits are
    `lm_head(final hidden state)`, perhaps capped (Gemma 2).

    `aux_layers` are the 0-based layers whose inputs are the features (default: 2, L//2, L-3, i.e. `hidden_states[2]`, `[L//2]`, `[L-3]`
    of transformers). Raises ValueError when the target has too few layers for the default, or not the layers named.
    """

    def __init__(self, model: nn.Module, aux_layers: tuple[int, ...] | None = None):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.aux_layers = _checked(aux_layers, self.config.num_hidden_layers)

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu", aux_layers=None) -> "FrozenTarget":
        """Read a Hugging Face folder, sharded or a single file, and check that its logits can be recomputed (ValueError)."""
        logging.disable_progress_bar()  # its bar for loading weights would break ours
        target = cls(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device), aux_layers)
        target.check_logits()
        return target

    @property
    def decoder(self) -> nn.Module:
        """Embedding, layers and final norm: the text part, of a model that also sees or hears."""
        return self.model.get_decoder()

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def lm_head_VH(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def logit_cap(self) -> float | None:
        """Logits are cap * tanh(logits / cap); None: as they are."""
        return getattr(self.config, "final_logit_softcapping", None)

    def drop_layers(self) -> None:
        """Free what is not needed once all features are known; `hidden` does not work any more."""
        self.decoder.layers = nn.ModuleList()

    @torch.no_grad()
    def hidden(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> features [B, T, F] and final normed hidden states [B, T, H]. Rows are right-padded; `mask_BT` is true on real tokens."""
        taken: dict[int, torch.Tensor] = {}

        def keep(layer: int):
            def hook(_module, args, kwargs):
                taken[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        decoder = self.decoder
        handles = [decoder.layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in self.aux_layers]
        try:
            attention_mask = None if mask_BT is None else mask_BT.long()
            final_BTH = decoder(input_ids=ids_BT, attention_mask=attention_mask, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([taken[i] for i in self.aux_layers], dim=-1), final_BTH

    @torch.no_grad()
    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """The target's own logits [N, V] after each row."""
        return capped(hidden_NH @ self.lm_head_VH.t(), self.logit_cap)

    @torch.no_grad()
    def argmax(self, hidden_NH: torch.Tensor, chunk: int = 1024) -> torch.Tensor:
        """The target's greedy token after each row [N], over the full vocabulary. A cap does not change it."""
        return torch.cat([(rows @ self.lm_head_VH.t()).argmax(-1) for rows in hidden_NH.split(chunk)])

    @torch.no_grad()
    def check_logits(self) -> None:
        """Training recomputes the target's logits from its final hidden state. Raises ValueError when they are not the model's own, as in
        architectures that scale them or add a bias."""
        ids_1T = torch.arange(3, 7, device=self.embedding.weight.device)[None]
        expected_TV = self.model(ids_1T, use_cache=False).logits[0].float()
        found_TV = self.logits(self.hidden(ids_1T)[1][0]).float()
        if (found_TV - expected_TV).abs().max() > 0.05 * expected_TV.abs().max():
            raise ValueError(
                f"`target` is a {self.config.model_type!r} model, whose logits are not lm_head times its final hidden state; "
                "choose a target that neither scales nor shifts them."
            )


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Gemma's soft cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _checked(aux_layers: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
    """Other makers' heads may name their layers in any order."""
    if aux_layers is None and count < FEWEST_LAYERS:
        raise ValueError(f"`head.aux_layers` is missing and the target has {count} layers, too few for the default ones; name three.")
    chosen = tuple(aux_layers or default_aux_layers(count))
    if min(chosen) < 0 or max(chosen) >= count:
        raise ValueError(f"`head.aux_layers` is {list(chosen)}; name layers from 0 to {count - 1}.")
    return chosen
