"""Measures the paper's comparisons and ablations in one go, without a server: see eval/ablations.py for the grid.

All policies draft along the same answers of the target, so their differences are paired by prompt and far less noisy than the accept
lengths themselves.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.markdown import Markdown

from eval.ablate_tables import markdown, plot, table_json, write
from eval.ablations import ABLATIONS, Ablation
from eval.accept import all_jobs, measure, open_results, parse_measurement
from eval.accept_file import AcceptFile
from eval.cost_model import CostModel
from eval.policies import parse_policy
from eval.results import ResultsError
from eval.serve import UsageError, check_folders, console, load_sets, stop
from talon_sglang.draft_head import DraftHeadError, check_draft_head

EXAMPLES = f"""ablations: {", ".join(f"{one.name} ({len(one.rows)} policies)" for one in ABLATIONS.values())}

examples:
  # the whole grid on ten prompts of each set
  python eval/ablate.py --target .cache/smollm2-135m-instruct --head HEAD --prompts PROMPTS --limit 10 --out ablations

  # one ablation, with the speed that the costs of this machine predict
  python eval/ablate.py --target T --head H --prompts P --limit 10 --only gate --cost cost.json --out ablations

--out is a folder: accept.json (as eval/accept.py writes it), tables.md, tables.json and one picture an ablation. A rerun continues.
"""


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [one for one in ABLATIONS.values() if not args.only or one.name in args.only]
    args.policy = list({policy.name: policy for one in chosen for row in one.rows if (policy := parse_policy(row.policy))}.values())
    folder, args.out = args.out, args.out / "accept.json"
    try:
        check_folders(args)
        check_draft_head(args.head, args.target)
        costs = CostModel.read(args.cost) if args.cost else None
        jobs = all_jobs(load_sets(args), args)
        results = open_results(args, jobs, sys.argv if argv is None else ["eval/ablate.py", *argv])
        failure = measure(args, jobs, results)
        report(chosen, results, costs, folder)
    except (UsageError, ResultsError, DraftHeadError, ValueError, OSError) as error:
        return stop(str(error))
    return stop(failure) if failure else 0


def report(chosen: list[Ablation], results: AcceptFile, costs: CostModel | None, folder: Path) -> None:
    """Tables of what is there: after an interruption, over the prompts that all policies of an ablation have."""
    tables = {one.name: rows for one in chosen if (rows := table_json(one, results, costs))}
    chosen = [one for one in chosen if one.name in tables]
    text = markdown(chosen, tables, results)
    write(folder, text, tables, results)
    for one in chosen:
        plot(one, tables[one.name], folder / f"{one.name}.png")
    console.print(Markdown(text) if console.is_terminal else text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Tables and pictures: {folder}")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ABLATIONS), help="ablations to measure (default: all)")
    parser.add_argument("--cost", type=Path, help="JSON of eval/cost.py: adds the predicted speed at batch 1")
    parser.add_argument("--out", type=Path, default=Path("ablations"), help="folder (default: ablations)")
    return parse_measurement(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
