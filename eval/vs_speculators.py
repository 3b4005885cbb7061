"""This toolkit against speculators 0.9.0, side by side: training speed, and how many tokens a round yields with either head.

Both train an EAGLE-3 head for SmolLM2 on the same conversations and hidden states, with the same head size, draft vocabulary size, unroll
length and number of optimiser steps, on the same threads. speculators lives in an environment of its own, which this script creates. What
is equal and what is not: docs/versus.md. Each stage is a command of its own (--list); finished stages are not repeated.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from eval.demo import write_prompts
from eval.serve import positive
from eval.stages import Stage, run_command
from train.paths import REPO, cache_dir

EXAMPLES = """examples:
  python eval/vs_speculators.py                                  # everything that is not up to date
  python eval/vs_speculators.py --list                           # the commands, without running them
  python eval/vs_speculators.py --only theirs                    # one stage, again
  python eval/vs_speculators.py --answers answers.jsonl --serve  # answers that train/regenerate.py wrote; real servers as well
"""
STARTER = REPO / "train" / "prompts" / "starter.jsonl"
RECIPE = REPO / "recipes" / "smollm2-135m-cpu-quick.yaml"
ROUND_CONVERSATIONS = 20  # of a short run of the alternating speed measurement
EVERY = 10**6  # nothing but the last step validates or writes a checkpoint
POLICIES = ("talon:16,4", "chain:4")
HEADS = {
    "ours": "this toolkit, its defaults",
    "same-start": "this toolkit, from the random head that speculators starts from",
    "theirs": "speculators 0.9.0 with AdamW",
}
TWICE = {"twice": "this toolkit, its defaults, twice the epochs"}  # how far it comes in the time that speculators takes
MUON = {"theirs-muon": "speculators 0.9.0 with Muon, its default"}  # with --muon
# SGLang cannot serve a head trained with norm_before_residual. Flex attention and fused losses want a GPU.
THEIR_FLAGS = ["--speculator-type", "eagle3", "--no-norm-before-residual", "--draft-attn-impl", "sdpa", "--loss-implementation", "eager"]
THEIR_FLAGS += ["--hidden-states-dtype", "float32"]
console = Console()


@dataclass(frozen=True)
class Size:
    """What both sides share. `length`: tokens of a conversation at most, and of a batch. The number of steps follows from our batches."""

    conversations: int
    length: int
    epochs: int
    ttt_steps: int
    draft_vocab: int
    rounds: int  # of the alternating speed measurement


@dataclass(frozen=True)
class Places:
    """Every file of a comparison."""

    folder: Path
    venv: Path
    target: Path
    answers: Path
    prompts: Path  # held out
    limit: int  # prompts of each set

    @property
    def their_python(self) -> Path:
        return self.venv / "bin" / "python"

    def head(self, name: str) -> Path:
        return self.folder / name / "head"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update(OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads), TOKENIZERS_PARALLELISM="false")
    size = Size(args.conversations, args.length, args.epochs, args.ttt_steps, args.draft_vocab, args.rounds)
    folder = args.folder.resolve()
    answers = args.answers.resolve() if args.answers else folder / "answers.jsonl"
    prompts = args.prompts.resolve() if args.prompts else folder / "prompts-eval.jsonl"
    venv = (args.venv or folder / "venv").absolute()
    places = Places(folder, venv, cache_dir() / "smollm2-135m-instruct", answers, prompts, args.limit)

    def make_stages() -> list[Stage]:
        for name, rows in zip(("train", "eval"), split_starter()):
            write_prompts(folder / f"prompts-{name}.jsonl", rows)
        return all_stages(places, size, own_answers=args.answers is None, servers=args.serve, muon=args.muon)

    return run_command(folder, make_stages, args, console, REPO)


def split_starter() -> tuple[list[dict], list[dict]]:
    """The starter prompts to train on, and those held out."""
    rows = [json.loads(line) for line in STARTER.read_text().splitlines()]
    return [row for row in rows if row["split"] == "train"], [row for row in rows if row["split"] == "eval"]


# ------------------------------------------------------------ stages


def all_stages(places: Places, size: Size, own_answers: bool, servers: bool, muon: bool) -> list[Stage]:
    stages = data_stages(places, size, own_answers) + training_stages(places, size)
    stages += [accept_stage(places, name) for name in HEADS]
    stages.append(trained(places, "twice", TWICE["twice"], ours(places, replace(size, epochs=2 * size.epochs), "twice")))
    stages += [exporting_stage(places, "twice"), accept_stage(places, "twice")]
    for name in MUON if muon else ():
        stages.append(trained(places, name, MUON[name], theirs(places, size, name)))
        stages += [exporting_stage(places, name), accept_stage(places, name)]
    stages += [served_stage(places, name) for name in ("ours", "theirs") if servers]
    command = [sys.executable, "eval/versus/report.py", places.folder]
    inputs = [path for stage in stages for path in stage.outputs if path.suffix == ".json"]
    return [
        *stages,
        Stage("report", "one table, one JSON file", command, [places.folder / "versus.json"], source("report"), inputs, replay=command),
    ]


def data_stages(places: Places, size: Size, own_answers: bool) -> list[Stage]:
    python, here, target = sys.executable, places.folder, places.target
    data, order = here / "theirs-data", here / "theirs-data" / "order.jsonl"
    answer = [python, "train/regenerate.py", "--recipe", RECIPE, "--set", f"target={target}", "--set", f"answers.file={places.answers}"]
    answer += ["--set", f"answers.prompts={here / 'prompts-train.jsonl'}"]
    rows = [python, "eval/versus/data.py", "rows", "--target", target, "--answers", places.answers, "--out", here / "rows.jsonl"]
    rows += ["--limit", str(size.conversations), "--length", str(size.length)]
    prepare = [places.their_python, "eval/versus/theirs.py", "prepare", "--target", target, "--rows", here / "rows.jsonl", "--out", data]
    prepare += ["--length", str(size.length)]
    features = [python, "eval/versus/data.py", "features", "--target", target, "--order", order, "--folder", here]
    features += ["--length", str(size.length), "--epochs", str(size.epochs), "--short", str(ROUND_CONVERSATIONS)]
    made = [here / "features", here / "train.jsonl", here / "short.jsonl", here / "facts.json"]
    stages = [
        Stage("target", "SmolLM2-135M-Instruct", [python, "train/fetch_target.py"], [target], shared=True),
        Stage(
            "install",
            "speculators 0.9.0 in its own environment",
            [python, "eval/versus/install.py", places.venv],
            [places.venv],
            shared=True,
        ),
        Stage("answers", "the target answers prompts", answer, [places.answers], inputs=[RECIPE, here / "prompts-train.jsonl"]),
        Stage("rows", "token ids and loss masks", rows, [here / "rows.jsonl"], inputs=[places.answers]),
        Stage("prepare", "speculators prepare-data", prepare, [data], inputs=[here / "rows.jsonl"]),
        Stage("features", "hidden states for both", features, made, source("data"), scratch=[data / "hidden_states"]),
    ]
    return [stage for stage in stages if own_answers or stage.name != "answers"]


def training_stages(places: Places, size: Size) -> list[Stage]:
    """Short runs in turn for the speed, then the runs whose heads are measured."""
    stages = []
    for number in range(1, size.rounds + 1):
        for side in ("ours", "theirs"):
            name = f"speed-{side}-{number}"
            command = (ours if side == "ours" else theirs)(places, size, name, short=True)
            stages.append(trained(places, name, f"{HEADS[side]}, short run {number} of {size.rounds}", command))
    stages.append(trained(places, "ours", HEADS["ours"], ours(places, size, "ours")))
    stages.append(trained(places, "theirs", HEADS["theirs"], theirs(places, size, "theirs")))
    start = theirs(places, size, "start") + ["--dry-run", "--no-norm-before-fc", "--no-norm-output"]
    stages.append(Stage("start", "the random head that speculators starts from", start, [places.folder / "start"], source("theirs")))
    same = ours(places, size, "same-start") + ["--set", f"head.start_from={places.folder / 'start' / 'raw'}"]
    stages.append(trained(places, "same-start", HEADS["same-start"], same))
    return stages + [exporting_stage(places, name) for name in HEADS]


def trained(places: Places, name: str, what: str, command: list) -> Stage:
    here = places.folder / name
    code = [*source("theirs" if "theirs" in name else "ours"), *source("clock")]
    return Stage(name, what, command, [here / "clock.json"], code, [RECIPE], scratch=[here / "run", here / "raw"])


def ours(places: Places, size: Size, name: str, short: bool = False) -> list:
    here = places.folder / name
    settings = {
        "target": places.target,
        "answers.file": places.folder / ("short.jsonl" if short else "train.jsonl"),
        "features.folder": places.folder / "features",
        "features.dtype": "bf16",
        "output_dir": here / "run",
        "head.draft_vocab_size": size.draft_vocab,
        "train.ttt_steps": size.ttt_steps,
        "train.epochs": 1 if short else size.epochs,
        "train.micro_batch_tokens": size.length,
        "train.max_length": size.length,
        "train.held_out": 0,
        "train.eval_every": EVERY,
        "train.save_every": EVERY,
    }
    words = [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
    return [sys.executable, "eval/versus/ours.py", "--recipe", RECIPE, "--clock", here / "clock.json", *words]


def theirs(places: Places, size: Size, name: str, short: bool = False) -> list:
    here = places.folder / name
    command = [places.their_python, "eval/versus/theirs.py", "train", "--data", places.folder / "theirs-data", "--out", here / "raw"]
    command += ["--length", str(size.length), "--facts", places.folder / "facts.json", "--clock", here / "clock.json"]
    command += ["--short"] if short else []
    flags = ["--verifier-name-or-path", places.target, "--draft-vocab-size", str(size.draft_vocab), "--ttt-steps", str(size.ttt_steps)]
    return [*command, "--", *THEIR_FLAGS, *flags, "--optimizer", "muon" if name == "theirs-muon" else "adamw"]


def exporting_stage(places: Places, name: str) -> Stage:
    here = places.folder / name
    command = [sys.executable, "train/export.py", "--run", here / "run", "--out", here / "head", "--target", places.target]
    if name.startswith("theirs"):
        command = [sys.executable, "train/doctor.py", here / "raw", "--target", places.target, "--fix", here / "head"]
        command += ["--norm-output", "true", "--aux-ids-are", "inputs"]
    return Stage(f"export-{name}", "in the layout that SGLang loads", command, [places.head(name)])


def accept_stage(places: Places, name: str) -> Stage:
    out = places.folder / f"accept-{name}.json"
    command = [sys.executable, "eval/accept.py", *held_out(places, name), "--out", out]
    command += [word for policy in POLICIES for word in ("--policy", policy)]
    return Stage(f"accept-{name}", "accept length on held-out prompts", command, [out], inputs=[places.prompts])


def served_stage(places: Places, name: str) -> Stage:
    out = places.folder / f"served-{name}.json"
    command = [sys.executable, "eval/versus/served.py", *held_out(places, name), "--out", out, "--talon", "16,4"]
    return Stage(f"served-{name}", "a TALON server on the same prompts", command, [out], source("served"), [places.prompts])


def held_out(places: Places, name: str) -> list:
    prompts = ["--prompts", places.prompts, "--limit", str(places.limit)]
    return ["--target", places.target, "--head", places.head(name), *prompts]


def source(name: str) -> list[Path]:
    return [REPO / "eval" / "versus" / f"{name}.py"]


# ------------------------------------------------------------ the command


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", metavar="STAGE", help="run this stage alone, up to date or not (--list names them)")
    which.add_argument("--from", dest="start", metavar="STAGE", help="run this stage and all behind it again")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "versus", help="where everything is written (default: cache/versus)")
    parser.add_argument("--venv", type=Path, help="environment of speculators, made if absent (default: venv in that folder)")
    parser.add_argument("--answers", type=Path, help="answers of the target to train on (default: it answers the starter prompts)")
    parser.add_argument("--prompts", type=Path, help="held-out prompts, a file or a folder (default: the starter prompts marked eval)")
    parser.add_argument("--limit", type=positive, default=6, help="held-out prompts of each set")
    parser.add_argument("--conversations", type=positive, default=100)
    parser.add_argument("--length", type=positive, default=512, help="tokens of a conversation at most, and of a batch")
    parser.add_argument("--epochs", type=positive, default=2)
    parser.add_argument("--ttt-steps", type=positive, default=3)
    parser.add_argument("--draft-vocab", type=positive, default=8192)
    parser.add_argument("--rounds", type=positive, default=2, help="short runs of each side, in turn, for the speed")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--serve", action="store_true", help="measure on real SGLang servers too (minutes for each head)")
    parser.add_argument("--muon", action="store_true", help="train speculators with Muon too, its default, which is slow on a CPU")
    parser.add_argument("--list", action="store_true", help="print the command of each stage and stop")
    args = parser.parse_args(argv)
    names = [stage.name for stage in all_stages(Places(*[Path()] * 5, 1), Size(*[1] * 5, args.rounds), True, True, True)]
    for chosen in (args.only, args.start):
        if chosen and chosen not in names:
            parser.error(f"{chosen} is not a stage; choose one of {', '.join(names)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
