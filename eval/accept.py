"""Measures how many tokens a round yields under any tree policy, without a server.

The target answers each prompt once. Every policy then drafts rounds along that answer with the draft head, many prompts at a time. At
temperature 0 the accept length is what a server with the same settings counts; above 0 the target's own probabilities at the nodes of each
tree replace the sampled outcome, which has the same mean and less noise.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eval.accept_file import AcceptFile
from eval.foreign_head import load_served_head
from eval.policies import Policy, parse_policy
from eval.policies.rounds import Committed, DraftRounds
from eval.results import ResultsError, command_without_paths, fingerprint
from eval.rollout import TargetRun, Text
from eval.rounds import Round, Tally, follow, visit_probabilities
from eval.serve import UsageError, check_folders, console, load_sets, positive, progress_bars, stop
from talon_sglang.draft_head import DraftHeadError, check_draft_head
from train.target import FrozenTarget

EXAMPLES = """policies (may be repeated):
  chain:STEPS   eagle3:K,STEPS,N   sglang-eagle3:K,STEPS,N   opt-tree:N[,THRESHOLD[,DEPTH]]   talon:N,K[,CAP[,MU]]
  sglang-talon:N,K[,CAP[,MU]]   talon-layers:N,K,LAYERS[,CAP[,MU]]   (what each is: docs/acceptance.md)

examples:
  # the accept length of three servers before starting one
  python eval/accept.py --target .cache/smollm2-135m-instruct --head runs/quick/head --prompts prompts/ --limit 10 \\
    --policy talon:16,4 --policy sglang-eagle3:4,4,16 --policy chain:4 --out accept.json

  # sampled decoding; talon:60,10,0 is the paper's rule without a depth cap
  python eval/accept.py --target T --head H --prompts chat.jsonl --temperature 1 --policy talon:60,10,0 --policy opt-tree:60

A rerun with the same --out continues, and measures policies that were not asked for before on the answers that are there.
"""
DEFAULT_POLICIES = ("chain:4", "eagle3:4,4,16", "sglang-eagle3:4,4,16", "opt-tree:16", "talon:16,4", "talon:16,4,0")
CHUNK_TOKENS = 12288  # (padded) tokens whose keys and values are held at a time: about half a GiB for a 135M target in float32
NOTE = (
    "accept: tokens per target forward, as SGLang counts it (bonus and first token included), and its standard error over prompts. drafts: "
    "draft forwards a round, the extend forward included. depth: of a tree, on average. budget: accepted share of the drafted "
    "nodes. @1, @2, @3: rounds that accept at that depth, of those that came there."
)


@dataclass
class Models:
    target: FrozenTarget
    head: torch.nn.Module
    draft_ids_V: torch.Tensor
    end_ids: set[int]


Job = tuple[str, str, list[int]]  # set, prompt id (and sample), input ids


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_folders(args)
        check_draft_head(args.head, args.target)
        jobs = all_jobs(load_sets(args), args)
        results = open_results(args, jobs, sys.argv if argv is None else ["eval/accept.py", *argv])
        failure = measure(args, jobs, results)
    except (UsageError, ResultsError, DraftHeadError, ValueError, OSError) as error:
        failure = str(error)
    else:
        settings = f"T={args.temperature:g}, {args.max_new_tokens} new tokens, {args.dtype}"
        print_acceptance(results.summary(), f"{args.target.name}, head {args.head.name}, {settings}")
        console.print(f"Results: {args.out}")
    return stop(failure) if failure else 0


def measure(args: argparse.Namespace, jobs: list[Job], results: AcceptFile) -> str | None:
    """Measures what is missing. Returns one sentence when it was interrupted; what was finished is on disk."""
    todo = [chunk for chunk in chunks(jobs, args.max_new_tokens) if any(missing(results, policy, chunk) for policy in args.policy)]
    if not todo:
        return None
    with console.status("loading the models"):
        models = load_models(args)
    try:
        with progress_bars() as progress, torch.inference_mode():
            bar = progress.add_task("", total=sum(map(len, todo)) * len(args.policy))
            for number, chunk in enumerate(todo, start=1):
                label = f"part {number} of {len(todo)}, {len(chunk)} prompts"
                progress.update(bar, description=f"{label}: the target answers")
                run = answered(models, chunk, results, args)
                committed = commit(models, run.texts)
                for policy in args.policy:
                    progress.update(bar, description=f"{label}: {policy.name}")
                    if missing(results, policy, chunk):
                        for job, tally in zip(chunk, tallies(models, run, committed, policy)):
                            results.tallies.setdefault(policy.name, {}).setdefault(job[0], {})[job[1]] = tally
                        results.save_soon()
                    progress.advance(bar, len(chunk))
                if not console.is_terminal:
                    console.print(f"{label}: done")
    except KeyboardInterrupt:
        results.save()
        return f"Interrupted; finished parts are kept in {args.out}, and the same command continues from there."
    results.save()
    return None


def answered(models: Models, chunk: list[Job], results: AcceptFile, args: argparse.Namespace) -> TargetRun:
    """The target's state after its answers to a chunk; known answers are read, not written again."""
    run = TargetRun(models.target, [ids for _, _, ids in chunk], args.max_new_tokens, args.temperature, models.end_ids)
    known = [results.answers.get(name, {}).get(prompt) for name, prompt, _ in chunk]
    if None not in known:
        run.reread(known)
        return run
    texts = run.answer([f"{args.seed}/{name}/{prompt}" for name, prompt, _ in chunk])
    for (name, prompt, _), text in zip(chunk, texts):
        results.answers.setdefault(name, {})[prompt] = text.answer
    results.save()
    return run


def commit(models: Models, texts: list[Text]) -> Committed | None:
    """The draft head's rows over prompts and answers; None when no answer is long enough for a round."""
    long = [text for text in texts if len(text.answer) > 1]
    if not long:
        return None
    ids, features, first = [text.ids for text in long], [text.features_TF for text in long], [len(text.prompt) for text in long]
    return Committed(models.head, models.target.embedding.weight, ids, features, first)


def tallies(models: Models, run: TargetRun, committed: Committed | None, policy: Policy) -> list[Tally]:
    """One tally per prompt of the run."""
    long = [slot for slot, text in enumerate(run.texts) if len(text.answer) > 1]
    found = [Tally() for _ in run.texts]
    if not long:
        return found
    for slot, rounds in zip(long, lay_rounds(models, [run.texts[slot] for slot in long], committed, policy)):
        if run.temperature > 0:
            chances = run.node_probabilities(slot, [(one.start, one.draft.tree) for one in rounds])
            for one, probabilities in zip(rounds, chances):
                found[slot].add(one, probabilities, run.limit - 1 - one.start, models.end_ids)
        else:
            for one in rounds:
                limit = len(run.texts[slot].answer) - 1 - one.start
                found[slot].add(one, visit_probabilities(one.draft.tree, one.path), limit)
    return found


def lay_rounds(models: Models, texts: list[Text], committed: Committed, policy: Policy) -> list[list[Round]]:
    """All rounds of each text: the next starts where the last one ended. One round of every unfinished text is drafted at a time."""
    rounds: list[list[Round]] = [[] for _ in texts]
    start = [0] * len(texts)
    going = list(range(len(texts)))
    while going:
        root_B = torch.tensor([len(texts[p].prompt) + start[p] for p in going])
        embedding_VH = models.target.embedding.weight
        drafts = policy.draft(DraftRounds(models.head, models.draft_ids_V, embedding_VH, committed, torch.tensor(going), root_B))
        for p, draft in zip(going, drafts):
            one = follow(draft, start[p], texts[p].answer)
            rounds[p].append(one)
            start[p] += one.emitted
        going = [p for p in going if start[p] < len(texts[p].answer) - 1]
    return rounds


# ------------------------------------------------------------ what to measure


def all_jobs(sets: dict, args: argparse.Namespace) -> list[Job]:
    """Every prompt as often as it is to be answered, in order of length: neighbours of one length waste no padding."""
    jobs = []
    for name, prompts in sets.items():
        for prompt, ids in prompts:
            jobs += [(name, prompt if args.samples == 1 else f"{prompt} sample {i + 1}", ids) for i in range(args.samples)]
    return sorted(jobs, key=lambda job: len(job[2]))


def chunks(jobs: list[Job], max_new_tokens: int, most: int = CHUNK_TOKENS) -> list[list[Job]]:
    """Jobs in groups of at most `most` padded tokens, at least one job each."""
    found: list[list[Job]] = []
    for job in jobs:
        if found and (len(found[-1]) + 1) * (len(job[2]) + max_new_tokens) <= most:
            found[-1].append(job)
        else:
            found.append([job])
    return found


def missing(results: AcceptFile, policy: Policy, chunk: list[Job]) -> bool:
    measured = results.tallies.get(policy.name, {})
    return any(prompt not in measured.get(name, {}) for name, prompt, _ in chunk)


def load_models(args: argparse.Namespace) -> Models:
    dtype = getattr(torch, args.dtype)
    head, draft_ids_V = load_served_head(args.head, dtype)
    target = FrozenTarget.load(args.target, dtype, aux_layers=head.config.aux_layers)
    generation = target.model.generation_config.eos_token_id
    end_ids = {*(generation if isinstance(generation, list) else [generation]), args.tokenizer.tokenizer.eos_token_id} - {None}
    return Models(target, head, draft_ids_V, end_ids)


def open_results(args: argparse.Namespace, jobs: list[Job], command: list[str]) -> AcceptFile:
    settings = {
        "target": {"name": args.target.name, "fingerprint": fingerprint(args.target)},
        "head": {"name": args.head.name, "fingerprint": fingerprint(args.head)},
        "prompts": {name: sorted(prompt for other, prompt, _ in jobs if other == name) for name in sorted({job[0] for job in jobs})},
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "samples": args.samples,
        "seed": args.seed,
        "dtype": args.dtype,
    }
    if args.fresh:
        args.out.unlink(missing_ok=True)
    return AcceptFile(args.out, settings, command_without_paths(command))


# ------------------------------------------------------------ the table


def print_acceptance(summary: dict[str, dict[str, dict]], title: str) -> None:
    """One row per policy over all prompts, then the accept length by prompt set."""
    style = {"title_justify": "left", "box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, **style)
    table.add_column("policy", no_wrap=True)
    for name in ("accept", "±", "drafts", "depth", "budget", "@1", "@2", "@3"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy, by_set in summary.items():
        table.add_row(policy, *cells(by_set["all"]))
    console.print(table)
    sets = [name for name in dict.fromkeys(name for by_set in summary.values() for name in by_set) if name != "all"]
    if len(sets) > 1:
        by_set_table = Table(title="accept length by prompt set", **style)
        by_set_table.add_column("policy", no_wrap=True)
        for name in sets:
            by_set_table.add_column(name, justify="right", no_wrap=True)
        for policy, by_set in summary.items():
            by_set_table.add_row(policy, *(f"{by_set[name]['accept_length']:.2f}" if name in by_set else "" for name in sets))
        console.print(by_set_table)
    console.print(NOTE, style="dim", highlight=False)


def cells(figure: dict) -> list[str]:
    error, budget = figure["standard_error"], figure["budget_accepted"]
    depth = sum(int(at) * share for at, share in figure["depths"].items())
    accepted = [f"{share:.2f}" for share in figure["accepted_at"][:3]]
    return [
        f"{figure['accept_length']:.3f}",
        "" if error is None else f"{error:.3f}",
        f"{figure['draft_forwards']:.2f}",
        f"{depth:.2f}",
        "" if budget is None else f"{budget:.0%}",
        *accepted,
        *[""] * (3 - len(accepted)),
    ]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    policies = f"default: {' '.join(DEFAULT_POLICIES)}"
    parser.add_argument("--policy", type=as_argument(parse_policy), action="append", metavar="NAME:ARGS", help=policies)
    parser.add_argument("--out", type=Path, default=Path("accept.json"))
    args = parse_measurement(parser, argv)
    args.policy = args.policy or [parse_policy(text) for text in DEFAULT_POLICIES]
    return args


def parse_measurement(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Add what says on which models and answers to measure (eval/ablate.py is told it in the same words), and parse."""
    parser.add_argument("--target", type=Path, required=True, help="target model folder (Hugging Face layout, Llama family)")
    parser.add_argument("--head", type=Path, required=True, help="EAGLE-3 head folder (SGLang layout)")
    parser.add_argument("--prompts", type=Path, required=True, help="prompt file, or a folder with one file per prompt set")
    parser.add_argument("--limit", type=positive, help="prompts per set (default: all)")
    parser.add_argument("--max-new-tokens", type=positive, default=64)
    parser.add_argument("--temperature", type=as_argument(temperature), default=0.0, help="of the target; the draft has none (default: 0)")
    parser.add_argument("--samples", type=positive, default=1, help="answers per prompt; above 1 needs a temperature above 0")
    parser.add_argument("--seed", type=int, default=0, help="of the answers at a temperature above 0")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--fresh", action="store_true", help="discard what --out already holds")
    args = parser.parse_args(argv)
    if args.samples > 1 and args.temperature == 0:
        parser.error(f"--samples is {args.samples}, but at temperature 0 every answer is the same; pass --temperature, or drop --samples")
    return args


def temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < 100:
        raise ValueError(f"temperature {text} is not in 0 .. 100")
    return value


def as_argument(read: Callable) -> Callable:
    """argparse shows the message of an ArgumentTypeError only."""

    def convert(text: str):
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


if __name__ == "__main__":
    sys.exit(main())
