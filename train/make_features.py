#!/usr/bin/env python3
"""Fill or look after the feature store of a recipe without training: the target reads every conversation once.

Training does the same by itself; this command is for doing it beforehand, on other machines, or in several processes at once (torchrun).
Killed and started again, it goes on where it was. The size is printed first.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
        if recipe.features.mode != "store":
            raise RecipeError("`features.mode` is 'online', which stores nothing; use --set features.mode=store --set features.folder=DIR.")
        return _run(recipe, args)
    except KeyboardInterrupt:
        print("make_features: interrupted; run the same command again to go on.", file=sys.stderr)
    except (RecipeError, OSError, ValueError) as error:
        print(f"make_features: {error}", file=sys.stderr)
    return 2


def _run(recipe, args) -> int:
    import torch.distributed as dist
    from transformers import AutoConfig, AutoTokenizer

    from train.dataset import FeatureSource, load_dataset
    from train.feature_size import describe_bytes
    from train.foreign_start import foreign_start
    from train.plan import Stored
    from train.target import FrozenTarget
    from train.trainer import DTYPES
    from train.world import join_world

    world = join_world()
    config = AutoConfig.from_pretrained(recipe.target)
    recipe, _ = foreign_start(recipe, config)
    target = FrozenTarget.load(recipe.target, DTYPES[recipe.train.precision], world.device, recipe.head.aux_layers)
    source = FeatureSource(target, recipe.features)
    store = source.store
    if args.prune:
        count, size = store.others()
        store.prune()
        print(f"{count} shards of other settings deleted, {describe_bytes(size)}")
        return 0
    faults = source.check(world.rank, world.size)
    if args.check:
        return 1 if faults else 0
    data = load_dataset(recipe, AutoTokenizer.from_pretrained(recipe.target), target.config.vocab_size)
    chats = data.train + data.held_out
    if world.first:
        expected = describe_bytes(Stored.of(chats).size(target.config.hidden_size, recipe.features.dtype))
        print(f"{data.notes}\n{len(chats)} conversations will take {expected} in {recipe.features.dtype}", flush=True)
    dist.barrier()
    source.prepare(chats, world.rank, world.size, 4 * recipe.train.micro_batch_tokens)
    dist.barrier()
    if world.first:
        store.refresh()
        found = store.totals()
        per_token = f"{found['bytes'] / found['tokens']:.0f} bytes a token" if found["tokens"] else "empty"
        held = f"{found['conversations']} conversations, {found['tokens']} tokens in {found['shards']} shards"
        print(f"{held}: {describe_bytes(found['bytes'])}, {per_token}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
