"""TALON on one machine: fetch the target, let it answer prompts, train a draft head, export it, serve it three ways, show its trees.

Each stage is a command of its own (printed by --list) that runs as a subprocess. A stage whose output is up to date is left out; an
interrupted one continues where it was.
"""

import argparse
import json
import signal
import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from eval.stages import Stage, StageError, run_command
from train.data import read_prompts
from train.paths import REPO, cache_dir, write_whole

EXAMPLES = """examples:
  python eval/demo.py                         # everything that is not up to date
  python eval/demo.py --from train            # train again, then everything behind it
  python eval/demo.py --only picture          # one stage
  python eval/demo.py --prompts sharegpt.json # train on other prompts: ShareGPT, UltraChat, JSONL or plain text
  python eval/demo.py --list                  # the commands, without running them
"""
NAMES = ("target", "answers", "train", "export", "serve", "picture", "report")
STARTER = REPO / "train" / "prompts" / "starter.jsonl"
RECIPE = REPO / "recipes" / "smollm2-135m-cpu-quick.yaml"
TRAIN_PROMPTS = 480  # of a prompt file without a split; the demo's time budget is made for about this many
EVAL_PROMPTS = 12
console = Console()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args.prompts, args.recipe = args.prompts.resolve(), args.recipe.resolve()
    folder = cache_dir() / "demo" / args.prompts.stem
    done = f"Everything is in {folder}: report.html, results.json, trees.png and the trained head in head/."

    def make_stages() -> list[Stage]:
        split_prompts(args.prompts, folder)
        return demo_stages(folder, args.recipe)

    return run_command(folder, make_stages, args, console, REPO, done)


def demo_stages(folder: Path, recipe: Path) -> list[Stage]:
    """The seven stages, in order. All of them write below `folder`, but for the target, which every demo shares."""
    python = Path(sys.executable)
    target = cache_dir() / "smollm2-135m-instruct"
    train_prompts, eval_prompts, answers = folder / "prompts-train.jsonl", folder / "prompts-eval.jsonl", folder / "answers.jsonl"
    features, run, head = folder / "features", folder / "run", folder / "head"
    results, trace, picture, page = (folder / name for name in ("results.json", "trace.jsonl", "trees.png", "report.html"))
    places = {"target": target, "answers.prompts": train_prompts, "answers.file": answers, "features.folder": features, "output_dir": run}
    with_recipe = ["--recipe", recipe, *(word for field, place in places.items() for word in ("--set", f"{field}={place}"))]
    draw = [python, "eval/picture.py", "--trace", trace, "--tokenizer", target, "--out", picture]
    answering = ("regenerate", "answers", "answerer", "decoder", "data", "features", "store", "target")
    not_training = {"fetch_target", "regenerate", "answers", "answerer", "answer_server", "decoder", "export"}
    return [
        Stage(
            "target",
            "SmolLM2-135M-Instruct as a Hugging Face folder",
            [python, "train/fetch_target.py"],
            outputs=[target],
            sources=sources("train/fetch_target.py"),
            shared=True,
        ),
        Stage(
            "answers",
            "the target answers the training prompts",
            [python, "train/regenerate.py", *with_recipe],
            outputs=[answers],
            scratch=[features, *folder.glob("answers.jsonl.*")],
            sources=sources(*(f"train/{name}.py" for name in answering)),
            inputs=[recipe, train_prompts],
        ),
        Stage(
            "train",
            "DeepSpeed trains the draft head",
            [python.with_name("deepspeed"), "--log_level", "warning", "train/draft_head.py", *with_recipe],
            outputs=[run],
            sources=[path for path in sources("train/*.py") if path.stem not in not_training],
            inputs=[recipe],
        ),
        Stage(
            "export",
            "the head in the layout that SGLang loads",
            [python, "train/export.py", "--run", run, "--out", head],
            outputs=[head],
            sources=sources("train/export.py", "talon_sglang/draft_head.py"),
        ),
        Stage(
            "serve",
            "three SGLang servers answer held-out prompts in turn",
            [python, "eval/serve.py", "--target", target, "--head", head, "--prompts", eval_prompts]
            + ["--max-new-tokens", "40", "--talon", "16,4", "--eagle3", "4,4,16", "--trace", trace, "--out", results],
            outputs=[results, trace],
            sources=sources(
                "talon_sglang/**/*.py",
                *(f"eval/{name}.py" for name in ("serve", "servers", "client", "prompts", "stats", "results", "table")),
            ),
            inputs=[eval_prompts],
            scratch=[folder / "results"],
            replay=[python, "eval/table.py", results],
        ),
        Stage(
            "picture",
            "the deepest and the widest draft tree of that run",
            draw,
            outputs=[picture],
            sources=sources("eval/picture.py", "eval/trace.py"),
            replay=draw,
        ),
        Stage(
            "report",
            "all of it as one page, with the trees to step through",
            [python, "eval/report.py", results, "--trace", trace, "--target", target, "--out", page],
            outputs=[page],
            sources=sources("eval/report*.py", "eval/report_page/*", "eval/charts.py", "eval/gallery.py"),
        ),
    ]


def sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in REPO.glob(pattern))


def split_prompts(path: Path, folder: Path) -> None:
    """Writes prompts-train.jsonl and prompts-eval.jsonl. A file whose rows carry `split` decides for itself; of others the last rows are
    held out.

    Raises StageError when the file is missing or has too few usable rows.
    """
    if not path.is_file():
        raise StageError(f"--prompts {path} does not exist; pass a prompt file (ShareGPT, UltraChat, JSONL with turns, or plain text).")
    train, held_out = split_by_label(path) or split_by_position(path)
    write_prompts(folder / "prompts-train.jsonl", train)
    write_prompts(folder / "prompts-eval.jsonl", held_out)


def split_by_label(path: Path) -> tuple[list[dict], list[dict]] | None:
    """Rows by their `split` field, the eval rows thinned to EVAL_PROMPTS, each category alike; None where rows have no split."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except ValueError:
        return None
    if not rows or not all(isinstance(row, dict) and row.get("split") in ("train", "eval") for row in rows):
        return None
    held_out = sorted((row for row in rows if row["split"] == "eval"), key=lambda row: row["category"])
    groups = [list(group) for _, group in groupby(held_out, key=lambda row: row["category"])]
    share = max(1, EVAL_PROMPTS // max(1, len(groups)))
    return [row for row in rows if row["split"] == "train"], [row for group in groups for row in group[:share]]


def split_by_position(path: Path) -> tuple[list[dict], list[dict]]:
    prompts = read_prompts(path, TRAIN_PROMPTS + EVAL_PROMPTS)
    if len(prompts) < 2 * EVAL_PROMPTS:
        raise StageError(f"--prompts {path} holds {len(prompts)} usable prompts; the demo needs at least {2 * EVAL_PROMPTS}.")
    rows = [{"id": f"{i:05d}", "category": prompt.category, "turns": prompt.turns} for i, prompt in enumerate(prompts)]
    return rows[:-EVAL_PROMPTS], rows[-EVAL_PROMPTS:]


def write_prompts(path: Path, rows: list[dict]) -> None:
    lines = [json.dumps({key: row[key] for key in ("id", "category", "turns")}, ensure_ascii=False) for row in rows]
    write_whole(path, "\n".join(lines) + "\n")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", choices=NAMES, metavar="STAGE", help=f"run this stage alone, up to date or not: {', '.join(NAMES)}")
    which.add_argument("--from", dest="start", choices=NAMES, metavar="STAGE", help="run this stage and all behind it again")
    parser.add_argument("--prompts", type=Path, default=STARTER, help="training prompts (default: the starter prompts of this repository)")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="training recipe (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the command of each stage and stop")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
