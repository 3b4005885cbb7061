"""The folder of a run: its claim, its checkpoints, the best and the finished head.

run.json         settings and data the run belongs to
step-000200/     state.safetensors (fp32 weights and moments, see train/engine_state.py) and state.json
latest           the name of the newest whole checkpoint, replaced in one move
metrics.jsonl    one row per logged step
best/            the head with the longest held-out accept length so far, in the form of head/, and best.json: its step and that length
head/            the finished head in float32: model.safetensors, config.json
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from train.engine_state import full_weights, training_state
from train.paths import write_whole
from train.recipe import HeadSettings, Recipe, RecipeError, TrainSettings
from train.vocab import DraftVocab
from train.world import World

# What may change between runs of one folder: how a step is computed and reported, not what it computes.
FREE_FIELDS = {"log_every", "eval_every", "save_every", "keep_checkpoints", "tree_rows", "wandb"} | {
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "activation_checkpointing",
}
GLOBAL_BATCH = ("processes", "train.gradient_accumulation")


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` and `facts` as `train.engine_state.training_state` gives them, taken after `step` optimiser steps."""

    step: int
    tensors: dict[str, torch.Tensor]
    facts: dict


class RunFolder:
    def __init__(self, folder: Path, world: World):
        self.folder, self.world = folder, world
        self.head, self.best = folder / "head", folder / "best"

    @property
    def finished(self) -> bool:
        return (self.head / "model.safetensors").exists()

    def claim(self, recipe: Recipe, data: str, restart_on_change: bool) -> Recipe:
        """Make the folder this run's, or find that it already is -> the recipe to go on with.

        A run keeps its micro-batches per optimiser step: on another number of processes `train.gradient_accumulation` is changed so that
        it does. Raises RecipeError when the folder is another run's, or that number cannot be kept.
        """
        mine = {**_flat(recipe), "data": data, "processes": self.world.size}
        path = self.folder / "run.json"
        theirs = json.loads(path.read_text()) if path.exists() else None
        change = _first_change(mine, theirs) if theirs else None
        if change:
            if not restart_on_change:
                raise RecipeError(
                    f"`output_dir` holds a run whose {change}; choose another output_dir or pass --restart-on-change to delete that run."
                )
            dist.barrier()  # nobody reads run.json any more
            if self.world.first:
                shutil.rmtree(self.folder)
        if theirs and not change:
            accumulation = theirs["processes"] * theirs["train.gradient_accumulation"] // self.world.size
            dist.barrier()
            return recipe.model_copy(update={"train": recipe.train.model_copy(update={"gradient_accumulation": accumulation})})
        if self.world.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(mine, indent=1))
        dist.barrier()
        return recipe

    def load(self) -> Checkpoint | None:
        """The newest checkpoint. Raises RecipeError when it cannot be read."""
        latest = self.folder / "latest"
        if not latest.exists():
            return None
        tag = latest.read_text().strip()
        try:
            facts = json.loads((self.folder / tag / "state.json").read_text())
            return Checkpoint(facts.pop("step"), load_file(self.folder / tag / "state.safetensors"), facts)
        except (OSError, ValueError, KeyError, SafetensorError):
            raise RecipeError(
                f"The checkpoint {tag} in `output_dir` cannot be read; write an older step-... into the file `latest` there, or delete it "
                "to start over."
            ) from None

    def save(self, engine, step: int, keep: int) -> None:
        """Write a checkpoint, then let `latest` point to it, then delete old ones. All processes must call it."""
        tag = f"step-{step:06d}"
        tensors, facts = training_state(engine)
        if self.world.first:
            with _folder(self.folder / tag) as work:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, work / "state.safetensors")
                (work / "state.json").write_text(json.dumps({"step": step, **facts}) + "\n")
            write_whole(self.folder / "latest", tag)
            for old in sorted(self.folder.glob("step-*"))[:-keep]:
                shutil.rmtree(old)
        dist.barrier()

    def keep_best(self, weights: dict[str, torch.Tensor], config: dict, vocab: DraftVocab, target: Path, step: int, length: float) -> bool:
        """Store a head if its held-out accept length is the longest so far -> whether it was. For the first process."""
        record = self.best / "best.json"
        if record.exists() and json.loads(record.read_text())["accept_length"] >= length:
            return False
        _write_head(self.best, weights, config, vocab, target, {"step": step, "accept_length": length})
        return True


def save_final_head(engine, recipe: Recipe, vocab: DraftVocab, run: RunFolder, world: World) -> None:
    """The trained weights in float32 under SGLang's names, with d2t, t2d and config.json."""
    weights = full_weights(engine)
    if world.first:
        _write_head(run.head, weights, engine.module.head.config.to_json(), vocab, recipe.target)
    dist.barrier()


def _write_head(folder: Path, weights: dict, config: dict, vocab: DraftVocab, target: Path, best: dict | None = None) -> None:
    with _folder(folder) as work:
        state = weights | {"d2t": vocab.d2t_Vd, "t2d": vocab.t2d_V}
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, work / "model.safetensors")
        (work / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (work / "target.json").write_text(json.dumps({"target": str(target)}) + "\n")
        if best:
            (work / "best.json").write_text(json.dumps(best) + "\n")


class _folder:
    """A folder that gets its name when it is whole; one that had the name goes."""

    def __init__(self, folder: Path):
        self.folder, self.work = folder, folder.with_name(f".{folder.name}.tmp")

    def __enter__(self) -> Path:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        return self.work

    def __exit__(self, error, *_):
        if error is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.replace(self.work, self.folder)


def _first_change(mine: dict, theirs: dict) -> str | None:
    """What differs, in words. A field that a run of an older version did not have counts as at its default."""
    known = {**_defaults(), **theirs}
    for name in sorted({*mine, *theirs} - set(GLOBAL_BATCH)):
        if mine.get(name) != known.get(name) and name.split(".")[-1] not in FREE_FIELDS:
            return f"{name} was {known.get(name)!r}, now {mine.get(name)!r}"
    processes, accumulation = (known[name] for name in GLOBAL_BATCH)
    now = [mine[name] for name in GLOBAL_BATCH]
    if now[1] not in (accumulation, processes * accumulation / now[0]):
        return f"{GLOBAL_BATCH[1]} was {accumulation!r}, now {now[1]!r}"
    if processes * accumulation % now[0]:
        return f"processes were {processes} with {accumulation} accumulation step(s), which {now[0]} processes cannot share"
    return None


def _defaults() -> dict:
    sections = {"train": TrainSettings, "head": HeadSettings}
    found = {
        f"{section}.{name}": field.default
        for section, model in sections.items()
        for name, field in model.model_fields.items()
        if not field.is_required()
    }
    return json.loads(json.dumps(found))


def _flat(recipe: Recipe) -> dict:
    """Dotted field -> JSON value, without what may change. Paths count by name only: a moved cache is the same run."""
    flat: dict = {}

    def visit(prefix: str, value) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in FREE_FIELDS:
                    visit(f"{prefix}.{name}" if prefix else name, inner)
        else:
            flat[prefix] = value.name if isinstance(value, Path) else value

    visit("", {name: value for name, value in recipe.model_dump().items() if name in ("target", "head", "train")})
    return json.loads(json.dumps(flat))
