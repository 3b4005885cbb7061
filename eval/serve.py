"""Sends the same prompts to SGLang without speculation, with stock EAGLE3 and with TALON, one server after the other, and compares them."""

import argparse
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval.client import ChatTokenizer, Client, RequestError
from eval.results import ResultsError, ResultsFile, command_without_paths, fingerprint
from eval.servers import RunningServer, ServerError, ServerSpec, serve
from eval.stats import AnswerRow, SetResult
from eval.table import print_table
from train.data import Prompt, read_prompts

EXAMPLES = """examples:
  # the three servers on six prompt sets, four prompts of each
  python eval/serve.py --target .cache/smollm2-135m-instruct --head runs/quick/head --prompts prompts/ --limit 4 --out results.json

  # two TALON settings against two EAGLE3 settings, fp32 (greedy output must then equal plain decoding)
  python eval/serve.py --target T --head H --prompts chat.jsonl --dtype float32 --talon 16,4 --talon 60,10 --eagle3 4,4,16 --eagle3 10,8,60

A rerun with the same --out continues: finished prompt sets of finished servers are not measured again.
"""
WARM_UP_TEXTS = ("Name three colours.", "Count from one to ten.", "Write one sentence about rain.")
WARM_UP_TOKENS = 8
DTYPES = ("auto", "bfloat16", "float16", "float32")
console = Console()

# Prompt sets: {set name: [(prompt id, input ids), ...]}
PromptSets = dict[str, list[tuple[str, list[int]]]]


class UsageError(RuntimeError):
    """Something about the call is wrong. `str()` is one sentence."""


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an ended evaluation also ends its server
    try:
        check_folders(args)
        sets = load_sets(args)
        results = open_results(args, sets, sys.argv if argv is None else ["eval/serve.py", *argv])
    except (UsageError, ResultsError) as error:
        return stop(str(error))
    failure = measure_all(args, sets, results)
    if results.runs:
        results.save()
        print_table(results.body(), console)
        console.print(f"Results: {args.out}")
    return stop(failure) if failure else 0


def measure_all(args: argparse.Namespace, sets: PromptSets, results: ResultsFile) -> str | None:
    """Measures every server that has unfinished sets. Returns one sentence when it had to stop early; what was finished is on disk."""
    try:
        for spec in server_specs(args):
            todo = {name: prompts for name, prompts in sets.items() if results.get(spec.name, name) is None}
            if not todo:
                console.print(f"[dim]{spec.name}: already measured[/]")
                continue
            measure_server(spec, todo, results, args)
    except KeyboardInterrupt:
        return f"Interrupted; finished prompt sets are kept in {args.out}, and the same command continues from there."
    except (ServerError, RequestError) as error:
        if isinstance(error, ServerError) and error.log_tail:
            console.print(error.log_tail, style="dim", markup=False, highlight=False)
        return str(error)
    return None


def measure_server(spec: ServerSpec, todo: PromptSets, results: ResultsFile, args: argparse.Namespace) -> None:
    """Starts one server, warms it up and measures `todo`, set by set."""
    with contextlib.ExitStack() as stack:
        with console.status(f"{spec.name}: starting the server"):
            server = stack.enter_context(serve(spec, log_path=args.out.with_suffix("") / f"{spec.name.replace(' ', '-')}.log"))
        client = stack.enter_context(Client(server.url))
        progress = stack.enter_context(progress_bars())
        bar = progress.add_task(f"{spec.name} (up in {server.start_s:.0f} s): warm-up", total=sum(map(len, todo.values())))
        try:
            warm_up(client, args)
            if spec.trace is not None:
                spec.trace.write_text("")  # the picture shows measured prompts, not the warm-up
            for name, prompts in todo.items():
                progress.update(bar, description=f"{spec.name}: {name}")
                result = measure_set(spec, client, prompts, args, lambda: progress.advance(bar))
                results.add(spec, name, result)
                if not console.is_terminal:  # in a log file the bar shows only its end
                    console.print(f"{spec.name}: {name}, {len(prompts)} prompts in {result.wall_s:.0f} s")
        except RequestError as error:
            server_died = _reason_it_died(server)
            raise server_died or error from error


def measure_set(spec: ServerSpec, client: Client, prompts: list[tuple[str, list[int]]], args: argparse.Namespace, advance) -> SetResult:
    """Sends one prompt set and counts. Draft forwards: EAGLE3 runs exactly `steps` a round; TALON counts its own on /metrics."""
    before = client.counters() if spec.algorithm == "TALON" else {}
    started = time.perf_counter()
    answers = []
    replies = client.generate_all([ids for _, ids in prompts], args.max_new_tokens, args.concurrency)
    for (prompt_id, _), answer in zip(prompts, replies, strict=True):
        answers.append(AnswerRow(prompt_id, answer.tokens, answer.rounds, answer.latency_s, answer.output_ids))
        advance()
    wall_s = time.perf_counter() - started
    if spec.algorithm == "TALON":
        after = client.counters()
        grown = {name: talon_counter(after, name) - talon_counter(before, name) for name in ("draft_forwards", "rounds", "degraded_rounds")}
        return SetResult(wall_s, grown["draft_forwards"], grown["rounds"], grown["degraded_rounds"], answers)
    if spec.algorithm == "EAGLE3":
        rounds = sum(row.rounds for row in answers)
        return SetResult(wall_s, spec.steps * rounds, rounds, None, answers)
    return SetResult(wall_s, None, None, None, answers)


def talon_counter(counters: dict[str, float], name: str) -> float:
    """Prometheus shows a counter only after its first increment, so a missing one is zero."""
    return counters.get(f"talon:{name}_total", 0.0)


def warm_up(client: Client, args: argparse.Namespace) -> None:
    """Requests that are not counted: the first ones compile kernels and fill caches. As concurrent as the measurement."""
    texts = [WARM_UP_TEXTS[i % len(WARM_UP_TEXTS)] for i in range(max(len(WARM_UP_TEXTS), args.concurrency))]
    list(client.generate_all([args.tokenizer.encode([text]) for text in texts], WARM_UP_TOKENS, args.concurrency))


def server_specs(args: argparse.Namespace) -> list[ServerSpec]:
    shared = {"target": args.target, "dtype": args.dtype, "device": args.device, "threads": args.threads}
    shared |= {"max_running_requests": max(8, args.concurrency), "extra": tuple(args.server_arg)}
    specs = [ServerSpec(**shared)]
    for width, steps, nodes in args.eagle3:
        specs.append(ServerSpec(**shared, head=args.head, algorithm="EAGLE3", nodes=nodes, width=width, steps=steps))
    for i, (nodes, width, steps, gate) in enumerate(args.talon):
        trace = args.trace if i == 0 else None
        specs.append(ServerSpec(**shared, head=args.head, algorithm="TALON", nodes=nodes, width=width, steps=steps, gate=gate, trace=trace))
    return specs


def load_sets(args: argparse.Namespace) -> PromptSets:
    """A folder gives one set a file, a file one set a category. Prompts that do not fit the target's context are left out and counted."""
    if args.prompts.is_dir():
        files = sorted(path for path in args.prompts.iterdir() if path.suffix in (".jsonl", ".json", ".txt"))
        named = {path.stem: read_prompts(path, args.limit) for path in files}
    elif args.prompts.is_file():
        named = {}
        for prompt in read_prompts(args.prompts):
            chosen = named.setdefault(args.prompts.stem if prompt.category in ("", "none") else prompt.category, [])
            if args.limit is None or len(chosen) < args.limit:
                chosen.append(prompt)
    else:
        raise UsageError(f"--prompts {args.prompts} does not exist; pass a prompt file or a folder of them.")
    args.tokenizer = ChatTokenizer(args.target)
    context = json.loads((args.target / "config.json").read_text()).get("max_position_embeddings", 2048)
    sets = {name: encode(name, prompts, args.tokenizer, context - args.max_new_tokens) for name, prompts in named.items()}
    sets = {name: prompts for name, prompts in sets.items() if prompts}
    if not sets:
        raise UsageError(f"--prompts {args.prompts} holds no usable prompt; each row needs a user turn (see docs/evaluation.md).")
    return sets


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


def open_results(args: argparse.Namespace, sets: PromptSets, command: list[str]) -> ResultsFile:
    settings = {
        "target": {"name": args.target.name, "fingerprint": fingerprint(args.target)},
        "head": {"name": args.head.name, "fingerprint": fingerprint(args.head)},
        "prompts": {name: [prompt_id for prompt_id, _ in prompts] for name, prompts in sets.items()},
        "max_new_tokens": args.max_new_tokens,
        "dtype": args.dtype,
        "concurrency": args.concurrency,
        "threads": args.threads,
        "server_args": list(args.server_arg),
    }
    if args.fresh:
        args.out.unlink(missing_ok=True)
    return ResultsFile(args.out, settings, command_without_paths(command))


def check_folders(args: argparse.Namespace) -> None:
    for flag, folder, need in (("--target", args.target, "config.json"), ("--head", args.head, "model.safetensors")):
        if not (folder / need).exists():
            raise UsageError(f"{flag} {folder} has no {need}; pass a model folder (train/fetch_target.py and train/export.py write them).")


def progress_bars() -> Progress:
    times = (TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times, console=console)


def _reason_it_died(server: RunningServer) -> ServerError | None:
    """A request often fails a moment before the process is gone; only then does its log hold the reason."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            server.check_alive()
        except ServerError as death:
            return death
        time.sleep(0.2)
    return None


def stop(sentence: str) -> int:
    """Say why an evaluation ends early -> exit status."""
    console.print(sentence, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target model folder (Hugging Face layout)")
    parser.add_argument("--head", type=Path, required=True, help="EAGLE-3 head folder (SGLang layout)")
    parser.add_argument("--prompts", type=Path, required=True, help="prompt file, or a folder with one file per prompt set")
    parser.add_argument("--limit", type=positive, help="prompts per set (default: all)")
    parser.add_argument("--max-new-tokens", type=positive, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16, but float32 on a CPU without AVX-512")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where an NVIDIA driver is loaded")
    parser.add_argument("--talon", type=talon_config, action="append", metavar="N,K[,steps[,mu]]", help="may be repeated (default: 16,4)")
    parser.add_argument("--eagle3", type=eagle3_config, action="append", metavar="K,steps,N", help="may be repeated (default: 4,4,16)")
    parser.add_argument("--concurrency", type=positive, default=1, help="requests in flight")
    parser.add_argument("--threads", type=positive, help="OMP threads of the server (default: PyTorch's own choice)")
    parser.add_argument("--trace", type=Path, help="write the draft trees of the first TALON setting here, for eval/picture.py")
    parser.add_argument("--server-arg", action="append", default=[], metavar="WORD", help="one more word for the server's command line")
    parser.add_argument("--fresh", action="store_true", help="discard what --out already holds")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    args = parser.parse_args(argv)
    args.dtype = fast_dtype(args.device) if args.dtype == "auto" else args.dtype
    args.talon = args.talon or [talon_config("16,4")]
    args.eagle3 = args.eagle3 or [eagle3_config("4,4,16")]
    return args


def fast_dtype(device: str) -> str:
    """bfloat16, but float32 on a CPU without AVX-512, where PyTorch has no fast bfloat16 matrix product and verifying a draft crawls."""
    cpuinfo = Path("/proc/cpuinfo")
    slow_bfloat16 = not cpuinfo.exists() or "avx512" not in cpuinfo.read_text()
    return "float32" if slow_bfloat16 and ServerSpec(Path(), device=device).on_cpu else "bfloat16"


def talon_config(text: str) -> tuple[int, int, int | None, float | None]:
    """N,K[,steps[,mu]] -> (nodes, width, steps, gate); what is left out is the server's default."""
    parts = text.split(",")
    if not 2 <= len(parts) <= 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,K[,steps[,mu]]; an example is 16,4 or 60,10,0,0.03")
    try:
        return int(parts[0]), int(parts[1]), int(parts[2]) if len(parts) > 2 else None, float(parts[3]) if len(parts) > 3 else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} holds something that is no number; an example is 16,4 or 60,10,0,0.03") from None


def eagle3_config(text: str) -> tuple[int, int, int]:
    """K,steps,N -> (width, steps, nodes)."""
    try:
        width, steps, nodes = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not K,steps,N; an example is 4,4,16") from None
    return width, steps, nodes


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
