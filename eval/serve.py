"""Sends the same prompts to SGLang without speculation, with stock EAGLE3 and with TALON, in turn, and compares them."""

import argparse
import contextlib
import itertools
import math
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval.client import Client, RequestError
from eval.prompts import HUB_SETS, PromptSets, UsageError, console, load_sets
from eval.results import Load, ResultsError, ResultsFile, command_without_paths, fingerprint
from eval.servers import RunningServer, ServerError, ServerSpec, serve
from eval.stats import COUNTERS, AnswerRow, Block
from eval.table import print_table
from train.machine import fast_bfloat16_cpu

EXAMPLES = f"""examples:
  # the three servers on a folder of prompt sets, four prompts of each
  python eval/serve.py --target .cache/smollm2-135m-instruct --head runs/quick/head --prompts prompts/ --limit 4 --out results.json

  # two TALON settings against two EAGLE3 settings, fp32 (greedy output must then equal plain decoding)
  python eval/serve.py --target T --head H --prompts chat.jsonl --dtype float32 --talon 16,4 --talon 60,10 --eagle3 4,4,16 --eagle3 10,8,60

  # 1, 2, 4 and 8 requests in flight, greedy and sampled, with times to the first token and between tokens; then a page to look at
  python eval/serve.py --target T --head H --prompts hub --limit 10 --concurrency 1 2 4 8 --temperature 0 1 --stream --trace trace.jsonl
  python eval/report.py results.json --trace trace.jsonl --target T --out report.html

The sets of --prompts hub: {", ".join(HUB_SETS)}.
A rerun with the same --out continues behind what is finished; more servers, concurrencies and temperatures may be added to it.
"""
WARM_UP_TEXTS = ("Name three colours.", "Count from one to ten.", "Write one sentence about rain.")
WARM_UP_TOKENS = 8
START_TIMEOUT_S = 600.0  # the first server is already up when the last one starts
SERVER_GIB = 2.5  # a CPU server of a small model: three processes of about 0.5 GiB, its KV pool, and room
TALON_CONFIG = "N,K[,steps[,mu[,batch budget]]]"
DTYPES = ("auto", "bfloat16", "float16", "float32")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an ended evaluation also ends its servers
    try:
        check_folders(args)
        check_head(args)
        sets = load_sets(args)
        results = open_results(args, sets, sys.argv if argv is None else ["eval/serve.py", *argv])
    except (UsageError, ResultsError) as error:
        return stop(str(error))
    failure = measure_all(args, sets, results)
    if not results.empty:
        try:
            results.save()
        except ResultsError as error:
            failure = failure or str(error)
        print_table(results.body(), console)
        console.print(f"Results: {args.out}")
    return stop(failure) if failure else 0


def measure_all(args: argparse.Namespace, sets: PromptSets, results: ResultsFile) -> str | None:
    """Measures what is missing. Returns one sentence when it had to stop early."""
    specs = server_specs(args)
    try:
        for group in [specs] if in_turn(args, len(specs)) else [[spec] for spec in specs]:
            measure_group(group, sets, results, args)
    except KeyboardInterrupt:
        return f"Interrupted; finished measurements are kept in {args.out}, and the same command continues from there."
    except (ServerError, RequestError, ResultsError) as error:
        if isinstance(error, ServerError) and error.log_tail:
            console.print(error.log_tail, style="dim", markup=False, highlight=False)
        return str(error)
    return None


def in_turn(args: argparse.Namespace, servers: int) -> bool:
    """All servers at once, taking turns? Not on a GPU, whose memory one server takes whole, nor where they do not fit into memory."""
    if args.one_by_one or not ServerSpec(args.target, device=args.device).on_cpu:
        return False
    weights = sum(path.stat().st_size for path in args.target.glob("*.safetensors")) / 2**30
    need, free = servers * (SERVER_GIB + 1.5 * weights), free_memory_gib()
    if need > free:
        console.print(f"{servers} servers at once take about {need:.0f} GiB of memory and {free:.0f} are free: one after the other, then.")
    return need <= free


def free_memory_gib() -> float:
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) / 2**20 if found else math.inf


def measure_group(specs: list[ServerSpec], sets: PromptSets, results: ResultsFile, args: argparse.Namespace) -> None:
    """Starts the servers that have something left to measure, and sends them one block of prompts after the other, in turn.

    An idle server sleeps, so that it takes no time from the one that is asked. Which one is asked first changes from block to block. A
    block counts when all of them have answered it.
    """
    jobs = [job for job in all_jobs(args, sets) if any(job.missing(spec, results) for spec in specs)]
    waiting = [spec for spec in specs if any(job.missing(spec, results) for job in jobs)]
    for spec in specs:
        if spec not in waiting:
            console.print(f"[dim]{spec.name}: already measured[/]")
    if not waiting:
        return
    session = results.sessions + 1
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Asked(spec, args)) for spec in waiting]
        stack.callback(results.save_unfinished)  # before the servers are ended, which takes a while: who sends SIGTERM may be impatient
        progress = stack.enter_context(progress_bars())
        bar = progress.add_task("", total=sum(len(job.prompts) for job in jobs))
        for job in jobs:
            progress.update(bar, description=f"{job.load.key}: {job.set_name}")
            missing = [one for one in servers if job.missing(one.spec, results)]
            first = job.number % len(missing)
            found = [(one, one.ask(job, session)) for one in missing[first:] + missing[:first]]
            for one, block in found:
                results.add(job.load, one.spec, job.set_name, block)
            results.save_now_and_then()
            progress.advance(bar, len(job.prompts))
            if not console.is_terminal and job.last:  # in a log file the bar shows only its end
                console.print(f"{job.load.key}: {job.set_name} finished")


@dataclass(frozen=True)
class Job:
    """A block of a prompt set under one load: the unit in which servers take turns. last: of its set."""

    load: Load
    set_name: str
    number: int
    prompts: list[tuple[str, list[int]]]
    last: bool

    def missing(self, spec: ServerSpec, results: ResultsFile) -> bool:
        return results.finished(self.load, spec.name, self.set_name) <= self.number


def all_jobs(args: argparse.Namespace, sets: PromptSets) -> Iterator[Job]:
    """Blocks in the order in which they are sent. One prompt a block with one request in flight; with c of them 4c, because at the end of
    each block fewer than c are left in flight.
    """
    for temperature, concurrency in itertools.product(args.temperature, args.concurrency):
        size = 1 if concurrency == 1 else 4 * concurrency
        for name, prompts in sets.items():
            for number, start in enumerate(range(0, len(prompts), size)):
                yield Job(Load(concurrency, temperature), name, number, prompts[start : start + size], start + size >= len(prompts))


class Asked:
    """A running server and the way to ask it. A context manager; raises ServerError when the server does not start."""

    def __init__(self, spec: ServerSpec, args: argparse.Namespace):
        self.spec, self.args, self.stack = spec, args, contextlib.ExitStack()

    def __enter__(self):
        with self.stack:
            cut_unfinished_line(self.spec.trace)
            with console.status(f"{self.spec.name}: starting the server"):
                log = self.args.out.with_suffix("") / f"{self.spec.name.replace(' ', '-')}.log"
                self.server = self.stack.enter_context(serve(self.spec, log_path=log, start_timeout_s=START_TIMEOUT_S))
            self.client = self.stack.enter_context(Client(self.server.url))
            with self._reason_of_death():
                self._warm_up()
            self.stack = self.stack.pop_all()
        console.print(f"[dim]{self.spec.name}: up in {self.server.start_s:.0f} s[/]")
        return self

    def __exit__(self, *exc) -> None:
        self.stack.close()

    def ask(self, job: Job, session: int) -> Block:
        """Sends one block and counts. Draft forwards: EAGLE3 runs exactly `steps` a round; TALON counts its own on /metrics."""
        rids = [f"{job.set_name}/{prompt_id} {job.load.key} #{session}" for prompt_id, _ in job.prompts]
        with self._reason_of_death():
            before = self._counters()
            started = time.perf_counter()
            answers = list(self._generate([ids for _, ids in job.prompts], self.args.max_new_tokens, job.load, rids))
            wall_s = time.perf_counter() - started
            after = self._counters()
        rows = [
            AnswerRow(prompt_id, one.tokens, one.rounds, one.latency_s, one.output_ids, one.meta.get("talon"), rounded(one.chunks))
            for (prompt_id, _), one in zip(job.prompts, answers, strict=True)
        ]
        counters = {name: after[name] - before[name] for name in before} or None
        if self.spec.algorithm == "EAGLE3":
            rounds = sum(row.rounds for row in rows)
            counters = {"draft_forwards": self.spec.steps * rounds, "rounds": rounds}
        return Block(session, wall_s, counters, rows)

    def _generate(self, prompts: list[list[int]], tokens: int, load: Load, rids: list[str]):
        return self.client.generate_all(prompts, tokens, load.concurrency, rids=rids, stream=self.args.stream, temperature=load.temperature)

    def _warm_up(self) -> None:
        """Requests that are not counted: the first ones compile kernels and fill caches. Their trees do not stay in the trace."""
        size = self.spec.trace.stat().st_size if self.spec.trace and self.spec.trace.exists() else 0
        busiest = max(self.args.concurrency)
        texts = [WARM_UP_TEXTS[i % len(WARM_UP_TEXTS)] for i in range(max(len(WARM_UP_TEXTS), busiest))]
        prompts = [self.args.tokenizer.encode([text]) for text in texts]
        for temperature in self.args.temperature:
            rids = [f"warm-up {i} T={temperature:g}" for i in range(len(texts))]
            list(self._generate(prompts, WARM_UP_TOKENS, Load(busiest, temperature), rids))
        if self.spec.trace:
            with self.spec.trace.open("ab") as trace:
                trace.truncate(size)

    def _counters(self) -> dict[str, float]:
        """TALON's counters; none elsewhere. Prometheus shows a counter only after its first increment, so a missing one is zero."""
        found = self.client.counters() if self.spec.algorithm == "TALON" else None
        return {} if found is None else {name: found.get(f"talon:{name}_total", 0.0) for name in COUNTERS}

    @contextlib.contextmanager
    def _reason_of_death(self):
        """A failed request of a server that died raises ServerError with the reason from its log instead."""
        try:
            yield
        except RequestError as error:
            raise _reason_it_died(self.server) or error from error


def rounded(chunks: list[tuple[int, float]]) -> list[list[float]] | None:
    return [[tokens, round(seconds, 5)] for tokens, seconds in chunks] or None


def cut_unfinished_line(trace: Path | None) -> None:
    """A server that was killed may have left half a line, and the next one appends."""
    if trace is not None and trace.exists():
        text = trace.read_bytes()
        with trace.open("ab") as file:
            file.truncate(text.rfind(b"\n") + 1)


def server_specs(args: argparse.Namespace) -> list[ServerSpec]:
    shared = {"target": args.target, "dtype": args.dtype, "device": args.device, "threads": args.threads}
    shared |= {"max_running_requests": max(8, *args.concurrency), "extra": tuple(args.server_arg)}
    specs = [ServerSpec(**shared)]
    for width, steps, nodes in args.eagle3:
        specs.append(ServerSpec(**shared, head=args.head, algorithm="EAGLE3", nodes=nodes, width=width, steps=steps))
    for i, config in enumerate(args.talon):
        trace = args.trace if i == 0 else None
        specs.append(ServerSpec(**shared, head=args.head, algorithm="TALON", **config, trace=trace))
    return specs


def open_results(args: argparse.Namespace, sets: PromptSets, command: list[str]) -> ResultsFile:
    settings = {
        "target": {"name": args.target.name, "fingerprint": fingerprint(args.target)},
        "head": {"name": args.head.name, "fingerprint": fingerprint(args.head)},
        "prompts": {name: [prompt_id for prompt_id, _ in prompts] for name, prompts in sets.items()},
        "max_new_tokens": args.max_new_tokens,
        "dtype": args.dtype,
        "device": "cpu" if ServerSpec(args.target, device=args.device).on_cpu else "cuda",
        "threads": args.threads,
        "stream": args.stream,
        "server_args": list(args.server_arg),
    }
    if args.fresh:
        args.out.unlink(missing_ok=True)
    results = ResultsFile(args.out, settings, f"python {command_without_paths(command)}")
    if args.trace and results.empty:
        args.trace.unlink(missing_ok=True)
    return results


def check_folders(args: argparse.Namespace) -> None:
    for flag, folder, need in (("--target", args.target, "config.json"), ("--head", args.head, "model.safetensors")):
        if not (folder / need).exists():
            raise UsageError(f"{flag} {folder} has no {need}; pass a model folder (train/fetch_target.py and train/export.py write them).")


def check_head(args: argparse.Namespace) -> None:
    """Raises UsageError when the head is for another target; a server would say so too, but only after it has started."""
    from talon_sglang import draft_head  # brings torch along, which nothing else here needs

    try:
        draft_head.check_draft_head(args.head, args.target)
    except draft_head.DraftHeadError as error:
        raise UsageError(str(error)) from error


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
    parser.add_argument("--prompts", type=Path, required=True, help="prompt file, a folder with one file per prompt set, or hub")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="only these sets of --prompts")
    parser.add_argument("--limit", type=positive, help="prompts per set (default: all)")
    parser.add_argument("--max-new-tokens", type=positive, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16, but float32 on a CPU without AVX-512")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where an NVIDIA driver is loaded")
    parser.add_argument("--talon", type=talon_config, action="append", metavar=TALON_CONFIG, help="may be repeated (default: 16,4)")
    parser.add_argument("--eagle3", type=eagle3_config, action="append", metavar="K,steps,N", help="may be repeated (default: 4,4,16)")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1], help="requests in flight, one or several (default: 1)")
    parser.add_argument("--temperature", type=temperature, nargs="+", default=[0.0], help="one or several (default: 0, greedy)")
    parser.add_argument(
        "--stream", action="store_true", help="take answers in chunks, and measure times to the first token and between tokens"
    )
    parser.add_argument("--one-by-one", action="store_true", help="one server after the other instead of all in turn (always so on a GPU)")
    parser.add_argument("--threads", type=positive, help="OMP threads of the server (default: PyTorch's own choice)")
    parser.add_argument(
        "--trace", type=Path, help="write the draft trees of the first TALON setting here, for eval/picture.py and eval/report.py"
    )
    parser.add_argument("--server-arg", action="append", default=[], metavar="WORD", help="one more word for the server's command line")
    parser.add_argument("--fresh", action="store_true", help="discard what --out already holds")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    args = parser.parse_args(argv)
    args.dtype = fast_dtype(args.device) if args.dtype == "auto" else args.dtype
    args.talon = args.talon or [talon_config("16,4")]
    args.eagle3 = args.eagle3 or [eagle3_config("4,4,16")]
    for flag in ("talon", "eagle3", "concurrency", "temperature"):
        values = getattr(args, flag)
        if any(value in values[:i] for i, value in enumerate(values)):
            parser.error(f"--{flag} names the same setting twice ({values}); each is measured once, so drop one")
    return args


def fast_dtype(device: str) -> str:
    """bfloat16, but float32 on a CPU without fast bfloat16 products, where verifying a draft crawls."""
    return "bfloat16" if fast_bfloat16_cpu() or not ServerSpec(Path(), device=device).on_cpu else "float32"


def talon_config(text: str) -> dict[str, int | float]:
    """TALON_CONFIG -> fields of ServerSpec; what is left out is the server's default."""
    parts, kinds = text.split(","), {"nodes": int, "width": int, "steps": int, "gate": float, "batch_budget": int}
    if not 2 <= len(parts) <= len(kinds):
        raise argparse.ArgumentTypeError(f"{text!r} is not {TALON_CONFIG}; an example is 16,4 or 60,10,0,0.03")
    try:
        return {name: kind(part) for (name, kind), part in zip(kinds.items(), parts)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} holds something that is no number; an example is 16,4 or 60,10,0,0.03") from None


def eagle3_config(text: str) -> tuple[int, int, int]:
    """K,steps,N -> (width, steps, nodes)."""
    try:
        width, steps, nodes = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not K,steps,N; an example is 4,4,16") from None
    return width, steps, nodes


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no temperature; an example is 0 or 1")
    return value


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
