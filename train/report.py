"""Progress on the console, metrics.jsonl and TensorBoard. Only the first process writes.

Shape suffix: K training-time-test steps.
"""

import json
import time

import torch
from torch.utils.tensorboard import SummaryWriter

from train.progress import progress_bar
from train.world import World


class Reporter:
    """Collects optimiser steps and writes one row per `every` of them. Rows beyond the resumed step are dropped first."""

    def __init__(self, run, world: World, done: int, total: int, every: int):
        self.run, self.first, self.done, self.total, self.every = run, world.first, done, total, every
        self.sums, self.tokens, self.seconds = None, 0, 0.0

    def __enter__(self):
        if self.first:
            path = self.run.folder / "metrics.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            kept = [line for line in lines if _step_of(line) is not None and _step_of(line) <= self.done]
            path.write_text("".join(line + "\n" for line in kept))
            self.file = open(path, "a")
            self.board = SummaryWriter(self.run.folder / "tensorboard", purge_step=self.done + 1)
            self.bar = progress_bar("training steps", self.total, self.done)
            self.advance = self.bar.__enter__()
        return self

    def __exit__(self, *error):
        if self.first:
            self.file.close()
            self.board.close()
            return self.bar.__exit__(*error)

    def train(self, step: int, sums_3K: torch.Tensor, rate: float, tokens: int, seconds: float) -> None:
        """`sums_3K`: loss, hits and positions per training-time-test step, summed over the optimiser step."""
        self.sums = sums_3K if self.sums is None else self.sums + sums_3K
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        text = ""
        if self.first and (step % self.every == 0 or step == self.total):
            row = {"step": step, "learning_rate": rate, **_means(self.sums), "tokens_per_second": round(self.tokens / self.seconds, 1)}
            self._write(row)
            text = f"loss {row['loss'][0]:.3f}, accuracy by depth {_percent(row['accuracy'])}, {row['tokens_per_second']:.0f} tokens/s"
        if step % self.every == 0:
            self.sums, self.tokens, self.seconds = None, 0, 0.0
        if self.first:
            self.text = text or getattr(self, "text", "")
            self.advance(1, self.text)

    def held_out(self, step: int, sums_3K: torch.Tensor | None) -> None:
        if self.first and sums_3K is not None:
            means = _means(sums_3K)
            self._write({"step": step, "held_out": True, **means})
            print(f"held out after step {step}: loss {means['loss'][0]:.3f}, accuracy by depth {_percent(means['accuracy'])}", flush=True)

    def _write(self, row: dict) -> None:
        self.file.write(json.dumps({**row, "time": round(time.time(), 1)}) + "\n")
        self.file.flush()
        part = "held_out" if row.get("held_out") else "train"
        for name in ("loss", "accuracy"):
            for depth, value in enumerate(row[name]):
                self.board.add_scalar(f"{part}/{name}_{depth}", value, row["step"])
        if "learning_rate" in row:
            self.board.add_scalar("train/learning_rate", row["learning_rate"], row["step"])


def _means(sums_3K: torch.Tensor) -> dict:
    loss_K, hits_K, positions_K = sums_3K.tolist()
    divisors = [max(count, 1) for count in positions_K]
    return {
        "loss": [round(loss / count, 5) for loss, count in zip(loss_K, divisors)],
        "accuracy": [round(hits / count, 5) for hits, count in zip(hits_K, divisors)],
    }


def _percent(shares: list[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def _step_of(line: str) -> int | None:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return None
