"""The findings of train/lint.py on a terminal and as JSON."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from train.reasons import FATES, REASONS

EXAMPLES = 5  # rows named for each reason
FATE_STYLE = {"kept": "green", "repaired": "cyan", "shortened": "yellow", "dropped": "red"}
TRAINED, CONTEXT = "black on green", "dim"


def print_report(finding, listed: list[str], tolerance: float) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(
        f"{finding.file}: {finding.report.rows} rows read, {finding.report.kept} kept, {finding.report.dropped} dropped", highlight=False
    )
    console.print(reason_table(finding, listed))
    console.print(Text(sentence(finding)), soft_wrap=True)
    for preview in finding.previews:
        console.print(Text(f"\nrow {preview.number}, {preview.outcome.fate} ({preview.outcome.code}); trained tokens are marked", "bold"))
        console.print(mask_text(preview))
    console.print(Text(verdict(finding, tolerance), "bold"))


def reason_table(finding, listed: list[str]) -> Table:
    table = Table("outcome", "reason", "rows", "what it means", "which rows", title_justify="left")
    for fate in FATES:
        for code, count in finding.report.by_fate(fate).items():
            which = which_rows(finding, fate, code, None if {code, "all"} & set(listed) else EXAMPLES)
            table.add_row(Text(fate, FATE_STYLE[fate]), code, str(count), REASONS[code], which)
    table.add_section()
    table.add_row("sum", "", str(sum(finding.report.outcomes.values())), f"of {finding.report.rows} rows read", "")
    for code, count in sorted(finding.report.also.items()):
        which = which_rows(finding, "also", code, None if {code, "all"} & set(listed) else EXAMPLES)
        table.add_row("also", code, str(count), REASONS[code] + " (in rows counted above)", which)
    return table


def which_rows(finding, fate: str, code: str, most: int | None) -> str:
    numbers = finding.numbers.get(fate, {}).get(code, [])
    shown = ", ".join(map(str, numbers[:most]))
    return shown if most is None or len(numbers) <= most else f"{shown}, ..."


def sentence(finding) -> str:
    """Tokens, coverage and estimates, one fact a line."""
    if finding.mode == "prompts":
        return f"{finding.spans} questions of {finding.tokens} tokens, at most {finding.longest} in a row"
    trained = f"{finding.predicted} ({finding.predicted / max(finding.tokens, 1):.0%}) are predicted in training"
    lines = [f"tokens: {finding.tokens}, of which {trained}, in {finding.spans} answers; longest row {finding.longest}"]
    for row in finding.coverage:
        lines.append(f"draft vocabulary {row['size']}: {row.get('fault') or coverage_line(row)}")
    if finding.estimate is None:
        return "\n".join([*lines, f"no estimate: {finding.estimate_fault}"])
    found, plan = finding.estimate, finding.plan
    kept = "no features (online)" if plan.online else f"features {size(found.features_disk)} in {plan.features_dtype}"
    lines.append(f"disk: {kept}, {plan.keep_checkpoints} checkpoints {size(found.checkpoints_disk)}")
    parts = ", ".join(f"{name} {size(count)}" for name, count in found.memory.items())
    lines.append(f"memory of each of {plan.processes} process(es): {size(sum(found.memory.values()))} ({parts})")
    length = f"{plan.epochs} epoch(s)" if plan.epochs else f"{plan.tokens:,} tokens"
    lines.append(f"time: {duration(found.seconds)} for {length} at {found.tokens_per_second:,.0f} tokens/s ({found.rate_from})")
    return "\n".join(lines)


def coverage_line(row: dict) -> str:
    text = f"{row['coverage']:.2%} of the trained tokens"
    lowest = sorted(row["by_source"].items(), key=lambda pair: (pair[1]["coverage"], pair[0]))[:3]
    if len(row["by_source"]) > 1:
        text += "; lowest by source: " + ", ".join(f"{name} {found['coverage']:.2%}" for name, found in lowest)
    return text + (f"; {row['filled']} of its ids never occur" if row["filled"] else "")


def mask_text(preview) -> Text:
    text = Text()
    for piece, trained in preview.pieces:
        for part in piece.splitlines(keepends=True) or [piece]:  # a style must not colour the rest of a line
            text.append(part.rstrip("\n"), TRAINED if trained else CONTEXT)
            if part.endswith("\n"):
                text.append("⏎", TRAINED if trained else CONTEXT)
                text.append("\n")
    return text


def verdict(finding, tolerance: float) -> str:
    report, code = finding.report, finding.exit_code(tolerance)
    if code == 2:
        hint = ""
        if finding.mode == "conversations" and report.outcomes["dropped", "no-answer"] * 2 > report.rows:
            hint = " These look like prompts without answers: add --prompts, or let train/regenerate.py answer them first."
        return "unusable: no row can be used." + hint
    share = report.dropped / report.rows
    if code == 1:
        return f"{report.dropped} rows ({share:.2%}) are dropped, more than the tolerance of {tolerance:.2%}."
    return f"clean: {report.dropped} rows ({share:.2%}) are dropped, the tolerance is {tolerance:.2%}."


def write_json(finding, path: Path, tolerance: float) -> None:
    """Everything but the previews, which hold text; written under a temporary name and renamed."""
    report = finding.report
    content = {
        "file": finding.file,
        "target": finding.target,
        "mode": finding.mode,
        "rows": report.rows,
        "kept": report.kept,
        "outcomes": {fate: report.by_fate(fate) for fate in FATES},
        "also": dict(sorted(report.also.items())),
        "numbers": finding.numbers,
        "tokens": finding.tokens,
        "predicted": finding.predicted,
        "answers": finding.spans,
        "longest": finding.longest,
        "coverage": finding.coverage,
        "estimate": asdict(finding.estimate) if finding.estimate else None,
        "exit_status": finding.exit_code(tolerance),
    }
    replace_text(path, json.dumps(content, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
