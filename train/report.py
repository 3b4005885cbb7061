"""Progress on the console, metrics.jsonl, TensorBoard and, if asked for, Weights & Biases. Only the first process writes.

Shape suffix: K training-time-test steps.
"""

import importlib.util
import json
import resource
import sys
import time
import uuid

import torch
from torch.utils.tensorboard import SummaryWriter

from train.evaluation import HeldOut
from train.progress import progress_bar
from train.recipe import Recipe, RecipeError
from train.world import World


def check_trackers(recipe: Recipe) -> None:
    """Raises RecipeError when the recipe asks for a tracker that is not installed."""
    if recipe.train.wandb and importlib.util.find_spec("wandb") is None:
        raise RecipeError(f"`train.wandb` is {recipe.train.wandb!r}, but the package wandb is not installed; pip install wandb first.")


class Reporter:
    """Collects optimiser steps and writes one row per `log_every` of them. Rows beyond the resumed step are dropped first.

    `done` of `total` steps, with `seen` tokens, were trained before.
    """

    def __init__(self, run, recipe: Recipe, world: World, done: int, total: int, seen: int = 0):
        self.run, self.recipe, self.world, self.done, self.total, self.seen = run, recipe, world, done, total, seen
        self.first, self.every = world.first, recipe.train.log_every
        self.sums, self.tokens, self.seconds, self.text, self.wandb = None, 0, 0.0, "", None

    def __enter__(self):
        if self.first:
            path = self.run.folder / "metrics.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            kept = [line for line in lines if _step_of(line) is not None and _step_of(line) <= self.done]
            path.write_text("".join(line + "\n" for line in kept))
            self.file = open(path, "a")
            self.board = SummaryWriter(self.run.folder / "tensorboard", purge_step=self.done + 1)
            if self.recipe.train.wandb:
                self.wandb = _start_wandb(self.recipe, self.run.folder)
            self.bar = progress_bar("training steps", self.total, self.done)
            self.advance = self.bar.__enter__()
        return self

    def __exit__(self, *error):
        if self.first:
            self.file.close()
            self.board.close()
            if self.wandb:
                self.wandb.finish()
            return self.bar.__exit__(*error)

    def train(self, step: int, table_5K: torch.Tensor, rate: float, tokens: int, seconds: float) -> None:
        """`table_5K`: see `StepSums.table`, summed over the optimiser step; `tokens`: of all processes."""
        self.sums = table_5K if self.sums is None else self.sums + table_5K
        self.seen, self.tokens, self.seconds = self.seen + tokens, self.tokens + tokens, self.seconds + seconds
        if self.first and (step % self.every == 0 or step == self.total):
            speed = round(self.tokens / self.seconds, 1)
            row = {"step": step, "learning_rate": rate, **_means(self.sums), "tokens_per_second": speed}
            self._write({**row, "memory_gib": round(peak_memory(self.world.device) / 2**30, 3)})
            self.text = f"loss {row['loss'][0]:.3f}, accuracy by depth {_percent(row['accuracy'])}, {speed:.0f} tokens/s"
        if step % self.every == 0:
            self.sums, self.tokens, self.seconds = None, 0, 0.0
        if self.first:
            self.advance(1, self.text)

    def held_out(self, step: int, found: HeldOut) -> None:
        """For the first process."""
        row = {"step": step, "held_out": True, **_means(found.table_5K)}
        lengths = {"chain": found.chain.accept_length, "tree": found.tree.accept_length}
        row["accept_length"] = {name: round(length, 4) for name, length in lengths.items() if length is not None}
        self._write(row)
        words = ", ".join(f"{name} {length:.2f}" for name, length in row["accept_length"].items())
        print(
            f"held out after step {step}: loss {row['loss'][0]:.3f}, accuracy by depth {_percent(row['accuracy'])}, accept length {words}",
            flush=True,
        )

    def _write(self, row: dict) -> None:
        self.file.write(json.dumps({**row, "tokens": self.seen, "time": round(time.time(), 1)}) + "\n")
        self.file.flush()
        part = "held_out" if row.get("held_out") else "train"
        scalars = {}
        for name in ("loss", "accuracy", "conditional_accuracy"):
            scalars |= {f"{part}/{name}_{depth}": value for depth, value in enumerate(row[name]) if value is not None}
        scalars |= {f"{part}/accept_length_{name}": value for name, value in row.get("accept_length", {}).items()}
        scalars |= {f"{part}/{name}": row[name] for name in ("learning_rate", "tokens_per_second", "memory_gib") if name in row}
        for name, value in scalars.items():
            self.board.add_scalar(name, value, row["step"])
        if self.wandb:
            self.wandb.log(scalars, step=row["step"])


def peak_memory(device: torch.device) -> int:
    """Bytes this process had at most so far: of the GPU where there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _start_wandb(recipe: Recipe, folder):
    """One wandb run for one run folder, also when training is resumed. WANDB_MODE=offline keeps it on this machine."""
    import wandb

    record = folder / "wandb-id"
    if not record.exists():
        record.write_text(uuid.uuid4().hex[:12])
    settings = recipe.model_dump(mode="json")
    return wandb.init(project=recipe.train.wandb, name=folder.name, id=record.read_text(), resume="allow", dir=str(folder), config=settings)


def _means(table_5K: torch.Tensor) -> dict:
    """`conditional_accuracy` at a depth is null where no position came so far."""
    loss_K, hits_K, positions_K, reached_K, passed_K = table_5K.tolist()
    divisors = [max(count, 1) for count in positions_K]
    return {
        "loss": [round(loss / count, 5) for loss, count in zip(loss_K, divisors)],
        "accuracy": [round(hits / count, 5) for hits, count in zip(hits_K, divisors)],
        "conditional_accuracy": [round(passed / count, 5) if count else None for passed, count in zip(passed_K, reached_K)],
    }


def _percent(shares: list[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def _step_of(line: str) -> int | None:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return None
