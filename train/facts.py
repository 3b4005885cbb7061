"""The target's config, also where the target itself is not at hand: from its folder, or from a file of plain facts (recipes/targets/)."""

from __future__ import annotations

import json
from pathlib import Path

from train.recipe import Recipe, RecipeError

NEEDED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def target_config(recipe: Recipe, named: Path | None = None) -> tuple[object, str]:
    """-> a transformers config and where it came from: `named`, else the target's folder, else the recipe's `target_facts`.

    Raises RecipeError when there is none, when it is incomplete, or when the folder and the facts contradict each other.
    """
    from transformers import AutoConfig

    folder = recipe.target / "config.json"
    facts = named or recipe.target_facts
    if folder.exists() and named is None:
        config = AutoConfig.from_pretrained(recipe.target)
        if facts is not None:
            _compare(config, read_facts(facts), facts)
        return getattr(config, "text_config", None) or config, str(folder)
    if facts is None:
        raise RecipeError(f"`target` is {recipe.target}, which is not there; name its facts with `target_facts` or --target-config.")
    raw = read_facts(facts)
    return AutoConfig.for_model(raw["model_type"], **{name: value for name, value in raw.items() if name != "model_type"}), str(facts)


def read_facts(path: Path) -> dict:
    """A config.json or a file of recipes/targets/; names that begin with _ are remarks. Raises RecipeError."""
    try:
        raw = json.loads(path.read_text())
    except OSError:
        raise RecipeError(f"The target facts {path} cannot be read; name a config.json or a file of recipes/targets/.") from None
    except json.JSONDecodeError as error:
        raise RecipeError(f"The target facts {path} are not valid JSON: {error}.") from None
    raw = raw.get("text_config") or raw
    missing = [name for name in NEEDED if raw.get(name) is None]
    if missing:
        raise RecipeError(f"The target facts {path} lack `{missing[0]}`; add it from the target's config.json.")
    return {name: value for name, value in raw.items() if not name.startswith("_")}


def _compare(config, raw: dict, path: Path) -> None:
    for name in (*NEEDED, "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        theirs = getattr(config, name, None)
        if name in raw and theirs is not None and raw[name] != theirs:
            raise RecipeError(f"`target_facts` {path.name} says {name} {raw[name]}, the target's config.json {theirs}; correct the facts.")


def count_parameters(config) -> tuple[int, int]:
    """-> parameters of the whole target, and of those that training needs after the features are known (embedding, norm, lm_head).

    Counted on a model without storage, so it holds for every architecture that transformers knows.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kept = {id(p): p.numel() for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()}
    return sum(p.numel() for p in model.parameters()), sum(kept.values()) + config.hidden_size
