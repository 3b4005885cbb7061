"""The comparison's table and its JSON file, from what the stages left in their folder."""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.results import machine
from eval.versus.clock import alternating, rate

TITLES = {
    "ours": "ours",
    "same-start": "ours, their start",
    "theirs": "speculators",
    "twice": "ours, twice",
    "theirs-muon": "speculators, Muon",
}
NOTE = (
    "tokens/s: conversation tokens without padding, over the optimiser loop of the full run, its first two steps left out; model load, "
    "hidden states, validation and checkpoints are outside. CPU tokens/s: the same per second of processor time. accept: tokens per target "
    "forward, bonus token included, on held-out prompts."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of eval/vs_speculators.py")
    folder = parser.parse_args().folder
    body = collect(folder)
    temporary = folder / "versus.json.tmp"
    temporary.write_text(json.dumps(body, indent=1) + "\n")
    os.replace(temporary, folder / "versus.json")
    print_table(body, Console(width=max(Console().width, 110)))


def collect(folder: Path) -> dict:
    """Everything that was measured, as one JSON object. Heads and servers that were not measured are left out."""
    heads = {}
    for name in TITLES:
        clock = read(folder / name / "clock.json")
        if clock is None:
            continue
        steps = clock.pop("steps")
        speed = {"tokens_per_s": round(rate(steps), 1), "tokens_per_cpu_s": round(rate(steps, "cpu_s"), 1)}
        counted = {
            "steps": len(steps),
            "tokens": sum(step["tokens"] for step in steps),
            "seconds": round(sum(s["wall_s"] for s in steps), 1),
        }
        heads[name] = {**counted, **speed, **clock, "accept": accept(folder, name), "served": served(folder, name)}
    body = {"facts": read(folder / "facts.json"), "machine": machine(), "heads": heads}
    short = [short_runs(folder, side) for side in ("ours", "theirs")]
    if all(short):
        body["speed"] = {unit: alternating(*short, unit) for unit in ("wall_s", "cpu_s")}
    if {"ours", "theirs"} <= set(heads):
        pair = heads["ours"], heads["theirs"]
        body["ratio"] = {unit: round(pair[0][unit] / pair[1][unit], 3) for unit in ("tokens_per_s", "tokens_per_cpu_s")}
    return body


def short_runs(folder: Path, side: str) -> list[list[dict]]:
    """Steps of each short run, in the order of the rounds."""
    files = sorted(folder.glob(f"speed-{side}-[0-9]*/clock.json"), key=lambda file: int(file.parent.name.rsplit("-", 1)[1]))
    return [read(file)["steps"] for file in files]


def accept(folder: Path, name: str) -> dict[str, dict]:
    """Policy -> accept length over all held-out prompts, and its standard error."""
    found = read(folder / f"accept-{name}.json")
    summary = found["summary"] if found else {}
    return {policy: {key: sets["all"][key] for key in ("accept_length", "standard_error")} for policy, sets in summary.items()}


def served(folder: Path, name: str) -> dict[str, float]:
    """Server -> accept length as that server counted it."""
    found = read(folder / f"served-{name}.json")
    summary = found["summary"] if found else {}
    return {run: sets["all"]["accept_length"] for run, sets in summary.items() if sets["all"].get("accept_length")}


def read(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def print_table(body: dict, console: Console) -> None:
    heads = body["heads"]
    table = Table(title="EAGLE-3 training against speculators 0.9.0", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in heads:
        table.add_column(TITLES[name], justify="right", no_wrap=True)
    for label, key, form in (
        ("optimiser steps", "steps", "{:d}"),
        ("tokens trained on", "tokens", "{:,d}"),
        ("seconds", "seconds", "{:.0f}"),
        ("tokens/s", "tokens_per_s", "{:.0f}"),
        ("CPU tokens/s", "tokens_per_cpu_s", "{:.0f}"),
        ("peak memory, MiB", "peak_mib", "{:,d}"),
    ):
        table.add_row(label, *(form.format(head[key]) for head in heads.values()))
    for policy in dict.fromkeys(policy for head in heads.values() for policy in head["accept"]):
        table.add_row(f"accept, {policy}", *(_length(head["accept"].get(policy)) for head in heads.values()))
    for run in dict.fromkeys(run for head in heads.values() for run in head["served"]):
        table.add_row(f"served, {run}", *(f"{head['served'][run]:.3f}" if run in head["served"] else "" for head in heads.values()))
    console.print(table)
    for unit, name in (("wall_s", "tokens/s"), ("cpu_s", "CPU tokens/s")):
        if "speed" in body:
            found = body["speed"][unit]
            rates = f"ours {found['ours']}, speculators {found['theirs']}"
            console.print(f"short runs in turn, {name}: {rates}, median ratio {found['ratio']:.2f}", highlight=False)
    if "ratio" in body:
        ratio = body["ratio"]
        console.print(f"full runs: ratio {ratio['tokens_per_s']:.2f} ({ratio['tokens_per_cpu_s']:.2f} by processor time)", highlight=False)
    console.print(NOTE, style="dim", highlight=False)


def _length(found: dict | None) -> str:
    if found is None:
        return ""
    error = found["standard_error"]
    return f"{found['accept_length']:.3f}" + (f" ± {error:.3f}" if error is not None else "")


if __name__ == "__main__":
    main()
