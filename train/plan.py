"""`--dry-run`: check everything that can be checked before the first long step, and say what a run will take.

Works from the target's config alone; with the target's folder and the answers there, rows and tokens are counted instead of assumed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from train import memory
from train.facts import count_parameters, target_config
from train.feature_size import feature_bytes
from train.foreign_start import foreign_start
from train.head import HeadConfig, default_aux_layers
from train.masks import Encoded
from train.memory import Memory, Shape
from train.recipe import Recipe, RecipeError
from train.schedule import make_schedule

GIB = 2**30
WORLDS = (1, 8)
# Model types whose hidden states SGLang 0.5.23 hands to an EAGLE-3 head; each is checked in tests/train/test_target_families.py.
SERVED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True)
class Stored:
    """What a feature store will hold, training and held-out conversations together."""

    conversations: int
    tokens: int
    predicted: int

    @classmethod
    def of(cls, chats: list[Encoded]) -> Stored:
        return cls(len(chats), sum(chat.useful_length for chat in chats), sum(chat.predicted for chat in chats))

    def size(self, hidden: int, dtype: str) -> int:
        """Bytes on disk."""
        return feature_bytes(hidden, self.tokens, self.predicted, self.conversations, dtype)


@dataclass(frozen=True)
class Rows:
    """What there is to train on. `lengths`: tokens of each training conversation; `share`: of them, those that carry loss."""

    lengths: list[int]
    longest: int
    share: float
    origin: str
    stored: Stored


@dataclass(frozen=True)
class Plan:
    """Numbers of a run, by number of processes where it matters. Bytes, tokens, steps."""

    rows: Rows
    steps: dict[int, int]
    memory: dict[int, Memory]
    feature_pass: float
    store_disk: float  # of the features, if they are kept
    checkpoints_disk: float
    head_parameters: tuple[int, int]  # trained, frozen
    target_parameters: int
    tokens: int  # of the whole run
    hours: float | None


def dry_run(recipe: Recipe, facts: Path | None = None, worlds: tuple[int, ...] = WORLDS) -> None:
    """Print the plan of a recipe. Raises RecipeError naming the field when a run could not even begin."""
    config, origin = target_config(recipe, facts)
    recipe, start = foreign_start(recipe, config)
    head = check(recipe, config)
    head = start.config if start else head
    rows, notes = find_rows(recipe, config)
    plan = make_plan(recipe, config, head, rows, worlds)
    print(describe(recipe, plan, config, head, f"{config.model_type}, {config.num_hidden_layers} layers, from {origin}"))
    for line in notes + warnings(recipe, plan):
        print(f"{'note':>17}: {line}")


def check(recipe: Recipe, config) -> HeadConfig:
    """Everything that the target's config decides. Raises RecipeError."""
    if config.model_type not in SERVED:
        raise RecipeError(f"`target` is a {config.model_type!r} model; this toolkit trains heads for {', '.join(SERVED)}.")
    layers = config.num_hidden_layers
    aux = recipe.head.aux_layers or default_aux_layers(layers)
    if recipe.head.aux_layers is None and layers < 7:
        raise RecipeError(f"`head.aux_layers` is missing and the target has {layers} layers, too few for the default ones; name three.")
    if list(aux) != sorted(set(aux)) or min(aux) < 1 or max(aux) >= layers:
        raise RecipeError(f"`head.aux_layers` is {list(aux)}; name three ascending layers from 1 to {layers - 1}.")
    if recipe.head.draft_vocab_size > config.vocab_size:
        raise RecipeError(
            f"`head.draft_vocab_size` is {recipe.head.draft_vocab_size}, the target has {config.vocab_size} tokens; lower it."
        )
    for section in ("train", "answers"):
        length = getattr(recipe, section).max_length
        if length > config.max_position_embeddings:
            raise RecipeError(f"`{section}.max_length` is {length}, the target reads {config.max_position_embeddings} tokens; lower it.")
    return HeadConfig.from_target(config, recipe.head.draft_vocab_size, aux)


def find_rows(recipe: Recipe, config) -> tuple[Rows, list[str]]:
    """Count the answers if they and the target's tokenizer are there, else take the recipe's `plan`. -> rows, what is still to be done."""
    answers, has_target = recipe.answers.file, (recipe.target / "config.json").exists()
    notes = [] if has_target else [f"`target` {recipe.target} is not there yet: get the model before training"]
    if answers is not None and answers.exists() and has_target:
        from transformers import AutoTokenizer

        from train.dataset import load_dataset

        data = load_dataset(recipe, AutoTokenizer.from_pretrained(recipe.target), config.vocab_size)
        lengths = [len(chat.ids) for chat in data.train]
        share = sum(chat.predicted for chat in data.train) / sum(lengths)
        stored = Stored.of(data.train + data.held_out)
        return Rows(
            lengths, max(lengths), share, f"counted ({data.notes}; draft vocabulary covers {data.vocab.coverage:.2%})", stored
        ), notes
    if recipe.plan is None:
        raise RecipeError(
            f"`answers.file` is {answers}, which is not there; run train/regenerate.py first, or give `plan.rows` and `plan.row_tokens`."
        )
    if answers is None or not answers.exists():
        prompts = recipe.answers.prompts
        state = "" if prompts is not None and prompts.exists() else f" (its prompts {prompts} are not there either)"
        notes.append(f"`answers.file` {answers} is not there yet: run train/regenerate.py{state}")
    train_rows = round(recipe.plan.rows * (1 - recipe.train.held_out))
    length = min(recipe.plan.row_tokens, recipe.train.max_length)
    tokens = recipe.plan.rows * length
    stored = Stored(recipe.plan.rows, tokens, round(tokens * recipe.plan.answer_share))
    return Rows([length] * train_rows, recipe.train.max_length, recipe.plan.answer_share, "assumed in `plan`", stored), notes


def make_plan(recipe: Recipe, config, head: HeadConfig, rows: Rows, worlds: tuple[int, ...] = WORLDS) -> Plan:
    """Pure arithmetic, but for the batches, which are planned by the function that the run uses."""
    settings = recipe.train
    trained, frozen = head_parameters(recipe, head)
    everything, kept = count_parameters(config)
    b = memory.width(settings.precision)
    longest = rows.longest
    padded = max(settings.micro_batch_tokens, longest)  # a single longer row still is one micro-batch
    shape = Shape(
        head.hidden_size, head.intermediate_size, head.num_attention_heads, head.num_key_value_heads, head.head_dim, head.draft_vocab_size
    )
    queries = padded * min(1.0, rows.share)
    recomputed = settings.activation_checkpointing
    activations = memory.saved_activations(shape, settings.precision, padded, queries, longest, settings.ttt_steps, recomputed)
    activations += memory.working_activations(shape, queries, longest)
    resident = b * (everything if recipe.features.mode == "online" else kept)
    steps, use, tokens = {}, {}, 0
    for processes in worlds:
        parts = processes * settings.gradient_accumulation
        schedule = make_schedule(rows.lengths, settings, parts)
        steps[processes], tokens = schedule.total, schedule.all_tokens if settings.tokens else sum(rows.lengths) * settings.epochs
        states = memory.head_states(trained, frozen, settings.precision, settings.zero_stage, processes, settings.offload_optimizer)
        use[processes] = Memory(target_weights=resident, activations=activations, **states)
    checkpoints = memory.checkpoint_bytes(trained) * (settings.keep_checkpoints + 1)  # the next one is written before the oldest goes
    speed = recipe.plan.tokens_per_second if recipe.plan else None
    return Plan(
        rows=rows,
        steps=steps,
        memory=use,
        feature_pass=b * everything,
        store_disk=rows.stored.size(head.hidden_size, recipe.features.dtype),
        checkpoints_disk=checkpoints + 2 * 4 * (trained + frozen),  # and the best and the last head in fp32
        head_parameters=(trained, frozen),
        target_parameters=everything,
        tokens=tokens,
        hours=tokens / speed / 3600 if speed else None,
    )


def head_parameters(recipe: Recipe, head: HeadConfig) -> tuple[int, int]:
    """-> trained and frozen parameters, counted on a head without storage."""
    import torch

    from train.head import Eagle3Head

    with torch.device("meta"):
        module = Eagle3Head(head)
    total = sum(parameter.numel() for parameter in module.parameters())
    frozen = 0 if recipe.head.train_lm_head else module.lm_head.weight.numel()
    return total - frozen, frozen


def warnings(recipe: Recipe, plan: Plan) -> list[str]:
    """What would not stop a run at its start, but later."""
    found = []
    need, place = plan.store_disk, recipe.features.folder
    if recipe.features.mode == "store" and free_bytes(place) < need:
        found.append(f"`features.folder` needs {size(need)}, {size(free_bytes(place))} are free there; mode online needs no disk")
    if free_bytes(recipe.output_dir) < plan.checkpoints_disk:
        found.append(
            f"`output_dir` needs {size(plan.checkpoints_disk)} for checkpoints, {size(free_bytes(recipe.output_dir))} are free there"
        )
    if plan.rows.longest > recipe.train.micro_batch_tokens:
        found.append(
            f"the longest row ({plan.rows.longest} tokens) exceeds `train.micro_batch_tokens` {recipe.train.micro_batch_tokens}: such a "
            "row is a micro-batch of its own"
        )
    return found


def free_bytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count < 2000 * GIB else f"{count / GIB / 1024:.1f} TiB"


def describe(recipe: Recipe, plan: Plan, config, head: HeadConfig, target: str) -> str:
    settings = recipe.train
    trained, frozen = plan.head_parameters
    online = recipe.features.mode == "online"
    lines = {
        "target": f"{plan.target_parameters / 1e9:.2f} B parameters, {target}",
        "head": f"{trained / 1e6:.0f} M parameters trained, {frozen / 1e6:.0f} M frozen, aux layers {', '.join(map(str, head.aux_layers))}",
        "draft vocabulary": f"{head.draft_vocab_size} of {config.vocab_size} tokens",
        "rows": f"{len(plan.rows.lengths)} with {sum(plan.rows.lengths)} tokens, {plan.rows.share:.0%} carry loss, {plan.rows.origin}",
        "tokens": f"{plan.tokens} in {settings.epochs} epochs" if settings.epochs else f"{plan.tokens}, as given in `train.tokens`",
        "engine": f"ZeRO-{settings.zero_stage}, {settings.precision}, {settings.ttt_steps} test steps, loss {settings.loss}, "
        f"{settings.micro_batch_tokens} tokens x {settings.gradient_accumulation} per process and step",
        "disk": ("features none (mode store: " if online else "features (")
        + f"{size(plan.store_disk)} in {recipe.features.dtype}, {plan.store_disk / plan.rows.stored.tokens:.0f} bytes a token)"
        + f", checkpoints and head {size(plan.checkpoints_disk)}",
    }
    if plan.hours is not None:
        lines["time"] = (
            f"{plan.hours:.1f} hours at {recipe.plan.tokens_per_second:g} tokens/s in all processes together, as given in `plan`"
        )
    for processes, use in plan.memory.items():
        parts = {"target": use.target_weights, "head": use.head_weights, "gradients": use.gradients, "optimizer": use.optimizer}
        parts |= {"buffers": use.buffers, "activations": use.activations}
        text = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items())
        lines[f"{processes} process" + "es" * (processes > 1)] = (
            f"{plan.steps[processes]} steps; memory each about {size(use.total)} ({text})"
            + (f", and {size(use.host)} of the host's" if use.host else "")
        )
    if not online:
        lines["feature pass"] = f"before training, the whole target: {size(plan.feature_pass)} each, and its activations"
    return "\n".join(f"{name:>17}: {text}" for name, text in lines.items())
