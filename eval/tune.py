"""Chooses TALON's settings for a load from what was measured: eval/accept.py's accept lengths and eval/cost.py's costs."""

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eval.cost_model import CostModel
from eval.policies import Chain, Eagle, Policy, Talon, parse_policy
from eval.serve import console, positive

EXAMPLES = """examples:
  # what to measure first: a grid of settings, and the costs of this machine
  python eval/accept.py --target T --head H --prompts P --policy talon:8,2 --policy talon:16,4 --policy talon:16,4,10,0.1 --out accept.json
  python eval/cost.py --target T --head H --out cost.json

  python eval/tune.py --accept accept.json --cost cost.json --batch 1
  python eval/tune.py --accept accept.json --cost cost.json --batch 1 4 16 --set gsm8k
"""


@dataclass(frozen=True)
class Choice:
    """A policy at a batch size. tokens_per_s: of all sequences together; times_plain: against plain decoding at the same batch size."""

    policy: Policy | None  # None: plain decoding
    tokens_per_s: float
    times_plain: float

    @property
    def name(self) -> str:
        return self.policy.name if self.policy else "plain"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        accepted = read_acceptance(args.accept, args.set)
        model = CostModel.read(args.cost)
        warn_of_differences(json.loads(args.accept.read_text()), json.loads(args.cost.read_text()))
        for batch in args.batch:
            choices = ranked(accepted, model, batch)
            print_choices(choices, batch, args.top)
            print_advice(choices, args)
    except (ValueError, OSError) as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def ranked(accepted: dict[str, dict], model: CostModel, batch: int) -> list[Choice]:
    """All policies that SGLang or TALON can serve, and plain decoding, the fastest first."""
    plain = model.plain_tokens_per_s(batch)
    choices = [Choice(None, plain, 1.0)]
    for name, figure in accepted.items():
        policy = parse_policy(name)
        if (nodes := served_nodes(policy)) is not None:
            speed = model.tokens_per_s(figure, nodes, batch, full_extend=not isinstance(policy, Talon))
            choices.append(Choice(policy, speed, speed / plain))
    return sorted(choices, key=lambda choice: -choice.tokens_per_s)


def served_nodes(policy: Policy) -> int | None:
    """N of a policy that can be served; None for those that exist only offline (OPT-Tree, EAGLE3 with exact ancestors at K > 1)."""
    if isinstance(policy, Talon):
        return policy.config.node_budget
    if isinstance(policy, Chain):
        return policy.steps + 1
    if isinstance(policy, Eagle) and policy.approximate:
        return policy.nodes
    return None


def launch_command(policy: Policy | None, args: argparse.Namespace) -> str:
    """What to type; the model folders are the user's to fill in unless they were given."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", args.target]
    if policy is None:
        return shlex.join(words)
    if isinstance(policy, Talon):
        config = policy.config
        algorithm, width, steps, nodes = "TALON", config.first_layer_width, config.depth_cap, config.node_budget
    elif isinstance(policy, Chain):
        algorithm, width, steps, nodes = "EAGLE3", 1, policy.steps, policy.steps + 1
    else:
        algorithm, width, steps, nodes = "EAGLE3", policy.width, policy.steps, policy.nodes
    words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", args.head]
    words += ["--speculative-num-draft-tokens", str(nodes), "--speculative-eagle-topk", str(width), "--speculative-num-steps", str(steps)]
    return shlex.join(words + (["--talon-gate", f"{policy.config.gate:g}"] if isinstance(policy, Talon) else []))


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


def print_choices(choices: list[Choice], batch: int, top: int) -> None:
    table = Table(title=f"predicted, batch {batch}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("policy", "tokens/s", "x plain"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    shown = choices[:top]
    for choice in [*shown, *(choice for choice in choices[top:] if choice.policy is None)]:
        table.add_row(choice.name, f"{choice.tokens_per_s:.1f}", f"{choice.times_plain:.2f}")
    console.print(table)


def print_advice(choices: list[Choice], args: argparse.Namespace) -> None:
    best = choices[0]
    if best.policy is None:
        console.print("Plain decoding is the fastest of what was measured: serve without speculation at this load.")
    else:
        console.print(f"Best: {best.name}, {best.times_plain:.2f} times plain decoding (predicted).")
    console.print(launch_command(best.policy, args), highlight=False, soft_wrap=True, markup=False)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", type=Path, required=True, help="JSON of eval/accept.py")
    parser.add_argument("--cost", type=Path, required=True, help="JSON of eval/cost.py, of this machine")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1], help="sequences that decode at the same time (default: 1)")
    parser.add_argument("--set", default="all", help="prompt set whose accept lengths count (default: all)")
    parser.add_argument("--top", type=positive, default=8, help="rows to show")
    parser.add_argument("--target", default="TARGET", help="for the printed command")
    parser.add_argument("--head", default="HEAD", help="for the printed command")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
