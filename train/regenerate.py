#!/usr/bin/env python3
"""Stage 2: the target answers the prompts itself, since a draft head must learn the target's own text.

Writes one JSON row per conversation: {"id", "sample", "category", "messages", "truncated", "sampling"}. Questions after the first are asked
on top of the target's own earlier answers; a conversation ends early when an answer hits --max-new-tokens ("truncated": true). Killed and
started again, it goes on where it was. The target runs in this process (Llama, Mistral, Qwen2, Qwen3), and with --features leaves the
hidden states that training needs; or it runs in an SGLang server (--server), any model and much faster on GPUs.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import ValidationError

from train.answers import AnswerFile, question
from train.data import read_prompts_with_report
from train.recipe import AnswerSettings, FeatureSettings, RecipeError, explain, load_recipe

EXAMPLES = """examples:
  python train/regenerate.py --recipe recipes/smollm2-135m-cpu-quick.yaml
  python train/regenerate.py --target DIR --prompts prompts.jsonl --out answers.jsonl --max-new-tokens 256
  python train/regenerate.py --recipe R.yaml --prompts sharegpt.json --out my-answers.jsonl --limit 2000
  python train/regenerate.py --recipe recipes/qwen3-8b.yaml --server http://127.0.0.1:30000 --slots 64
"""


def regenerate(
    target_dir: Path,
    prompts: Path,
    out: Path,
    settings: AnswerSettings,
    features: FeatureSettings | None = None,
    aux_layers: tuple[int, ...] | None = None,
) -> None:
    """Answer the prompts of a file into `out`; returns at once when `out` is already the answer to the same question.

    `features`: keep the target's hidden states too (not with a server), those of `aux_layers`.
    Raises RecipeError when no prompt is usable or none got an answer.
    """
    found, report = read_prompts_with_report(prompts, settings.limit, split="train")
    print(f"{prompts.name}: {report}", flush=True)
    if settings.max_turns is not None:
        for prompt in found:
            del prompt.turns[settings.max_turns :]
    if not found:
        raise RecipeError(f"{prompts.name} holds no usable prompt; see the reasons above.")
    file = AnswerFile(out, question(target_dir, found, settings))
    if file.up_to_date():
        print(f"{out.name} is up to date", flush=True)
        return
    jobs, done = file.open_jobs(found, settings)
    if settings.server:
        from train.answer_server import answer_by_server

        answer_by_server(target_dir, jobs, done, file, settings)
    else:
        from train.answerer import answer_here

        answer_here(target_dir, jobs, done, file, settings, features, aux_layers)
    file.finish()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.add_argument("--recipe", type=Path, help="take everything not given here from this recipe's `target`, `answers` and `features`")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one field of the recipe (repeatable)")
    parser.add_argument("--target", type=Path, help="folder of the target model; with --server only its tokenizer and config are read")
    parser.add_argument("--prompts", type=Path, help="prompts: JSONL (turns, ShareGPT, messages, UltraChat) or .txt")
    parser.add_argument("--out", type=Path, help="answers to write (JSONL)")
    parser.add_argument("--server", metavar="URL", help="an SGLang server that runs the target")
    parser.add_argument("--features", type=Path, help="folder that keeps the target's hidden states for training")
    for name, kind, text in (
        ("limit", int, "use the first LIMIT usable prompts only"),
        ("max-turns", int, "of a conversation's questions, ask the first MAX_TURNS only"),
        ("max-new-tokens", int, "longest answer in tokens"),
        ("max-length", int, "prompt and answer together, in tokens"),
        ("temperature", float, "0 is greedy"),
        ("samples-per-prompt", int, "answers per prompt (needs a temperature above 0)"),
        ("slots", int, "conversations at a time"),
        ("seed", int, "seed of the sampling"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), help="of the target in this process; auto: bf16 where it is fast")
    args = parser.parse_args()
    if args.features and args.server:
        parser.error("--features goes without --server, a server does not hand out hidden states; training computes them")
    return args


def main() -> None:
    args = parse_args()
    try:
        _run(args)
    except ValidationError as error:
        sys.exit(f"regenerate: {explain(error)}")
    except KeyboardInterrupt:
        sys.exit("regenerate: interrupted; run the same command again to go on.")
    except (RecipeError, OSError, ValueError) as error:
        sys.exit(f"regenerate: {error}")


def _run(args) -> None:
    target, prompts, out, settings, features = args.target, args.prompts, args.out, AnswerSettings(), None
    aux_layers = None
    if args.recipe:
        recipe = load_recipe(args.recipe, args.set)
        settings = recipe.answers
        target, prompts, out = target or recipe.target, prompts or settings.prompts, out or settings.file
        aux_layers = recipe.head.aux_layers
        features = recipe.features if recipe.features.mode == "store" else None
    if args.features:
        features = FeatureSettings(**{**(features.model_dump() if features else {}), "folder": args.features})
    if not (target and prompts and out):
        raise RecipeError("--target, --prompts and --out are needed, or a --recipe that names them; see --help.")
    given = {name: getattr(args, name) for name in AnswerSettings.model_fields if getattr(args, name, None) is not None}
    settings = AnswerSettings(**{**settings.model_dump(), **{name: value for name, value in given.items() if name != "prompts"}})
    regenerate(target, prompts, out, settings, features, aux_layers)


if __name__ == "__main__":
    main()
