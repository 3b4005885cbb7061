"""Chooses TALON's settings for a load from what was measured: eval/accept.py's accept lengths and eval/cost.py's costs."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eval.cost_model import CostModel
from eval.policies import Policy, Talon, parse_policy
from eval.policies.served import served_as
from eval.serve import console, positive
from talon_sglang.settings import TalonSettings

EXAMPLES = """examples:
  # what to measure first: a grid of settings, and the costs of this machine
  python eval/accept.py --target T --head H --prompts P --policy talon:8,2 --policy talon:16,4 --policy talon:16,4,10,0.1 --out accept.json
  python eval/cost.py --target T --head H --out cost.json

  python eval/tune.py --accept accept.json --cost cost.json --batch 1
  python eval/tune.py --accept accept.json --cost cost.json --batch 1 4 16 --set gsm8k

  # two requests a second, 200 tokens each
  python eval/tune.py --accept accept.json --cost cost.json --rate 2 --tokens 200
"""
MOST_SEQUENCES = 256  # at a time; SGLang's own default on a CPU is lower


@dataclass(frozen=True)
class Choice:
    """A policy under a load. tokens_per_s: of all `batch` sequences together; times_plain: speed of one sequence against that of plain
    decoding under the same load (None: plain decoding cannot carry it)."""

    policy: Policy | None  # None: plain decoding
    batch: int
    tokens_per_s: float
    times_plain: float | None

    @property
    def one_sequence(self) -> float:
        """Tokens per second of each sequence."""
        return self.tokens_per_s / self.batch

    @property
    def name(self) -> str:
        return self.policy.name if self.policy else "plain"


@dataclass(frozen=True)
class Load:
    """Either `batch` sequences that decode at the same time, or `rate` tokens wanted per second, whatever batch that takes."""

    batch: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"batch {self.batch}" if self.batch else f"{self.rate:g} tokens/s"

    def batch_of(self, tokens_per_s: Callable[[int], float]) -> int | None:
        """The batch that serves this load: for a rate, the smallest that is fast enough (arrivals taken as even); None: none is."""
        return self.batch or next((batch for batch in range(1, MOST_SEQUENCES + 1) if tokens_per_s(batch) >= self.rate), None)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        accepted = read_acceptance(args.accept, args.set)
        model = CostModel.read(args.cost)
        warn_of_differences(json.loads(args.accept.read_text()), json.loads(args.cost.read_text()))
        loads = [Load(rate=args.rate * args.tokens)] if args.rate else [Load(batch=batch) for batch in args.batch]
        for load in loads:
            choices = ranked(accepted, model, load)
            print_choices(choices, load, args.top)
            print_advice(choices, args)
        if not args.rate and len(args.batch) > 1:
            print_shared(best_for_all(accepted, model, args.batch), args)
    except (ValueError, OSError) as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def ranked(accepted: dict[str, dict], model: CostModel, load: Load) -> list[Choice]:
    """All policies that can be served and that carry the load, and plain decoding if it does, the fastest for a sequence first.

    Raises ValueError when nothing carries the load.
    """
    speeds: list[tuple[Policy | None, Callable[[int], float]]] = [(None, model.plain_tokens_per_s)]
    for name, figure in accepted.items():
        policy = parse_policy(name)
        if (served := served_as(policy)) is not None:
            full_extend = served.algorithm != "TALON"
            speeds.append((policy, partial(model.tokens_per_s, figure, served.nodes, full_extend=full_extend)))
    found = [(policy, batch, speed(batch)) for policy, speed in speeds if (batch := load.batch_of(speed))]
    if not found:
        raise ValueError(f"nothing that was measured carries {load.name}; lower the rate, or use a faster machine")
    plain = next((speed / batch for policy, batch, speed in found if policy is None), None)
    choices = [Choice(policy, batch, speed, speed / batch / plain if plain else None) for policy, batch, speed in found]
    return sorted(choices, key=lambda choice: -choice.one_sequence)


@dataclass(frozen=True)
class ForAll:
    """One TALON server for several loads. times_plain: batch -> speed against plain decoding."""

    policy: Talon
    batch_budget: int
    times_plain: dict[int, float]

    @property
    def score(self) -> float:
        return geometric_mean(self.times_plain.values())


def best_for_all(accepted: dict[str, dict], model: CostModel, batches: list[int]) -> ForAll | None:
    """The best tree and batch budget (0: none) for a server that meets all these batch sizes, by the geometric mean of its speeds against
    plain decoding. Only budgets whose trees have all been measured count. None: no TALON tree was measured.
    """
    policies = [policy for policy in map(parse_policy, accepted) if isinstance(policy, Talon)]
    sizes = {policy.config.node_budget for policy in policies} | {1}
    budgets = sorted({0} | {nodes * batch for nodes in sizes for batch in batches})
    found = []
    for policy in policies:
        for budget in budgets:
            speeds = {batch: shared_speed(TalonSettings(policy.config, batch_budget=budget), batch, accepted, model) for batch in batches}
            if None not in speeds.values():
                found.append(ForAll(policy, budget, speeds))
    return max(found, key=lambda one: (round(one.score, 6), -one.batch_budget), default=None)


def shared_speed(settings: TalonSettings, batch: int, accepted: dict[str, dict], model: CostModel) -> float | None:
    """Against plain decoding at that batch; None where the tree of that size has not been measured."""
    tree = settings.tree_for(batch)
    if tree.node_budget == 1:  # neither draft nor extend
        return model.plain_ms(batch) / (model.lines["verify"].at(batch) + model.lines["overhead"].at(batch))
    figure = accepted.get(Talon(tree.node_budget, tree.first_layer_width, tree.depth_cap, tree.gate).name)
    return model.tokens_per_s(figure, tree.node_budget, batch) / model.plain_tokens_per_s(batch) if figure else None


def launch_command(policy: Policy | None, args: argparse.Namespace, batch_budget: int = 0) -> str:
    """What to type; the model folders are the user's to fill in unless they were given."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", args.target]
    if policy is None:
        return shlex.join(words)
    one = served_as(policy)
    words += ["--speculative-algorithm", one.algorithm, "--speculative-draft-model-path", args.head]
    words += ["--speculative-num-draft-tokens", f"{one.nodes}", "--speculative-eagle-topk", f"{one.width}"]
    words += ["--speculative-num-steps", f"{one.steps}"]
    words += [] if one.gate is None else ["--talon-gate", f"{one.gate:g}"]
    return shlex.join(words + (["--talon-batch-budget", f"{batch_budget}"] if batch_budget else []))


def read_acceptance(path: Path, prompt_set: str) -> dict[str, dict]:
    """Policy -> figures over one prompt set. Raises ValueError naming what the file has when it lacks that set."""
    try:
        summary = json.loads(path.read_text())["summary"]
        sets = sorted({name for by_set in summary.values() for name in by_set})
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of eval/accept.py ({error!r}); pass the JSON that its --out named") from error
    found = {policy: by_set[prompt_set] for policy, by_set in summary.items() if prompt_set in by_set}
    if not found:
        raise ValueError(f"--set is {prompt_set!r}, but {path} has {', '.join(sets) or 'no measurement'}; choose one of these")
    return found


def warn_of_differences(accept: dict, cost: dict) -> None:
    """Costs depend on the models and the dtype, accept lengths hardly on the dtype: other models are an error, another dtype is not."""
    for model in ("target", "head"):
        if accept["settings"][model]["fingerprint"] != cost["settings"][model]["fingerprint"]:
            names = accept["settings"][model]["name"], cost["settings"][model]["name"]
            raise ValueError(
                f"the two files were measured with different {model}s ({names[0]} and {names[1]}); measure again with one {model}"
            )


def print_choices(choices: list[Choice], load: Load, top: int) -> None:
    table = Table(title=f"predicted, {load.name}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("policy", "batch", "tokens/s", "a sequence", "x plain"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    shown = choices[:top]
    for choice in [*shown, *(choice for choice in choices[top:] if choice.policy is None)]:
        ratio = "" if choice.times_plain is None else f"{choice.times_plain:.2f}"
        table.add_row(choice.name, f"{choice.batch}", f"{choice.tokens_per_s:.1f}", f"{choice.one_sequence:.1f}", ratio)
    console.print(table)


def print_advice(choices: list[Choice], args: argparse.Namespace) -> None:
    best = choices[0]
    if best.policy is None:
        console.print("Plain decoding is the fastest of what was measured: serve without speculation at this load.")
    else:
        against = "plain decoding cannot carry it" if best.times_plain is None else f"{best.times_plain:.2f} times plain decoding"
        console.print(f"Best: {best.name}, {against} (predicted).")
    console.print(launch_command(best.policy, args), highlight=False, soft_wrap=True, markup=False)
    if confirm := confirm_command(choices, args):
        console.print("To confirm it and its two neighbours on real servers:")
        console.print(confirm, highlight=False, soft_wrap=True, markup=False)


def print_shared(best: ForAll | None, args: argparse.Namespace) -> None:
    if best is None:
        return
    budget = f"with a batch budget of {best.batch_budget}" if best.batch_budget else "without a batch budget"
    speeds = ", ".join(f"{speed:.2f} at batch {batch}" for batch, speed in best.times_plain.items())
    console.print(
        f"One server for all of these loads: {best.policy.name} {budget}, {speeds} times plain decoding (predicted).", highlight=False
    )
    console.print(launch_command(best.policy, args, best.batch_budget), highlight=False, soft_wrap=True, markup=False)


def confirm_command(choices: list[Choice], args: argparse.Namespace) -> str:
    """eval/serve.py (which measures plain decoding too) on the three best TALON settings and the best EAGLE3 setting."""
    served = [served_as(choice.policy) for choice in choices if choice.policy]
    talon = [one for one in served if one.algorithm == "TALON"][:3]
    eagle = [one for one in served if one.algorithm == "EAGLE3"][:1]
    words = ["python", "eval/serve.py", "--target", args.target, "--head", args.head, "--prompts", "PROMPTS"]
    for one in talon:
        words += ["--talon", f"{one.nodes},{one.width},{one.steps},{one.gate:g}"]
    for one in eagle:
        words += ["--eagle3", f"{one.width},{one.steps},{one.nodes}"]
    return shlex.join([*words, "--concurrency", str(choices[0].batch)]) if talon or eagle else ""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", type=Path, required=True, help="JSON of eval/accept.py")
    parser.add_argument("--cost", type=Path, required=True, help="JSON of eval/cost.py, of this machine")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1], help="sequences that decode at the same time (default: 1)")
    parser.add_argument("--rate", type=float, help="requests per second, instead of --batch")
    parser.add_argument("--tokens", type=positive, default=200, help="tokens per answer, with --rate (default: 200)")
    parser.add_argument("--set", default="all", help="prompt set whose accept lengths count (default: all)")
    parser.add_argument("--top", type=positive, default=8, help="rows to show")
    parser.add_argument("--target", default="TARGET", help="for the printed command")
    parser.add_argument("--head", default="HEAD", help="for the printed command")
    args = parser.parse_args(argv)
    if args.rate is not None and args.rate <= 0:
        parser.error(f"--rate is {args.rate:g}: it must be above 0 requests per second")
    return args


if __name__ == "__main__":
    sys.exit(main())
