"""Measures, inside real servers on this machine, what each part of a round costs, and fits a line to each part."""

import argparse
import json
import signal
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eval.client import ChatTokenizer, Client, RequestError
from eval.cost_model import PARTS, CostModel, Sample
from eval.results import ResultsError, command_without_paths, fingerprint, machine, versions
from eval.serve import DTYPES, UsageError, check_folders, console, fast_dtype, positive, stop
from eval.servers import ServerError, ServerSpec, serve
from train.paths import write_whole

EXAMPLES = """examples:
  python eval/cost.py --target .cache/smollm2-135m-instruct --head runs/quick/head --out cost.json --plot cost.png
  python eval/cost.py --target T --head H --nodes 8 16 32 60 --batches 1 2 4 8 16 --dtype float32 --threads 1

A rerun with the same --out measures only what is missing. eval/tune.py reads the file.
"""
TIMED_SERVER = Path(__file__).resolve().parent / "timed_server.py"
FORWARDS = {
    "target decode": "plain",
    "target target_verify": "verify",
    "draft decode": "draft",
    "draft draft_extend_v2": "extend",
}
PROMPT = "Write a long story about a lighthouse keeper and the sea."
LEAST = 3  # measurements of a size, or it is not used
ROUNDS = 12  # decode rounds of each batch size, at least


@dataclass(frozen=True)
class Setting:
    """One server and one batch size; `nodes` None: plain decoding."""

    nodes: int | None
    batch: int

    @property
    def key(self) -> str:
        return f"{'plain' if self.nodes is None else f'N={self.nodes}'} batch={self.batch}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_folders(args)
        if not ServerSpec(args.target).on_cpu:
            raise UsageError("eval/cost.py times CPU servers only: on a GPU its clock would see launches, not work.")
        body = open_file(args, sys.argv if argv is None else ["eval/cost.py", *argv])
        measure(args, body)
        model = finish(args, body)
    except KeyboardInterrupt:
        return stop(f"Interrupted; finished servers are kept in {args.out}, and the same command continues from there.")
    except (UsageError, ResultsError, ServerError, RequestError, ValueError, OSError) as error:
        return stop(str(error))
    print_costs(model, [Sample(**sample) for sample in all_samples(body)])
    console.print(f"Costs: {args.out}")
    return 0


def measure(args: argparse.Namespace, body: dict) -> None:
    """One server after the other; each batch size is kept as soon as it is measured."""
    for nodes in [None, *args.nodes]:
        todo = [setting for batch in args.batches if (setting := Setting(nodes, batch)).key not in body["samples"]]
        if not todo:
            continue
        with tempfile.TemporaryDirectory() as folder:
            times = Path(folder) / "times.jsonl"
            spec = server_spec(args, nodes, times)
            with console.status(f"{spec.name}: starting the server"), serve(spec) as server, Client(server.url) as client:
                prompt = ChatTokenizer(args.target).encode([PROMPT])
                for setting in todo:
                    console.print(f"{spec.name}: batch {setting.batch}")
                    samples = measure_batch(client, prompt, setting, times)
                    body["samples"][setting.key] = [asdict(sample) for sample in samples]
                    save(args.out, body)


def measure_batch(client: Client, prompt: list[int], setting: Setting, times: Path) -> list[Sample]:
    """Sends `batch` equal requests at once and reads the clock's lines about the rounds in which all of them decoded."""
    list(client.generate_all([prompt] * setting.batch, 4, setting.batch))  # first touches of memory, the prefix cache
    before = times.stat().st_size
    # A tree of N nodes rarely yields more than 3 tokens, so this is about ROUNDS rounds; an end token must not stop one early.
    tokens = 1 + ROUNDS * (1 if setting.nodes is None else 3)
    list(client.generate_all([prompt] * setting.batch, tokens, setting.batch, ignore_eos=True))
    with times.open() as file:
        file.seek(before)
        return read_times([json.loads(line) for line in file], setting.batch)


def read_times(events: list[dict], batch: int) -> list[Sample]:
    """Medians by part and size, of decode rounds of exactly `batch` sequences.

    The events of a round's forwards stand before the round's own. A round's overhead is what is left of the time to the start of the next
    round, which must follow at once (the last round of a batch has none).
    """
    rounds, forwards = [], []
    for event in events:
        if event["kind"] == "round":
            rounds.append((event, forwards))
            forwards = []
        else:
            forwards.append(event)
    found: dict[tuple[str, float], list[float]] = defaultdict(list)
    for (event, parts), following in zip(rounds, [*rounds[1:], None]):
        if event["mode"] != "decode" or event["batch"] != batch:
            continue
        known = [part for part in parts if part["kind"] in FORWARDS]  # anything else is overhead
        for part in known:
            found[FORWARDS[part["kind"]], part["tokens"]].append(part["ms"])
        if following and following[0]["mode"] == "decode" and following[0]["batch"] == batch:
            rest = following[0]["start"] - event["start"] - sum(part["ms"] for part in known)
            plain = all(part["kind"] == "target decode" for part in known)
            found["plain overhead" if plain else "overhead", batch].append(rest)
    return [Sample(part, size, median(ms), len(ms)) for (part, size), ms in sorted(found.items()) if len(ms) >= LEAST]


def server_spec(args: argparse.Namespace, nodes: int | None, times: Path) -> ServerSpec:
    spec = ServerSpec(
        target=args.target,
        dtype=args.dtype,
        threads=args.threads,
        metrics=False,
        max_running_requests=max(args.batches),
        launcher=(str(TIMED_SERVER),),
        env={"TALON_TIMES": str(times)},
    )
    return spec if nodes is None else replace(spec, head=args.head, algorithm="TALON", nodes=nodes, width=min(args.width, nodes - 1))


# ------------------------------------------------------------ the file


def open_file(args: argparse.Namespace, command: list[str]) -> dict:
    settings = {
        "target": {"name": args.target.name, "fingerprint": fingerprint(args.target)},
        "head": {"name": args.head.name, "fingerprint": fingerprint(args.head)},
        "dtype": args.dtype,
        "threads": args.threads,
    }
    if args.fresh:
        args.out.unlink(missing_ok=True)
    body = {"settings": settings, "versions": versions(), "machine": machine(), "command": command_without_paths(command), "samples": {}}
    if args.out.exists():
        try:
            found = json.loads(args.out.read_text())
            old, body["samples"] = found["settings"], found["samples"]
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{args.out} is not a file of eval/cost.py ({error!r}); choose another --out.") from error
        if old != settings:
            raise ResultsError(f"{args.out} was measured with other settings ({old}); choose another --out, or pass --fresh.")
    return body


def all_samples(body: dict) -> list[dict]:
    return [sample for samples in body["samples"].values() for sample in samples]


def finish(args: argparse.Namespace, body: dict) -> CostModel:
    """Fit, store, draw."""
    samples = [Sample(**sample) for sample in all_samples(body)]
    model = CostModel.fitted(samples)
    body["lines"] = {part: asdict(line) for part, line in model.lines.items()}
    save(args.out, body)
    if args.plot:
        plot(model, samples, args.plot)
    return model


def save(path: Path, body: dict) -> None:
    write_whole(path, json.dumps(body, indent=1) + "\n")


def print_costs(model: CostModel, samples: list[Sample]) -> None:
    table = Table(title="milliseconds = fixed + slope x size", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("part", "fixed", "slope", "sizes", "largest error", "mean error"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    for part in PARTS:
        line, found = model.lines[part], [sample for sample in samples if sample.part == part]
        errors = [abs(line.at(sample.size) / sample.ms - 1) for sample in found]
        sizes = f"{min(s.size for s in found):g} .. {max(s.size for s in found):g}"
        table.add_row(part, f"{line.fixed:.2f}", f"{line.slope:.3f}", sizes, f"{max(errors):.0%}", f"{sum(errors) / len(errors):.0%}")
    console.print(table)


def plot(model: CostModel, samples: list[Sample], path: Path) -> None:
    """Measured points and fitted lines, one panel a part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(11, 6), constrained_layout=True)
    for part, panel in zip(PARTS, panels.flat):
        found = [sample for sample in samples if sample.part == part]
        ends = [0, max(sample.size for sample in found)]
        panel.plot(ends, [model.lines[part].at(size) for size in ends], color="tab:orange", label="fitted")
        panel.plot([sample.size for sample in found], [sample.ms for sample in found], "o", color="tab:blue", label="measured")
        panel.set(title=part, ylabel="ms", ylim=(0, None))
        panel.set_xlabel({"verify": "tree nodes", "draft": "lanes", "extend": "rows"}.get(part, "sequences"))
    panels.flat[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target model folder (Hugging Face layout)")
    parser.add_argument("--head", type=Path, required=True, help="EAGLE-3 head folder (SGLang layout)")
    parser.add_argument("--nodes", type=positive, nargs="+", default=[8, 16, 32], help="node budgets N, one server each (default: 8 16 32)")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 2, 4, 8], help="sequences at a time (default: 1 2 4 8)")
    parser.add_argument("--width", type=positive, default=4, help="K of the TALON servers (default: 4)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="as in eval/serve.py")
    parser.add_argument("--threads", type=positive, help="OMP threads of the server (default: PyTorch's own choice)")
    parser.add_argument("--plot", type=Path, help="draw measured against fitted here (PNG)")
    parser.add_argument("--fresh", action="store_true", help="discard what --out already holds")
    parser.add_argument("--out", type=Path, default=Path("cost.json"))
    args = parser.parse_args(argv)
    if min(args.nodes) < 2:
        parser.error(f"--nodes has {min(args.nodes)}: a tree is the root and at least one draft, so N is at least 2")
    args.dtype = fast_dtype("auto") if args.dtype == "auto" else args.dtype
    return args


if __name__ == "__main__":
    sys.exit(main())
