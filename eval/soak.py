"""Mixed traffic for minutes on end, with broken-off and malformed requests: does memory stay flat, and is the KV pool empty afterwards?"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import psutil
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from eval.client import Client, RequestError
from eval.serve import UsageError, check_folders, console, positive, stop
from eval.servers import RunningServer, ServerError, ServerSpec, serve

EXAMPLES = """examples:
  python eval/soak.py --target .cache/smollm2-135m-instruct --head runs/quick/head --minutes 10
  python eval/soak.py --target T --head H --minutes 60 --concurrency 16 --pool 2000 --out soak.jsonl

Ends with status 1 if the server died, answered wrongly formed requests with anything but a 4xx, or held KV slots when idle.
"""
SAMPLE_S = 10.0
WARM_UP = 0.25  # the share of the run after which growth counts: pools and caches are first touched before
RULES = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "sampling_seed": 7},
    {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0, "n": 2},
)
MALFORMED = ({"input_ids": []}, {"input_ids": [10**9]}, {"input_ids": [1], "sampling_params": {"temperature": -1}})


@dataclass(frozen=True)
class Sample:
    """One look at the server. `rss_mb` sums the memory of all its processes; `pool` is the share of KV slots in use."""

    minute: float
    rss_mb: float
    files: int
    threads: int
    running: float
    pool: float


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_folders(args)
        samples, counts, leftover = soak(args)
    except KeyboardInterrupt:
        return stop("Interrupted.")
    except (UsageError, ServerError, RequestError, OSError) as error:
        return stop(str(error))
    if args.out:
        part = args.out.with_name(args.out.name + ".part")
        part.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))
        part.rename(args.out)
    print_report(samples, counts)
    if counts["wrong"] or counts["lost"] or leftover > 0:
        failed = f"{counts['wrong']} requests were answered wrongly, {counts['lost']} not at all"
        return stop(f"{failed}, and {max(leftover, 0):g} KV slots leaked.")
    return 0


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--head", type=Path, required=True, help="folder of the EAGLE-3 head")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the traffic (default 10)")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests in flight (default 8)")
    parser.add_argument("--pool", type=positive, default=900, help="KV slots; small ones force retraction (default 900)")
    parser.add_argument("--nodes", type=positive, default=12, help="node budget N (default 12)")
    parser.add_argument("--width", type=positive, default=4, help="first-layer width K (default 4)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default 0)")
    parser.add_argument("--out", type=Path, help="write the samples here, one JSON line each")
    return parser.parse_args(argv)


def soak(args) -> tuple[list[Sample], Counter, float]:
    """(samples, how requests ended, KV slots in use afterwards beyond those that one small request takes)."""
    extra = ("--schedule-conservativeness", "0.1", "--context-length", "512")
    spec = ServerSpec(
        args.target,
        args.head,
        "TALON",
        nodes=args.nodes,
        width=args.width,
        dtype=args.dtype,
        threads=1,
        max_total_tokens=args.pool,
        max_running_requests=2 * args.concurrency,
        extra=extra,
    )
    vocab = json.loads((args.target / "config.json").read_text())["vocab_size"]
    counts: Counter = Counter()
    log = Path(tempfile.mkdtemp(prefix="soak-")) / "server.log"
    with serve(spec, log_path=log) as server, Client(server.url) as client:
        until = time.monotonic() + args.minutes * 60
        users = range(args.seed, args.seed + args.concurrency)
        workers = [threading.Thread(target=traffic, args=(client, vocab, until, user, counts), daemon=True) for user in users]
        for worker in workers:
            worker.start()
        samples = watch(server, client, args.minutes)
        for worker in workers:
            worker.join()
        leftover = slots_left(client) - 2 * args.nodes - 2
        samples.append(look(server, client, args.minutes))
        server.check_alive()
    shutil.rmtree(log.parent)
    return samples, counts, leftover


# ---------------------------------------------------------------- traffic


def traffic(client: Client, vocab: int, until: float, seed: int, counts: Counter) -> None:
    """One user: a request after the other, of every kind. A lost connection ends it; the main thread reports a dead server."""
    draw = random.Random(seed)
    with httpx.Client(base_url=client.url, timeout=120, trust_env=False) as http:
        while time.monotonic() < until:
            length = draw.randint(1, 120)
            # SGLang reserves the whole length for a request that ignores the end of text, and guesses otherwise, which leads to retraction.
            whole = draw.choice(({"ignore_eos": True}, {"min_new_tokens": length}))
            body = {
                "input_ids": [draw.randrange(vocab) for _ in range(draw.randint(1, 100))],
                "sampling_params": {"max_new_tokens": length} | whole | draw.choice(RULES),
                "return_logprob": draw.random() < 0.2,
            }
            try:
                counts[send(http, body, draw, counts)] += 1
            except httpx.HTTPError:
                counts["lost"] += 1
                return


def send(http: httpx.Client, body: dict, draw: random.Random, counts: Counter) -> str:
    """How the request ended: 'whole', 'broken off', 'refused' or 'wrong'; those of `counts["retracted"]` are among the whole ones."""
    kind = draw.random()
    if kind < 0.05:
        refused = http.post("/generate", json=draw.choice(MALFORMED))
        return "refused" if 400 <= refused.status_code < 500 else "wrong"
    if kind < 0.25:
        last = draw.randint(0, 30)
        with http.stream("POST", "/generate", json=body | {"stream": True}) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number >= last:
                    return "broken off"
        return "whole"
    response = http.post("/generate", json=body)
    if response.status_code != 200:
        return "wrong"
    answers = response.json() if isinstance(response.json(), list) else [response.json()]
    counts["retracted"] += sum(1 for answer in answers if answer["meta_info"].get("num_retractions"))
    wanted = body["sampling_params"]["max_new_tokens"]
    return "whole" if all(len(answer["output_ids"]) == wanted for answer in answers) else "wrong"


# ---------------------------------------------------------------- what is looked at


def watch(server: RunningServer, client: Client, minutes: float) -> list[Sample]:
    started, samples = time.monotonic(), []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("soaking", total=minutes)
        while (minute := (time.monotonic() - started) / 60) < minutes:
            server.check_alive()
            samples.append(look(server, client, minute))
            progress.update(bar, completed=minute, description=f"soaking, {samples[-1].rss_mb:.0f} MB")
            time.sleep(min(SAMPLE_S, max(0.0, minutes * 60 - (time.monotonic() - started))))
    return samples


def look(server: RunningServer, client: Client, minute: float) -> Sample:
    parent = psutil.Process(server.pid)
    rss, files, threads = 0, 0, 0
    for process in (parent, *parent.children(recursive=True)):
        rss += process.memory_info().rss
        files += process.num_fds()
        threads += process.num_threads()
    gauges = client.counters()
    return Sample(minute, rss / 2**20, files, threads, gauges.get("sglang:num_running_reqs", 0.0), gauges.get("sglang:token_usage", 0.0))


def slots_left(client: Client) -> float:
    """KV slots in use once nothing runs and the prefix cache is empty, by the gauge that the batch of one small request writes."""
    for _ in range(100):
        if httpx.post(client.url + "/flush_cache", timeout=60, trust_env=False).status_code == 200:
            break
        time.sleep(0.1)
    client.generate([1], 1)
    time.sleep(3.0)  # an idle scheduler checks its own books, and ends with an error when KV slots or request rows are missing
    return client.counters()["sglang:num_used_tokens"]


def print_report(samples: list[Sample], counts: Counter) -> None:
    table = Table(box=SIMPLE_HEAD)
    for name in ("minute", "memory, MB", "open files", "threads", "running", "KV pool"):
        table.add_column(name, justify="right")
    for sample in samples[:: max(1, len(samples) // 12)] + samples[-1:]:
        memory = f"{sample.rss_mb:.1f}", str(sample.files), str(sample.threads)
        table.add_row(f"{sample.minute:.1f}", *memory, f"{sample.running:g}", f"{sample.pool:.0%}")
    console.print(table)
    console.print("requests: " + ", ".join(f"{count} {end}" for end, count in sorted(counts.items())))
    late = samples[int(len(samples) * WARM_UP) :]
    if len(late) > 2:
        slope, _ = linear_regression([s.minute for s in late], [s.rss_mb for s in late])
        ends = f"{late[0].rss_mb:.1f} to {late[-1].rss_mb:.1f} MB"
        console.print(f"memory after the first {WARM_UP:.0%} of the time: {ends}, {slope:+.2f} MB a minute")


if __name__ == "__main__":
    sys.exit(main())
