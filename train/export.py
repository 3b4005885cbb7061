#!/usr/bin/env python3
"""Stage 4: a finished run -> a folder that SGLang 0.5.23 loads as a draft model.

SGLang drops unknown tensors and leaves missing ones random without a word, so the result is checked against the target before it gets its
name; nothing is written when the check fails.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file, save_file


class ExportError(RuntimeError):
    """One sentence: what is missing and what to do."""


def export(run: Path, out: Path, target: Path | None = None) -> Path:
    """Write the head of `run` to `out` in bf16 -> `out`. An earlier export there is replaced.

    Raises ExportError when the run is not finished, DraftHeadError when the result would not fit the target.
    """
    from talon_sglang.draft_head import check_draft_head

    head = run / "head"
    if not (head / "model.safetensors").exists():
        raise ExportError(f"{run} holds no finished head; run train/draft_head.py to its end first.")
    target = target or Path(json.loads((head / "target.json").read_text())["target"])
    if not target.is_dir():
        raise ExportError(f"The target folder {target} does not exist; name it with --target.")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        state = load_file(head / "model.safetensors")
        state = {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        save_file(state, work / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(head / "config.json", work / "config.json")
        check_draft_head(work, target)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python train/export.py --run .cache/quick/run --out .cache/quick/head\n"
        "  python -m sglang.launch_server ... --speculative-algorithm TALON --speculative-draft-model-path .cache/quick/head",
    )
    parser.add_argument("--run", type=Path, required=True, help="the recipe's output_dir")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--target", type=Path, help="folder of the target model (default: the one it was trained on)")
    args = parser.parse_args()
    try:
        print(export(args.run, args.out, args.target))
    except (ExportError, OSError, ValueError) as error:
        sys.exit(f"export: {error}")


if __name__ == "__main__":
    main()
