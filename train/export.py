#!/usr/bin/env python3
"""Stage 4: a finished run -> a folder that SGLang 0.5.23 loads as a draft model.

SGLang drops unknown tensors and leaves missing ones random without a word, so the result passes the checks of the server's start and of
train/doctor.py before it gets its name; nothing is written when one fails. A head of another maker goes through `train/doctor.py --fix`.
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


def export(run: Path, out: Path, target: Path | None = None, which: str = "best") -> Path:
    """Write the head of `run` to `out` in bf16 (float16 for a float16 target) -> `out`. An earlier export there is replaced.

    `which`: "best" by held-out accept length (the last one of a run that held no rows out), or "last".

    Raises ExportError when the run is not finished or its weights are not finite, DraftHeadError when the result would not fit the target.
    """
    from talon_sglang.draft_head import check_draft_head
    from train.doctor import examine, read_target
    from train.layouts import read_checkpoint

    head = run / "head"
    if which == "best" and (run / "best" / "best.json").exists() and head.exists():
        head = run / "best"
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
        theirs = read_target(str(target))
        kind = "float16" if (theirs.get("dtype") or theirs.get("torch_dtype")) == "float16" else "bfloat16"
        state = {name: tensor.to(getattr(torch, kind)) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        save_file(state, work / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((head / "config.json").read_text()) | {"torch_dtype": kind}
        (work / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        check_draft_head(work, target)
        for finding in examine(read_checkpoint(work), theirs)[0]:
            if finding.severity == "error":
                raise ExportError(f"{run}: {finding.problem}; {finding.fix}.")
        shutil.rmtree(out, ignore_errors=True)
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python train/export.py --to sglang --run .cache/quick/run --out .cache/quick/head\n"
        "  python train/export.py --run .cache/quick/run --out last-head --which last\n"
        "  python -m sglang.launch_server ... --speculative-algorithm TALON --speculative-draft-model-path .cache/quick/head",
    )
    parser.add_argument("--run", type=Path, required=True, help="the recipe's output_dir")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--to", choices=("sglang",), default="sglang", help="whose layout to write")
    parser.add_argument(
        "--which", choices=("best", "last"), default="best", help="best by held-out accept length (default), or as training ended"
    )
    parser.add_argument("--target", type=Path, help="folder of the target model (default: the one it was trained on)")
    args = parser.parse_args()
    try:
        print(export(args.run, args.out, args.target, args.which))
    except (ExportError, OSError, ValueError) as error:
        sys.exit(f"export: {error}")


if __name__ == "__main__":
    main()
