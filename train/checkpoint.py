"""The folder of a run: its claim, its checkpoints and the finished head.

run.json         settings and data the run belongs to
step-000200/     a DeepSpeed checkpoint; `latest` names the newest whole one and is replaced in one move
metrics.jsonl    one row per logged step
head/            the finished head in float32: model.safetensors, config.json
"""

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from train.recipe import Recipe, RecipeError
from train.vocab import DraftVocab
from train.world import World

FREE_FIELDS = {"log_every", "eval_every", "save_every", "keep_checkpoints"}  # may change between runs of one folder


class RunFolder:
    def __init__(self, folder: Path, world: World):
        self.folder, self.world = folder, world
        self.head = folder / "head"

    @property
    def finished(self) -> bool:
        return (self.head / "model.safetensors").exists()

    def claim(self, recipe: Recipe, data: str, restart_on_change: bool) -> None:
        """Make the folder this run's, or find that it already is. Raises RecipeError when it is another run's."""
        mine = {**_flat(recipe), "data": data, "processes": self.world.size}
        path = self.folder / "run.json"
        theirs = json.loads(path.read_text()) if path.exists() else None
        # A field that a run of an older version did not have counts as unset.
        changes = sorted(name for name in {*mine, *(theirs or mine)} if mine.get(name) != (theirs or mine).get(name))
        if changes:
            changed = changes[0]
            if not restart_on_change:
                raise RecipeError(
                    f"`output_dir` holds a run whose {changed} was {theirs.get(changed)!r}, now {mine.get(changed)!r}; "
                    "choose another output_dir or pass --restart-on-change to delete that run."
                )
            dist.barrier()  # nobody reads run.json any more
            if self.world.first:
                shutil.rmtree(self.folder)
        if self.world.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(mine, indent=1))
        dist.barrier()

    def load(self, engine) -> int:
        """Restore the newest checkpoint -> the step it was taken after, 0 without one."""
        latest = self.folder / "latest"
        if not latest.exists():
            return 0
        tag = latest.read_text().strip()
        path, state = engine.load_checkpoint(str(self.folder), tag=tag, load_lr_scheduler_states=False)
        if path is None:
            raise RecipeError(f"The checkpoint {tag} in `output_dir` cannot be read; delete the file `latest` there to start over.")
        return int(state["step"])

    def save(self, engine, step: int, keep: int) -> None:
        """Write a checkpoint, then let `latest` point to it, then delete old ones."""
        tag = f"step-{step:06d}"
        engine.save_checkpoint(str(self.folder), tag=tag, client_state={"step": step}, save_latest=False)
        dist.barrier()
        if self.world.first:
            _write(self.folder / "latest", tag)
            for old in sorted(self.folder.glob("step-*"))[:-keep]:
                shutil.rmtree(old)
        dist.barrier()


def save_final_head(engine, recipe: Recipe, vocab: DraftVocab, run: RunFolder, world: World) -> None:
    """The trained weights in float32 under SGLang's names, with d2t, t2d and config.json."""
    state = _full_precision_state(engine, recipe.train.zero_stage)
    if world.first:
        state |= {"d2t": vocab.d2t_Vd, "t2d": vocab.t2d_V}
        work = run.folder / ".head.tmp"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, work / "model.safetensors")
        config = engine.module.head.config.to_json()
        (work / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (work / "target.json").write_text(json.dumps({"target": str(recipe.target)}) + "\n")
        os.replace(work, run.head)
    dist.barrier()


def _full_precision_state(engine, zero_stage: int) -> dict[str, torch.Tensor]:
    """The float32 master weights where DeepSpeed keeps some, else the module's own. All processes must call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = dict(engine.module.head.named_parameters())
    state = {}
    for name, parameter in named.items():
        master = safe_get_full_fp32_param(parameter) if zero_stage else None
        state[name] = (parameter if master is None else master).detach().float().cpu().clone()
    return state


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


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
