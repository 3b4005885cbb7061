"""Holds the accept lengths of eval/accept.py against real SGLang servers, prompt by prompt.

At temperature 0 both sides decode the same answer, so they must take the same number of rounds for it. Above 0 each side draws its own
answers, and the mean accept lengths must agree.
"""

import argparse
import contextlib
import signal
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eval.accept import as_argument
from eval.accept_file import AcceptFile
from eval.agree_file import AgreeFile, Agreement, Reply
from eval.client import Client, RequestError
from eval.policies import Policy, parse_policy
from eval.policies.served import Served, served_as
from eval.results import ResultsError, command_without_paths, fingerprint
from eval.serve import PromptSets, UsageError, check_folders, console, load_sets, positive, progress_bars, stop
from eval.servers import ServerError, ServerSpec, serve

EXAMPLES = """examples:
  # what eval/accept.py measured, against one server per policy
  python eval/accept.py --target T --head H --prompts P --policy talon:16,4 --policy chain:4 --out accept.json
  python eval/agree.py --target T --head H --prompts P --accept accept.json --out agree.json

  # one policy only, in single requests
  python eval/agree.py --target T --head H --prompts P --accept accept.json --policy talon:16,4 --concurrency 1

The exit status is 1 when an accept length differs by more than --tolerance. A rerun with the same --out sends only what is missing.
"""
TOLERANCES = {"greedy": 0.02, "sampled": 0.05}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_folders(args)
        offline = read_offline(args)
        policies = servable(args, offline)
        sets = prompts_of(args, offline)
        served = open_file(args, offline, sys.argv if argv is None else ["eval/agree.py", *argv])
        failure = ask_all(args, policies, sets, served)
        agreements = {policy.name: served.agreement(policy.name, offline) for policy in policies if served.replies.get(policy.name)}
        served.save(agreements)
    except (UsageError, ResultsError, ValueError, OSError) as error:
        return stop(str(error))
    print_agreements(agreements, args.tolerance)
    apart = [name for name, one in agreements.items() if abs(one.difference) > args.tolerance]
    if apart and not failure:
        failure = f"{', '.join(apart)}: the served accept length differs by more than {args.tolerance:.0%} from the offline one."
    return stop(failure) if failure else 0


def ask_all(args: argparse.Namespace, policies: list[Policy], sets: PromptSets, served: AgreeFile) -> str | None:
    """One server after the other. Returns one sentence when it had to stop early; the answers so far are on disk."""
    try:
        for policy in policies:
            ask(args, policy, sets, served)
    except KeyboardInterrupt:
        return f"Interrupted; answers so far are kept in {args.out} (and compared above), and the same command continues from there."
    except (ServerError, RequestError) as error:
        if isinstance(error, ServerError):
            console.print(error.log_tail, style="dim", markup=False, highlight=False)
        return str(error)
    return None


def ask(args: argparse.Namespace, policy: Policy, sets: PromptSets, served: AgreeFile) -> None:
    """Sends what the policy's server has not answered yet; every answer is kept at once."""
    known = served.replies.setdefault(policy.name, {})
    todo = [(name, prompt, ids) for name, prompts in sets.items() for prompt, ids in prompts if prompt not in known.get(name, {})]
    todo.sort(key=lambda one: len(one[2]))  # short prompts first: a run that is stopped early has compared many
    if not todo:
        return
    spec = server_spec(args, served_as(policy))
    with contextlib.ExitStack() as stack:
        with console.status(f"{policy.name}: starting the server"):
            server = stack.enter_context(serve(spec, log_path=args.out.with_suffix("") / f"{policy.name.replace(':', '-')}.log"))
        client, progress = stack.enter_context(Client(server.url)), stack.enter_context(progress_bars())
        bar = progress.add_task(policy.name, total=len(todo))
        try:
            for (name, prompt, _), answer in zip(todo, answers(client, [ids for _, _, ids in todo], args)):
                known.setdefault(name, {})[prompt] = Reply(answer.output_ids, answer.rounds)
                served.save()
                progress.advance(bar)
        except RequestError:
            server.check_alive()
            raise


def answers(client: Client, prompts: list[list[int]], args: argparse.Namespace):
    whole = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}  # nothing but the temperature shapes the distribution, as offline
    return client.generate_all(prompts, args.max_new_tokens, args.concurrency, temperature=args.temperature, **whole)


def server_spec(args: argparse.Namespace, served: Served) -> ServerSpec:
    room = {"max_running_requests": max(8, args.concurrency), "threads": args.threads, "device": args.device}
    return ServerSpec(args.target, args.head, dtype=args.dtype, **asdict(served), **room)


# ------------------------------------------------------------ what to compare


def read_offline(args: argparse.Namespace) -> AcceptFile:
    """accept.json; its settings are the servers' too. Raises ResultsError when it is of other models."""
    offline = AcceptFile.read(args.accept)
    for flag, folder in (("target", args.target), ("head", args.head)):
        if offline.settings[flag]["fingerprint"] != fingerprint(folder):
            raise ResultsError(f"--{flag} {folder} is not the {flag} that {args.accept} was measured with; pass that one.")
    if offline.settings["samples"] != 1:
        raise ResultsError(f"{args.accept} has {offline.settings['samples']} answers a prompt; measure it with --samples 1.")
    args.max_new_tokens, args.temperature, args.dtype = (offline.settings[name] for name in ("max_new_tokens", "temperature", "dtype"))
    args.tolerance = args.tolerance or TOLERANCES["sampled" if args.temperature else "greedy"]
    return offline


def servable(args: argparse.Namespace, offline: AcceptFile) -> list[Policy]:
    """The policies to serve: those asked for, or all of accept.json that a server can run. Raises UsageError when none is left."""
    policies = args.policy or [parse_policy(name) for name in offline.tallies if served_as(parse_policy(name))]
    for policy in policies:
        if policy.name not in offline.tallies:
            raise UsageError(
                f"--policy {policy.name} is not in {args.accept}, which has {', '.join(offline.tallies)}; measure it there first."
            )
        if served_as(policy) is None:
            raise UsageError(f"--policy {policy.name} exists only offline, no server runs it; choose another one.")
    if args.temperature and ServerSpec(args.target, device=args.device).on_cpu:
        for policy in [one for one in policies if served_as(one).algorithm != "TALON"]:
            console.print(
                f"{policy.name} is left out: stock SGLang verifies by argmax on a CPU, whatever the temperature.", highlight=False
            )
            policies.remove(policy)
    if not policies:
        raise UsageError(f"{args.accept} has no policy that can be compared here; measure talon:N,K with eval/accept.py.")
    return policies


def prompts_of(args: argparse.Namespace, offline: AcceptFile) -> PromptSets:
    """The ids of all prompts of accept.json. Raises UsageError when --prompts lacks some."""
    wanted = offline.settings["prompts"]
    sets = {name: [pair for pair in prompts if pair[0] in set(wanted.get(name, []))] for name, prompts in load_sets(args).items()}
    for name, ids in wanted.items():
        if len(sets.get(name, [])) < len(ids):
            raise UsageError(
                f"--prompts {args.prompts} has {len(sets.get(name, []))} of the {len(ids)} prompts of set {name}; pass the same."
            )
    return {name: sets[name] for name in wanted}


def open_file(args: argparse.Namespace, offline: AcceptFile, command: list[str]) -> AgreeFile:
    settings = {**offline.settings, "concurrency": args.concurrency, "threads": args.threads}
    if args.fresh:
        args.out.unlink(missing_ok=True)
    return AgreeFile(args.out, settings, command_without_paths(command))


# ------------------------------------------------------------ the table


def print_agreements(agreements: dict[str, Agreement], tolerance: float) -> None:
    table = Table(
        title=f"offline and served, tolerance {tolerance:.0%}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in ("policy", "prompts", "same answer", "same rounds", "offline", "±", "served", "±", "difference"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for name, one in agreements.items():
        same = ["", ""] if one.same_answer is None else [f"{one.same_answer}", f"{one.same_rounds}"]
        errors = ["" if error is None else f"{error:.3f}" for error in (one.offline_error, one.served_error)]
        lengths = f"{one.offline:.3f}", errors[0], f"{one.served:.3f}", errors[1]
        table.add_row(name, f"{one.prompts}", *same, *lengths, f"{one.difference:+.1%}")
    console.print(table)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target model folder")
    parser.add_argument("--head", type=Path, required=True, help="EAGLE-3 head folder")
    parser.add_argument("--prompts", type=Path, required=True, help="what eval/accept.py was given")
    parser.add_argument("--accept", type=Path, required=True, help="its JSON; tokens, temperature and dtype come from it")
    parser.add_argument(
        "--policy", type=as_argument(parse_policy), action="append", metavar="NAME:ARGS", help="default: all that can be served"
    )
    parser.add_argument("--limit", type=positive, help="as eval/accept.py was given it (default: all prompts)")
    parser.add_argument("--concurrency", type=positive, default=4, help="requests in flight (default: 4)")
    parser.add_argument("--threads", type=positive, default=1, help="OMP threads of a server (default: 1)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tolerance", type=float, help="largest difference, as a share (default: 0.02, above temperature 0: 0.05)")
    parser.add_argument("--fresh", action="store_true", help="discard what --out already holds")
    parser.add_argument("--out", type=Path, default=Path("agree.json"))
    parser.set_defaults(limit=None)  # load_sets wants it; the prompts that count are those of accept.json
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
