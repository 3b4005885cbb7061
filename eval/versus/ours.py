"""A training run of this toolkit with a clock around each step. Settings come from a recipe, as with train/draft_head.py."""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.versus.clock import Clock
from train.recipe import RecipeError, load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one field of the recipe (repeatable)")
    parser.add_argument("--clock", type=Path, required=True, help="JSON file to write: tokens and seconds of each step")
    args = parser.parse_args()
    try:
        run(load_recipe(args.recipe, args.set), args.clock)
    except (RecipeError, OSError, ValueError) as error:
        sys.exit(f"vs_speculators: {error}")


def run(recipe, clock_file: Path) -> None:
    """Train from the first step to the last. A half-finished run in the recipe's folder is deleted: its steps were not timed."""
    import torch
    import transformers

    from train import trainer

    shutil.rmtree(recipe.output_dir, ignore_errors=True)
    clock = Clock()

    class TimedReporter(trainer.Reporter):
        def __enter__(self):
            entered = super().__enter__()
            clock.resume()
            return entered

        def train(self, step, sums_3K, rate, tokens, seconds):
            super().train(step, sums_3K, rate, tokens, seconds)
            clock.tick(tokens)

        def held_out(self, *args):
            super().held_out(*args)
            clock.resume()

    trainer.Reporter = TimedReporter
    trainer.train(recipe)
    clock.write(clock_file, torch=torch.__version__, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
