"""speculators' own commands, run in its own environment (eval/versus/install.py), with a clock around each optimiser step.

  prepare   `speculators prepare-data` on pre-tokenised rows, then the order in which it keeps them
  train     `speculators train`; what follows `--` goes to it unchanged

speculators 0.9.0 takes for granted that there is an accelerator. On a CPU three things are exchanged before it starts: the device number
becomes the device `cpu`, autocast is asked for the CPU, and waiting for the accelerator is left out. A fourth helps its speed: PyTorch's
Muon multiplies in bf16, which a CPU without such units does tens of times slower than in fp32, so it gets fp32.
"""

import argparse
import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.versus.clock import Clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("--target", required=True)
    one.add_argument("--rows", type=Path, required=True, help="JSONL with input_ids and loss_mask")
    one.add_argument("--length", type=int, required=True)
    one.add_argument("--out", type=Path, required=True, help="data folder of speculators; order.jsonl is written beside its files")
    two = commands.add_parser("train")
    two.add_argument("--data", type=Path, required=True)
    two.add_argument("--length", type=int, required=True, help="tokens of a packed batch")
    two.add_argument("--facts", type=Path, required=True, help="JSON with `steps` and `short_steps`, the optimiser steps to make")
    two.add_argument("--short", action="store_true", help="make `short_steps`")
    two.add_argument("--clock", type=Path, required=True, help="JSON file to write: tokens and seconds of each step")
    two.add_argument("--out", type=Path, required=True, help="folder for the head")
    two.add_argument("rest", nargs="*", help="for speculators; with --dry-run it only writes the head that it would start from")
    args = parser.parse_args()
    prepare(args) if args.command == "prepare" else train(args)


def prepare(args: argparse.Namespace) -> None:
    from datasets import load_from_disk
    from speculators.cli import app
    from typer.testing import CliRunner

    shutil.rmtree(args.out, ignore_errors=True)
    words = ["prepare-data", "--model", args.target, "--data", str(args.rows), "--output", str(args.out), "--seq-length", str(args.length)]
    words += ["--num-preprocessing-workers", "1", "--no-skip-token-freq"]
    result = CliRunner().invoke(app, words)
    if result.exit_code:
        sys.exit(f"vs_speculators: speculators prepare-data failed: {result.output[-2000:]} {result.exception!r}")
    rows = load_from_disk(str(args.out)).with_format(None)
    with open(args.out / "order.jsonl.tmp", "w") as file:
        file.writelines(json.dumps({"input_ids": list(row["input_ids"]), "loss_mask": list(row["loss_mask"])}) + "\n" for row in rows)
    os.replace(args.out / "order.jsonl.tmp", args.out / "order.jsonl")


def train(args: argparse.Namespace) -> None:
    for_cpu()
    lengths = [len(json.loads(line)["input_ids"]) for line in open(args.data / "order.jsonl")]
    ratio = (len(lengths) - 0.5) / len(lengths)  # it insists on a validation set: the last conversation
    work = args.out.with_name(f".{args.out.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    words = [*args.rest, "--data-path", str(args.data), "--total-seq-len", str(args.length), "--train-data-ratio", str(ratio)]
    words += ["--on-missing", "raise", "--num-workers", "0", "--no-resume-from-checkpoint", "--save-path", str(work)]
    words += ["--log-dir", str(work / "logs")]
    steps = json.loads(args.facts.read_text())["short_steps" if args.short else "steps"]
    words += ["--max-steps", str(steps), "--epochs", str(epochs_for(steps, lengths[:-1], args.length))]
    clock = Clock()
    time_steps(clock, lengths)
    call(words)
    keep_head(work, args.out)
    clock.write(args.clock, **{name: metadata.version(name) for name in ("torch", "transformers", "speculators")})


def call(words: list[str]) -> None:
    from speculators.train.cli import main as run
    from speculators.train.config import TrainConfig

    run(TrainConfig.resolve(words))


def for_cpu() -> None:
    import torch
    from speculators.train import trainer

    if torch.accelerator.is_available():
        return
    set_up = trainer.Trainer.setup_trainer

    def setup_trainer(self):
        self.device_type = "cpu"
        set_up(self)

    trainer.get_local_rank = lambda: torch.device("cpu")
    trainer.Trainer.setup_trainer = setup_trainer
    torch.accelerator.synchronize = lambda *_: None
    muon_in_fp32()


def muon_in_fp32() -> None:
    from unittest.mock import patch

    import torch
    from torch.optim import _muon

    in_bf16 = _muon._zeropower_via_newtonschulz

    def in_fp32(*args, **kwargs):
        with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.detach().clone().float()):
            return in_bf16(*args, **kwargs)

    _muon._zeropower_via_newtonschulz = in_fp32


def epochs_for(steps: int, lengths: list[int], budget: int) -> int:
    """Epochs that its packing needs for so many steps (it would otherwise add a step in every epoch beyond --max-steps)."""
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    sampler = MultipackDistributedBatchSamplerV2(budget, lengths, 1, 0, seed=42)
    done = epoch = 0
    while done < steps:
        done += len(sampler._generate_batches(epoch))
        epoch += 1
    return epoch


def time_steps(clock: Clock, lengths: list[int]) -> None:
    """Its trainer offers a callback after each step; which conversations a step holds, its sampler tells."""
    from speculators.train.trainer import Trainer

    epoch_of = Trainer.train_epoch

    def train_epoch(self, epoch, **_):
        batches = iter(self.train_loader.batch_sampler._generate_batches(epoch))
        clock.resume()
        epoch_of(self, epoch, step_callback=lambda: clock.tick(sum(lengths[row] for row in next(batches))))

    Trainer.train_epoch = train_epoch


def keep_head(work: Path, out: Path) -> None:
    """The last checkpoint's head, without optimiser state."""
    epochs = [folder for folder in work.iterdir() if folder.name.isdigit() and not folder.is_symlink()]
    last = max(epochs, key=lambda folder: int(folder.name), default=work)
    shutil.rmtree(out, ignore_errors=True)
    ready = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(last / name, ready / name)
    os.replace(ready, out)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
