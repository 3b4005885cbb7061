#!/usr/bin/env python3
"""The learning curve of one or more runs: accept length on the held-out conversations against training tokens, as a table and a picture.

Reads the `metrics.jsonl` of a run folder, also while the run goes on. For `chain` and `tree` see docs/training.md, "What is measured".
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

EXAMPLES = """examples:
  python train/learning_curve.py runs/long/run                              # the table
  python train/learning_curve.py runs/a/run runs/b/run --out curve.png      # two runs in one picture
"""


class CurveError(ValueError):
    """One sentence: which folder, what is missing, what to do."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the held-out conversations. chain, tree: accept lengths; accuracy: at depth 1; minutes: since the first row."""

    step: int
    tokens: int
    minutes: float
    accuracy: float
    chain: float | None
    tree: float | None


def read_curve(run: Path) -> list[Evaluation]:
    """The evaluations of a run, in order. Raises CurveError for a folder without any."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        raise CurveError(f"{run} holds no metrics.jsonl; pass the `output_dir` of a recipe that has been run.") from None
    rows = [row for row in map(_parse, lines) if row]
    held_out = [row for row in rows if row.get("held_out")]
    if not held_out:
        raise CurveError(f"{run} holds no evaluation yet; set train.held_out above 0, or wait until step `train.eval_every`.")
    if any("tokens" not in row for row in held_out):
        raise CurveError(f"{run} was written by an older version that did not count tokens; train it again.")
    start = rows[0]["time"]
    return [
        Evaluation(
            row["step"],
            row["tokens"],
            (row["time"] - start) / 60,
            row["accuracy"][0],
            row["accept_length"].get("chain"),
            row["accept_length"].get("tree"),
        )
        for row in held_out
    ]


def _parse(line: str) -> dict | None:
    """A run that is being written may end in half a line."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def table(name: str, curve: list[Evaluation]) -> Table:
    result = Table("step", "tokens", "accuracy at depth 1", "accept length, chain", "accept length, tree", title=name)
    for one in curve:
        lengths = ["" if length is None else f"{length:.3f}" for length in (one.chain, one.tree)]
        result.add_row(str(one.step), f"{one.tokens:,}", f"{one.accuracy:.1%}", *lengths)
    return result


def draw(curves: dict[str, list[Evaluation]], out: Path) -> None:
    """One line per run and kind of round; tokens on a logarithmic axis, as gains come with their doublings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    for place, (name, curve) in enumerate(curves.items()):
        for kind, style in (("chain", "o--"), ("tree", "s-")):
            points = [(one.tokens, getattr(one, kind)) for one in curve if getattr(one, kind) is not None]
            if points:
                panel.plot(*zip(*points), style, color=f"C{place % 10}", label=kind if len(curves) == 1 else f"{name}, {kind}")
    panel.set(xscale="log", xlabel="training tokens", ylabel="accept length, held out", title="Learning curve")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(out)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run (`output_dir` of its recipe)")
    parser.add_argument("--out", type=Path, help="draw the curves here (PNG)")
    args = parser.parse_args()
    try:
        curves = {str(run): read_curve(run) for run in args.runs}
    except CurveError as error:
        sys.exit(f"learning_curve: {error}")
    for name, curve in curves.items():
        Console().print(table(name, curve))
    if args.out:
        draw(curves, args.out)
        print(f"drawn: {args.out}")


if __name__ == "__main__":
    main()
