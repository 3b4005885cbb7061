"""Prompt sets for evaluations: a folder, a file, or the six sets of the EAGLE and TALON papers from the Hugging Face hub."""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console

from eval.client import ChatTokenizer
from train.data import Prompt, read_prompts
from train.readers import SourceError

HUB_LIMIT = 80  # prompts of a hub set without --limit: what the papers report on
console = Console()

# {set name: [(prompt id, input ids), ...]}
PromptSets = dict[str, list[tuple[str, list[int]]]]


class UsageError(RuntimeError):
    """Something about the call is wrong. `str()` is one sentence."""


@dataclass(frozen=True)
class HubSet:
    """A hub data set, and how its rows become the turns of a user."""

    repository: str
    config: str | None
    split: str
    turns: Callable[[dict], list[str]]


def _alpaca(row: dict) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]]


HUB_SETS = {
    "mt_bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
    "gsm8k": HubSet("openai/gsm8k", "main", "test", lambda row: [row["question"]]),
    "humaneval": HubSet("openai/openai_humaneval", None, "test", lambda row: ["Complete the code I provided.\n\n" + row["prompt"]]),
    "alpaca": HubSet("tatsu-lab/alpaca", None, "train", _alpaca),
    "qa": HubSet("google-research-datasets/nq_open", None, "validation", lambda row: [row["question"]]),
    "cnn_dm": HubSet("abisee/cnn_dailymail", "3.0.0", "test", lambda row: ["Summarize: " + row["article"]]),
}


def load_sets(args: argparse.Namespace) -> PromptSets:
    """The prompt sets that --prompts, --sets and --limit name, as token ids; sets `args.tokenizer`.

    A folder gives one set a file, a file one set a category, `hub` the six sets above. Prompts that do not fit the target's context are
    left out and counted. Raises UsageError (one sentence) when nothing is left or a named set is missing.
    """
    wanted = getattr(args, "sets", None)
    named = read_named(args.prompts, wanted, args.limit)
    if missing := [name for name in wanted or () if name not in named]:
        raise UsageError(f"--sets names {missing[0]}, which --prompts {args.prompts} does not have; it has {', '.join(named) or 'none'}.")
    args.tokenizer = ChatTokenizer(args.target)
    context = json.loads((args.target / "config.json").read_text()).get("max_position_embeddings", 2048)
    sets = {name: encode(name, prompts, args.tokenizer, context - args.max_new_tokens) for name, prompts in named.items()}
    sets = {name: prompts for name, prompts in sets.items() if prompts}
    if not sets:
        raise UsageError(f"--prompts {args.prompts} holds no usable prompt; each row needs a user turn (see docs/evaluation.md).")
    return sets


def read_named(place: Path, wanted: list[str] | None, limit: int | None) -> dict[str, list[Prompt]]:
    """{set name: prompts}, at most `limit` a set."""
    try:
        if place.is_dir():
            files = sorted(path for path in place.iterdir() if path.suffix in (".jsonl", ".json", ".txt", ".parquet"))
            return {path.stem: read_prompts(path, limit) for path in files if not wanted or path.stem in wanted}
        if place.is_file():
            named: dict[str, list[Prompt]] = {}
            for prompt in read_prompts(place):
                chosen = named.setdefault(place.stem if prompt.category in ("", "none") else prompt.category, [])
                if limit is None or len(chosen) < limit:
                    chosen.append(prompt)
            return {name: prompts for name, prompts in named.items() if not wanted or name in wanted}
    except SourceError as error:
        raise UsageError(str(error)) from error
    if str(place) == "hub":
        return {name: list(read_hub(name, limit or HUB_LIMIT)) for name in wanted or HUB_SETS if name in HUB_SETS}
    raise UsageError(f"--prompts {place} does not exist; pass a prompt file, a folder of them, or the word hub.")


def read_hub(name: str, limit: int) -> Iterator[Prompt]:
    """The first `limit` prompts of one of HUB_SETS, streamed. Raises UsageError without the library, the network or the data set."""
    try:
        import datasets
    except ImportError:
        raise UsageError("--prompts hub needs the package datasets: run pip install datasets, or pass a folder of prompt files.") from None
    hub_set = HUB_SETS[name]
    try:
        rows = datasets.load_dataset(hub_set.repository, hub_set.config, split=hub_set.split, streaming=True)
        for number, row in enumerate(islice(rows, limit)):
            yield Prompt(f"{name}-{number}", name, hub_set.turns(row))
    except Exception as error:  # the library raises its own, the hub client's and the network's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:160]
        raise UsageError(f"{name} ({hub_set.repository}) cannot be read from the hub ({reason}); pass a folder of prompt files.") from None


def encode(name: str, prompts: list[Prompt], tokenizer: ChatTokenizer, room: int) -> list[tuple[str, list[int]]]:
    """First turns only: a second one would depend on each server's own first answer, and then the servers get different prompts."""
    # Answers are paired by id, so an id that a file uses twice is made unique.
    seen: Counter = Counter()
    encoded = []
    for prompt in prompts:
        seen[prompt.id] += 1
        unique_id = prompt.id if seen[prompt.id] == 1 else f"{prompt.id} ({seen[prompt.id]})"
        encoded.append((unique_id, tokenizer.encode(prompt.turns[:1])))
    fitting = [(prompt_id, ids) for prompt_id, ids in encoded if len(ids) <= room]
    if len(fitting) < len(encoded):
        console.print(f"{name}: {len(encoded) - len(fitting)} of {len(encoded)} prompts are longer than {room} tokens and are left out.")
    return fitting
