"""Prints a results file of eval/serve.py: one table a load, in it one block per prompt set and one row per server."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.results import ResultsError, read_results

EXAMPLES = """examples:
  python eval/table.py results.json
"""
NOTE = (
    "accept: tokens per target forward, bonus token included, as SGLang counts it. drafts: draft forwards per round, the extend forward "
    "included. = plain: share of prompts whose output ids equal those of plain. x plain, x EAGLE3 (of the same N): speed per token, median "
    "over prompts of the ratio of each prompt's own times, [95 % bootstrap interval]."
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON file written by eval/serve.py --out")
    args = parser.parse_args(argv)
    try:
        print_table(read_results(args.results), Console())
    except ResultsError as error:
        print(str(error), file=sys.stderr)
        return 1
    return 0


def print_table(body: dict, console: Console) -> None:
    """body: the parsed results file, with its summaries."""
    settings = body["settings"]
    for load in body["loads"].values():
        title = (
            f"{settings['target']['name']}, head {settings['head']['name']}, {settings['dtype']}, {settings['max_new_tokens']} new tokens, "
            f"{load['concurrency']} at a time, temperature {load['temperature']:g}"
        )
        print_load(title, load["summary"], console)
    console.print(Text(NOTE, style="dim"))


def print_load(title: str, figures: dict, console: Console) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("server", no_wrap=True)
    for name in ("tok/s", "accept", "drafts", "= plain", "x plain", "x EAGLE3"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    sets = [name for name in dict.fromkeys(name for by_set in figures.values() for name in by_set) if name != "all"]
    for name in [*sets, "all"] if len(sets) > 1 else sets:
        rows = [(run, by_set[name]) for run, by_set in figures.items() if name in by_set]
        table.add_section()
        table.add_row(f"{name} ({rows[0][1]['prompts']})", style="bold")
        for run, figure in rows:
            table.add_row(f"  {run}", *cells(run, figure))
    console.print(table)
    for run, by_set in figures.items():
        for sentence in comparisons(run, by_set["all"]):
            console.print(sentence, highlight=False)


def cells(run: str, figure: dict) -> list[str]:
    return [
        f"{figure['tokens_per_s']:.1f}",
        number(figure["accept_length"], "{:.2f}"),
        number(figure["draft_forwards_per_round"], "{:.2f}"),
        number(figure["same_as_plain"], "{:.0%}") if run != "plain" else "",
        number((figure["faster_than_plain"] or {}).get("value"), "{:.2f}"),
        " ".join(number(ratio["value"], "{:.2f}") for ratio in figure.get("faster_than_eagle3", {}).values()),
    ]


def comparisons(run: str, figure: dict) -> list[str]:
    """One sentence for each server that `run` is held against over all prompts, one for its latencies, one for degraded rounds."""
    sentences = []
    total = {"plain": figure["more_than_plain"], **figure.get("more_than_eagle3", {})}
    for base, one in {"plain": figure["faster_than_plain"], **figure.get("faster_than_eagle3", {})}.items():
        if one:
            all_together = f"{interval(total[base])} times its tokens per second"
            when = "" if one["in_turn"] else "; not measured in turn"
            sentences.append(f"{run} against {base}: {interval(one)} times the speed ({one['count']} prompts), {all_together}{when}")
    if times := figure["latency"]:
        between = f", {times['token'][0]:.0f} ms between tokens (99 %: {times['token'][2]:.0f})" if times["token"] else ""
        sentences.append(f"{run}: {times['first'][0]:.0f} ms to the first token (95 %: {times['first'][1]:.0f}){between}")
    if figure["degraded_rounds"]:
        sentences.append(f"{run}: {figure['degraded_rounds']:.0f} request-rounds fell back to plain decoding (draft scores not finite)")
    return sentences


def interval(ratio: dict) -> str:
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


if __name__ == "__main__":
    sys.exit(main())
