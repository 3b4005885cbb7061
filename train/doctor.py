#!/usr/bin/env python3
"""What SGLang 0.5.23 would silently ignore, misread or leave random in an EAGLE-3 checkpoint, and a corrected copy of it.

Reads heads of this toolkit, SafeAILab, SpecForge, speculators, AngelSlim and ModelOpt. Exit status: 0 nothing to worry about, 1 warnings,
2 errors. Every finding is explained in docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors.torch import save_file

from talon_sglang.draft_head import DraftHeadError, check_config, check_tensors, expected_tensors, local_folder, read_config
from train import doctor_config, doctor_tensors
from train.findings import Answers, Finding
from train.layouts import Checkpoint, read_checkpoint

RULES = (
    doctor_config.check_files,
    doctor_config.check_nesting,
    doctor_tensors.check_prefix,
    doctor_config.check_class,
    doctor_tensors.check_sizes,
    doctor_config.check_aux_layers,
    doctor_tensors.check_optional_parts,
    doctor_config.check_norm_output,
    doctor_config.check_positions,
    doctor_tensors.check_keys,
    doctor_tensors.check_vocabulary,
    doctor_tensors.check_values,
)


def examine(head: Checkpoint, target: dict | None = None, answers: Answers | None = None) -> tuple[list[Finding], Checkpoint]:
    """-> all findings, and a copy of the head with every repair applied. `target` is the target's config.json as a dict."""
    repaired, findings = head.copy(), []
    for rule in RULES:
        for finding in rule(repaired, target, answers or Answers()):
            findings.append(finding)
            if finding.repair:
                finding.repair(repaired)
    if target is not None and not any(f.severity == "error" and f.repair is None for f in findings):
        findings += _server_check(repaired, target)
    return findings, repaired


def _server_check(head: Checkpoint, target: dict) -> Iterator[Finding]:
    """The check that TALON makes when a server starts has the last word."""
    try:
        check_config(head.folder, head.config, target)
        check_tensors(head.folder, head.shapes, expected_tensors(head.config, target))
    except DraftHeadError as error:
        yield Finding("server-check", "error", str(error), "see the sentence before")


def write_copy(head: Checkpoint, out: Path) -> None:
    """One model.safetensors and a config.json, under a temporary name first. Raises DraftHeadError when `out` exists."""
    if out.exists():
        raise DraftHeadError(f"{out} exists already; name a new folder for the corrected copy")
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        tensors = {name: tensor.contiguous().clone() for name, tensor in head.tensors.items()}
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(head.config, indent=1) + "\n")
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def fix(folder: Path, out: Path, target: dict | None = None, answers: Answers | None = None) -> tuple[list[Finding], list[Finding]]:
    """Write a corrected copy of `folder` to `out` -> (findings before, findings of the copy).

    Nothing is written when an error remains that no repair removes; the second list then holds those errors.
    """
    findings, repaired = examine(read_checkpoint(folder), target, answers)
    stuck = [finding for finding in findings if finding.severity == "error" and finding.repair is None]
    if stuck:
        return findings, stuck
    write_copy(repaired, out)
    return findings, examine(read_checkpoint(out), target, answers)[0]


def status(findings: list[Finding]) -> int:
    """0 for notes or nothing, 1 for warnings, 2 for errors."""
    return max(({"note": 0, "warning": 1, "error": 2}[finding.severity] for finding in findings), default=0)


def read_target(name: str) -> dict:
    """The target's config from a folder, a hub name, or a JSON file such as recipes/targets/qwen3-8b.json. Raises DraftHeadError."""
    path = Path(name)
    if path.suffix == ".json":
        try:
            config = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise DraftHeadError(f"--target {path} is no readable JSON ({type(error).__name__}); name a config.json or a folder") from error
    else:
        config = read_config(local_folder(name, "target model"), "target model")
    return config.get("text_config") or config


def main() -> None:
    args = parse_args()
    answers = Answers(args.aux_ids_are, None if args.norm_output is None else args.norm_output == "true")
    try:
        target = read_target(args.target) if args.target else None
        head = read_checkpoint(local_folder(args.dir, "draft head"))
        if args.fix:
            findings, left = fix(head.folder, args.fix, target, answers)
        else:
            findings = left = examine(head, target, answers)[0]
    except (DraftHeadError, OSError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        sys.exit(2)
    if args.json:
        written = str(args.fix) if args.fix and args.fix.exists() else None
        rows = {"findings": [f.as_dict() for f in findings], "left": [f.as_dict() for f in left]}
        print(json.dumps({"head": str(args.dir), "layout": head.layout, "written": written, "status": status(left)} | rows, indent=1))
    else:
        report(args, head, findings, left)
    sys.exit(status(left))


def report(args: argparse.Namespace, head: Checkpoint, findings: list[Finding], left: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    colours: dict[str, Callable | str] = {"error": "bold red", "warning": "yellow", "note": "dim"}
    rows = sum(tensor.numel() for tensor in head.tensors.values())
    console.print(f"{args.dir}: {head.layout} layout, {len(head.tensors)} tensors, {rows / 1e6:.1f} M values")
    for finding in findings:
        colour = colours[finding.severity]
        console.print(f"[{colour}]{finding.severity:>7}[/] {finding.code}: {escape(finding.problem)}")
        console.print(f"        fix: {escape(finding.fix)}")
    if not findings:
        console.print("nothing found: SGLang 0.5.23 loads all of it")
    if not args.target:
        console.print("without --target nothing was compared with the target model (layers, rotary settings, vocabulary, dtype)")
    if args.fix and args.fix.exists():
        console.print(f"{args.fix}: written, {len(left)} finding(s) left" + "".join(f"\n        {f.code}: {escape(f.fix)}" for f in left))
    elif args.fix:
        console.print("nothing written, this cannot be fixed here: " + "; ".join(f"{f.code} ({escape(f.fix)})" for f in left))
    elif any(finding.repair for finding in findings):
        console.print(f"{sum(f.repair is not None for f in findings)} of {len(findings)} can be corrected with --fix OUT")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python train/doctor.py heads/foreign --target models/Qwen3-8B\n"
        "  python train/doctor.py heads/foreign --target recipes/targets/qwen3-8b.json --fix heads/fixed\n"
        "  python train/doctor.py heads/foreign --fix heads/fixed --norm-output false --aux-ids-are outputs\n"
        "  python train/doctor.py heads/fixed --json",
    )
    parser.add_argument("dir", help="folder (or hub name) of the head")
    parser.add_argument("--target", help="folder, hub name or config JSON of the target model; without it fewer things can be checked")
    parser.add_argument("--fix", type=Path, metavar="OUT", help="write a corrected copy to this new folder")
    parser.add_argument("--aux-ids-are", choices=("inputs", "outputs"), help="what its aux layer ids name, where that is not certain")
    parser.add_argument("--norm-output", choices=("true", "false"), help="was the head trained on its own normed states?")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
