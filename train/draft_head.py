#!/usr/bin/env python3
"""Stage 3: train an EAGLE-3 draft head with DeepSpeed.

Everything is set in a recipe (docs/training.md). A killed run started again goes on from its last checkpoint. The run's folder then holds
metrics.jsonl, TensorBoard files, the last checkpoints and, at the end, `head/`, which train/export.py turns into what SGLang loads.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.recipe import Recipe, RecipeError, load_recipe

EXAMPLES = """examples:
  deepspeed train/draft_head.py --recipe recipes/smollm2-135m-cpu-quick.yaml
  deepspeed --num_gpus 8 train/draft_head.py --recipe recipes/llama3.1-8b.yaml
  python train/draft_head.py --recipe R.yaml --set train.epochs=2 --set train.learning_rate=5e-4
  python train/draft_head.py --recipe recipes/qwen3-8b.yaml --dry-run
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.add_argument("--recipe", type=Path, required=True, help="YAML file with every setting")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one field of the recipe (repeatable)")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print steps, memory and disk, and stop; needs no GPU and no target"
    )
    parser.add_argument(
        "--target-config", type=Path, metavar="FILE", help="with --dry-run: config.json or recipes/targets/*.json of the target"
    )
    parser.add_argument("--restart-on-change", action="store_true", help="delete a run in output_dir whose settings or data differ")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    args = parser.parse_args()
    if args.target_config and not args.dry_run:
        parser.error("--target-config goes with --dry-run; training reads the target itself")
    return args


def main() -> None:
    args = parse_args()
    try:
        recipe: Recipe = load_recipe(args.recipe, args.set)
        if args.dry_run:  # heavy imports only once the recipe is known to be good
            from train.plan import dry_run

            dry_run(recipe, args.target_config)
        else:
            from train.trainer import train

            train(recipe, args.restart_on_change)
    except (RecipeError, OSError, ValueError) as error:
        sys.exit(f"draft_head: {error}")


if __name__ == "__main__":
    main()
