#!/usr/bin/env python3
"""Fill or look after the feature store of a recipe without training: the target reads every conversation once.

Training does the same by itself; this command is for doing it beforehand, on other machines, or in several processes at once (torchrun).
Killed and started again, it goes on where it was. The size is printed first.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from train.recipe import RecipeError, load_recipe

EXAMPLES = """examples:
  python train/make_features.py --recipe recipes/smollm2-135m-cpu-quick.yaml
  python train/make_features.py --recipe R.yaml --set features.dtype=bf16 --set features.folder=/big/features
  torchrun --nproc-per-node 8 train/make_features.py --recipe R.yaml
  python train/make_features.py --recipe R.yaml --check      compare every checksum, name what is damaged, compute nothing
  python train/make_features.py --recipe R.yaml --prune      delete what belongs to other targets, layers or dtypes
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.add_argument("--recipe", type=Path, required=True, help="YAML file, the one that training will use")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one field of the recipe (repeatable)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare checksums only, drop damaged shards; exit status 1 if there are any")
    action.add_argument("--prune", action="store_true", help="delete shards of other settings only")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    try:
        recipe = load_recipe(args.recipe, args.set)
        if args.check:
            recipe.features.check = True
        if recipe.features.mode != "store":
            raise RecipeError("`features.mode` is 'online', which stores nothing; use --set features.mode=store --set features.folder=DIR.")
        return _run(recipe, args)
    except KeyboardInterrupt:
        print("make_features: interrupted; run the same command again to go on.", file=sys.stderr)
    except (RecipeError, OSError, ValueError) as error:
        print(f"make_features: {error}", file=sys.stderr)
    return 2


def _run(recipe, args) -> int:
    from transformers import AutoConfig, AutoTokenizer

    from train.dataset import FeatureSource, load_dataset
    from train.feature_size import describe_bytes
    from train.foreign_start import foreign_start
    from train.machine import DTYPES
    from train.plan import Stored
    from train.target import FrozenTarget

    rank, size, device, barrier = _world()
    recipe, _ = foreign_start(recipe, AutoConfig.from_pretrained(recipe.target))
    target = FrozenTarget.load(recipe.target, DTYPES[recipe.train.precision], device, recipe.head.aux_layers)
    source = FeatureSource(target, recipe.features)
    if args.prune:
        count, unused = source.store.others()
        source.store.prune()
        print(f"{count} shards of other settings deleted, {describe_bytes(unused)}")
        return 0
    faults = source.check(rank, size)
    if args.check:
        return 1 if faults else 0
    data = load_dataset(recipe, AutoTokenizer.from_pretrained(recipe.target), target.config.vocab_size)
    chats = data.train + data.held_out
    if rank == 0:
        expected = describe_bytes(Stored.of(chats).size(target.config.hidden_size, recipe.features.dtype))
        print(f"{data.notes}\n{len(chats)} conversations will take {expected} in {recipe.features.dtype}", flush=True)
    barrier()
    source.prepare(chats, rank, size, 4 * recipe.train.micro_batch_tokens)
    barrier()
    if rank == 0:
        source.store.refresh()
        found = source.store.totals()
        held = f"{found['conversations']} conversations, {found['tokens']} tokens in {found['shards']} shards"
        print(f"{held}: {describe_bytes(found['bytes'])}, {found['bytes'] / found['tokens']:.0f} bytes a token")
    return 0


def _world():
    """-> rank, processes, device, barrier. Only torchrun and the like need torch.distributed."""
    if "RANK" not in os.environ:
        return 0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"), lambda: None
    from train.world import join_world

    world = join_world()
    return world.rank, world.size, world.device, torch.distributed.barrier


if __name__ == "__main__":
    sys.exit(main())
