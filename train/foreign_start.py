"""Going on from somebody's EAGLE-3 head: any layout the doctor reads, with its own draft vocabulary.

The rows of its lm_head belong to its d2t, so that vocabulary is kept and never derived anew from the data (the fault of SpecForge PR#534,
where recomputed ids scrambled the rows without any metric showing it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from talon_sglang.draft_head import DraftHeadError
from train.doctor import examine
from train.head import Eagle3Head, HeadConfig, default_aux_layers
from train.layouts import read_checkpoint
from train.recipe import Recipe, RecipeError
from train.vocab import DraftVocab, count_supervised

NOT_TRAINED_HERE = ("norm_output", "norm_before_fc", "fc_norm", "use_aux_norm", "attention_bias", "bias")


@dataclass(frozen=True)
class ForeignStart:
    """`state`: fp32 weights under our names. `ids_Vd`: ascending target ids of the draft vocabulary."""

    folder: Path
    config: HeadConfig
    state: dict[str, torch.Tensor]
    ids_Vd: torch.Tensor

    def head(self) -> Eagle3Head:
        head = Eagle3Head(self.config)
        head.load_state_dict(self.state)
        return head

    def vocabulary(self, chats: list) -> DraftVocab:
        """Its own vocabulary, with its coverage of these chats."""
        size = self.config.vocab_size
        counts_V = count_supervised(chats, size)
        return DraftVocab(self.ids_Vd, size, counts_V[self.ids_Vd].sum().item() / max(counts_V.sum().item(), 1))


def foreign_start(recipe: Recipe, target) -> tuple[Recipe, ForeignStart | None]:
    """Read `head.start_from`, if set -> the recipe with that head's aux layers, and the head. `target`: the target's transformers config.

    Raises RecipeError when the head is broken, is not of this target, has parts that training does not know, or contradicts the recipe.
    """
    folder = recipe.head.start_from
    if folder is None:
        return recipe, None

    def refuse(why: str):
        raise RecipeError(f"`head.start_from` is {folder}: {why}.")

    try:
        findings, repaired = examine(read_checkpoint(folder), target.to_dict())
    except DraftHeadError as error:
        refuse(str(error))
    for finding in findings:
        if finding.severity == "error" and finding.repair is None:
            refuse(f"{finding.problem}; {finding.fix}")
    raw = repaired.config
    eagle = raw.get("eagle_config") or {}
    for name in NOT_TRAINED_HERE:
        if eagle.get(name, raw.get(name)):
            refuse(f"it has {name}, which this toolkit does not train; choose another head")
    if raw["num_hidden_layers"] != 1 or raw["hidden_size"] != target.hidden_size or "lm_head.weight" not in repaired.tensors:
        refuse("this toolkit trains heads of one layer, of the target's hidden size and with their own lm_head; choose another head")
    rows = len(repaired.tensors["lm_head.weight"])
    if rows != recipe.head.draft_vocab_size:
        refuse(f"its draft vocabulary has {rows} tokens, `head.draft_vocab_size` is {recipe.head.draft_vocab_size}; set that to {rows}")
    aux = _aux_layers(eagle, target.num_hidden_layers)
    if recipe.head.aux_layers not in (None, aux):
        refuse(f"it reads the inputs of layers {list(aux)}, `head.aux_layers` is {list(recipe.head.aux_layers)}; leave that out")
    state = {name: tensor.float() for name, tensor in repaired.tensors.items() if name not in ("d2t", "t2d")}
    d2t_Vd = repaired.tensors.get("d2t", torch.zeros(rows, dtype=torch.long))
    recipe = recipe.model_copy(update={"head": recipe.head.model_copy(update={"aux_layers": aux})})
    return recipe, ForeignStart(folder, _config(raw, target, rows, aux), state, d2t_Vd.long() + torch.arange(rows))


def _aux_layers(eagle: dict, layers: int) -> tuple[int, ...]:
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    return tuple(i + 1 for i in ids) if ids else default_aux_layers(layers)


def _config(raw: dict, target, rows: int, aux: tuple[int, ...]) -> HeadConfig:
    """The target's settings with the head's own sizes."""
    heads = raw["num_attention_heads"]
    return replace(
        HeadConfig.from_target(target, rows, aux),
        intermediate_size=raw["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
    )
