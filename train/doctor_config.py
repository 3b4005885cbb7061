"""The doctor's rules for files and config.json. Each yields findings; a finding's repair is applied before the rule goes on, so every rule
sees what the ones before it have put right. Sources: SGLang 0.5.23 `models/llama_eagle3.py`, `models/llama.py`, `model_loader/loader.py`,
`configs/model_config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from talon_sglang.draft_head import ARCHITECTURE
from train.findings import Answers, Finding, drop_fields, set_eagle, set_field, settle
from train.layouts import INDEX, Checkpoint, default_aux_layers, effective_rope, flatten_speculators, rope_spellings

EAGLE3_NAMES = ("Eagle3", "EAGLE3")


def check_files(head: Checkpoint, _target: dict | None, _answers: Answers) -> Iterator[Finding]:
    files = head.files

    def rewrite(checkpoint: Checkpoint) -> None:  # --fix always writes one model.safetensors without an index
        checkpoint.files.served = checkpoint.files.read = ["model.safetensors"]
        checkpoint.files.ignored, checkpoint.files.missing, checkpoint.files.clashes, checkpoint.files.wrapped = [], [], [], None

    if files.missing:
        yield Finding(
            "file-index",
            "error",
            f"{INDEX} names {files.missing[0]}, which is not there",
            "drop the index, one file holds the head",
            rewrite,
        )
    elif not files.served:
        yield Finding(
            "file-name",
            "error",
            f"SGLang finds no weights: {', '.join(files.read)} is not a name it loads",
            "write model.safetensors",
            rewrite,
        )
    elif files.clashes:
        yield Finding(
            "file-clash",
            "warning",
            f"{files.clashes[0]} is in more than one of {', '.join(files.served)}, and SGLang keeps whichever it reads last",
            "keep one file",
            rewrite,
        )
    elif files.wrapped:
        yield Finding(
            "file-wrapped", "error", f"the tensors lie under {files.wrapped!r}, where SGLang does not look", "write plain tensors", rewrite
        )
    elif files.ignored:
        yield Finding("file-ignored", "note", f"SGLang does not read {', '.join(files.ignored)}", "keep only what is served", rewrite)


def check_nesting(head: Checkpoint, _target: dict | None, _answers: Answers) -> Iterator[Finding]:
    config = head.config
    if config.get("norm_before_residual"):
        yield Finding(
            "norm-before-residual",
            "error",
            "norm_before_residual is true: the head adds its residual after hidden_norm, SGLang adds it before",
            "train it again with norm_before_residual false",
        )
    if "transformer_layer_config" in config:

        def flatten(checkpoint: Checkpoint) -> None:
            checkpoint.config = flatten_speculators(checkpoint.config)

        yield Finding(
            "config-nested",
            "error",
            "the sizes are in transformer_layer_config, where SGLang does not look",
            "lift them to the top",
            flatten,
        )
    if "target_hidden_size" in head.config and head.config["target_hidden_size"] is None:
        yield Finding(
            "target-hidden-null",
            "error",
            "target_hidden_size is null, which SGLang multiplies",
            "remove it",
            drop_fields("target_hidden_size"),
        )


def check_class(head: Checkpoint, _target: dict | None, _answers: Answers) -> Iterator[Finding]:
    config = head.config
    architecture = (config.get("architectures") or ["missing"])[0]
    if architecture != ARCHITECTURE:
        known = any(name in architecture for name in EAGLE3_NAMES) or "fc.weight" in head.tensors
        yield Finding(
            "architecture",
            "error",
            f"architectures is {architecture}, not {ARCHITECTURE}, the EAGLE-3 class that SGLang loads",
            f"set it to {ARCHITECTURE}" if known else "this is no EAGLE-3 head",
            set_field("architectures", [ARCHITECTURE]) if known else None,
        )
    kind = config.get("model_type")
    if kind != "llama":
        yield Finding(
            "model-type",
            "warning" if kind == "llama4_text" else "error",
            f"model_type is {kind or 'missing'}, so missing fields get another model's defaults, or the config is not read",
            "set it to llama",
            set_field("model_type", "llama"),
        )
    if config.get("tie_word_embeddings", True):
        state = "true" if config.get("tie_word_embeddings") else "missing"
        yield Finding(
            "tied-embeddings",
            "error",
            f"tie_word_embeddings is {state}: SGLang would score with the embedding and drop the trained lm_head",
            "set it to false",
            set_field("tie_word_embeddings", False),
        )
    act = config.get("hidden_act", "silu")
    if act != "silu":
        yield Finding("hidden-act", "error", f"hidden_act is {act}, SGLang's Llama layers know silu only", "train it again with silu")


def check_aux_layers(head: Checkpoint, target: dict | None, answers: Answers) -> Iterator[Finding]:
    """SGLang captures the OUTPUT of each listed layer; without a list the outputs of layers 1, L//2-1 and L-4."""
    layers = (target or {}).get("num_hidden_layers")
    yield from _aux_place(head, layers, answers)
    eagle = head.config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        yield Finding(
            "aux-disabled",
            "error",
            "eagle_config.use_aux_hidden_state is false: the target would hand over one hidden state where fc reads several",
            "set it to true",
            set_eagle("use_aux_hidden_state", True),
        )
    ids = (head.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        if layers is not None and layers < 7:
            yield Finding(
                "aux-missing",
                "error",
                f"no aux layers are named, and the default ones of a target of {layers} layers are not three distinct ones",
                "name the layers it was trained with in eagle_config.eagle_aux_hidden_state_layer_ids",
            )
        return
    if not all(isinstance(i, int) for i in ids) or sorted(set(ids)) != list(ids) or (ids and min(ids) < 0):
        yield Finding("aux-invalid", "error", f"the aux layer ids are {ids}", "name ascending layers, in the order of fc's columns")
    elif layers is not None and ids:
        yield from _aux_convention(head, ids, layers, answers)


def _aux_place(head: Checkpoint, layers: int | None, answers: Answers) -> Iterator[Finding]:
    """A top-level list is ignored by SGLang. What its numbers mean depends on the maker."""
    ids = head.config.get("eagle_aux_hidden_state_layer_ids")
    if "eagle_aux_hidden_state_layer_ids" not in head.config:
        return
    problem = f"eagle_aux_hidden_state_layer_ids {ids} stands at the top level, where SGLang ignores it"
    meaning = answers.aux_ids
    if meaning is None and ids and layers:
        inputs = default_aux_layers(layers)
        meaning = "inputs" if tuple(ids) == inputs else "outputs" if tuple(i + 1 for i in ids) == inputs else None
    if ids and meaning is None:
        yield Finding("aux-place", "error", problem, "say with --fix --aux-ids-are inputs or outputs what they name")
        return

    def move(checkpoint: Checkpoint) -> None:
        del checkpoint.config["eagle_aux_hidden_state_layer_ids"]
        if ids:
            moved = [i - 1 for i in ids] if meaning == "inputs" else list(ids)
            set_eagle("eagle_aux_hidden_state_layer_ids", moved)(checkpoint)
            settle("aux_ids", "outputs")(checkpoint)

    yield Finding("aux-place", "error", problem, "move it into eagle_config, as outputs of layers", move)


def _aux_convention(head: Checkpoint, ids: list[int], layers: int, answers: Answers) -> Iterator[Finding]:
    settled = (head.config.get("talon_doctor") or {}).get("aux_ids") == "outputs"
    if answers.aux_ids == "inputs" and not settled or max(ids) >= layers:
        shifted = [i - 1 for i in ids]

        def shift(checkpoint: Checkpoint) -> None:
            set_eagle("eagle_aux_hidden_state_layer_ids", shifted)(checkpoint)
            settle("aux_ids", "outputs")(checkpoint)

        ok = answers.aux_ids == "inputs" and min(shifted) >= 0 and max(shifted) < layers
        yield Finding(
            "aux-range" if max(ids) >= layers else "aux-off-by-one",
            "error",
            f"the aux layer ids {ids} are read as outputs of layers 0..{layers - 1}"
            + (", the largest does not exist" if max(ids) >= layers else " but name inputs"),
            "subtract one" if ok else "name the layers it was trained with, or say --aux-ids-are inputs",
            shift if ok else None,
        )
    elif not settled and tuple(ids) == default_aux_layers(layers):
        confirm = settle("aux_ids", "outputs") if answers.aux_ids == "outputs" else None
        yield Finding(
            "aux-off-by-one",
            "warning",
            f"the aux layer ids {ids} equal EAGLE-3's defaults counted as inputs; SGLang reads them as outputs, one layer later",
            "confirmed" if confirm else "say with --fix --aux-ids-are inputs (subtract one) or outputs (they are meant so)",
            confirm,
        )


def check_norm_output(head: Checkpoint, _target: dict | None, answers: Answers) -> Iterator[Finding]:
    """SpecForge up to 0.2.0 writes norm_output true for "norm before lm_head"; SGLang reads "the next step gets the normed state"."""
    if not head.config.get("norm_output") or (head.config.get("talon_doctor") or {}).get("norm_output") is True:
        return
    repair = None
    if answers.norm_output is True:
        repair = settle("norm_output", True)
    elif answers.norm_output is False:
        repair = set_field("norm_output", False)
    yield Finding(
        "norm-output",
        "warning",
        "norm_output is true: SGLang feeds the normed state to the next step, while SpecForge up to 0.2.0 trains with the un-normed one",
        "set as you say" if repair else "say with --fix --norm-output false (trained un-normed) or true (trained normed)",
        repair,
    )


def check_positions(head: Checkpoint, target: dict | None, _answers: Answers) -> Iterator[Finding]:
    yield from _check_rope(head, target)
    own, theirs = head.config.get("max_position_embeddings"), (target or {}).get("max_position_embeddings")
    if theirs and (own or 2048) < theirs:
        yield Finding(
            "max-positions",
            "error",
            f"max_position_embeddings is {own or 'missing'}, the target's is {theirs}: SGLang refuses the longer context, or reads past "
            "the rotary table",
            f"set it to {theirs}",
            set_field("max_position_embeddings", theirs),
        )
    elif not theirs and (own or 2048) <= 2048:
        yield Finding(
            "max-positions",
            "warning",
            f"max_position_embeddings is {own or 'missing'}, which sizes the rotary table",
            "name the target with --target, --fix then takes the target's value",
        )


def _check_rope(head: Checkpoint, target: dict | None) -> Iterator[Finding]:
    def write(rope: dict):
        def repair(checkpoint: Checkpoint) -> None:
            scaled = {name: value for name, value in rope.items() if name != "rope_theta"} if rope["rope_type"] != "default" else None
            checkpoint.config |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaled, "rope_parameters": dict(rope)}

        return repair

    own, spellings = effective_rope(head.config), rope_spellings(head.config)
    theirs = effective_rope(target) if target else None
    if spellings and spellings[0] != spellings[1]:
        yield Finding(
            "rope-conflict",
            "warning" if theirs is None else "note" if own == theirs else "error",
            f"rope_parameters says {_short(spellings[0])}, rope_theta and rope_scaling {_short(spellings[1])}; SGLang takes {_short(own)}",
            "write the target's values in both" if theirs else "name the target with --target, --fix then takes its values",
            write(theirs) if theirs else None,
        )
        own = effective_rope(head.config)
    if theirs is not None and own != theirs:
        field = "rope-theta" if own["rope_theta"] != theirs["rope_theta"] else "rope-scaling"
        yield Finding(
            field,
            "warning",
            f"the rotary settings are {_short(own)}, the target's are {_short(theirs)}",
            "take the target's, unless it was trained with others on purpose",
            write(theirs),
        )


def _short(rope: dict) -> str:
    extra = f" factor {rope['factor']:g}" if "factor" in rope else ""
    return f"theta {rope['rope_theta']:g} {rope['rope_type']}{extra}"
