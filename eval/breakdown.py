"""Where a TALON server spends a round: milliseconds by phase, as a table, a stacked bar (PNG) and JSON.

The phases are the server's own (talon_sglang/clock.py), read from /metrics before and after the measured prompts. `scheduler` is the time
between rounds: what the answers took, less prefill and rounds. It means something with one request at a time only, which is what is sent.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from eval.client import ChatTokenizer, Client
from eval.serve import TALON_CONFIG, fast_dtype, positive, talon_config
from eval.servers import ServerError, ServerSpec, serve
from train.data import read_prompts

EXAMPLES = """example:
  python eval/breakdown.py --target .cache/smollm2-135m-instruct --head HEAD --prompts prompts.jsonl --limit 6 \\
    --talon 16,4 --talon 60,10 --threads 2 --out breakdown.json
"""
FORWARDS = ("draft_forward", "verify_forward", "draft_extend_forward")
OVERHEAD = ("expand", "indices", "verify_input", "draft", "verify", "draft_extend", "observe", "other", "scheduler")


@dataclass(frozen=True)
class Breakdown:
    """ms by phase, per round of one request; tokens committed per round."""

    name: str
    rounds: int
    accept_length: float
    phase_ms: dict[str, float]

    @property
    def round_ms(self) -> float:
        return sum(self.phase_ms.values())

    @property
    def overhead(self) -> float:
        """Share of a round that is neither a draft nor a target forward."""
        return sum(self.phase_ms[phase] for phase in OVERHEAD) / self.round_ms


def measure(spec: ServerSpec, prompts: list[list[int]], new_tokens: int) -> Breakdown:
    with serve(spec) as server, Client(server.url) as client:
        list(client.generate_all(prompts[:2], 8))
        before = read(client)
        answers = list(client.generate_all(prompts, new_tokens))
        after = read(client)
    spent = {key: after[key] - before.get(key, 0.0) for key in after}
    rounds = int(spent.pop("rounds"))
    prefill = spent.pop("prefill", 0.0) + spent.pop("prefill_forward", 0.0) + spent.pop("outside", 0.0)
    spent["scheduler"] = sum(answer.latency_s for answer in answers) - prefill - sum(spent.values())
    phase_ms = {phase: 1000 * spent.get(phase, 0.0) / rounds for phase in FORWARDS + OVERHEAD}
    return Breakdown(spec.name, rounds, sum(a.tokens for a in answers) / sum(a.rounds for a in answers), phase_ms)


def read(client: Client) -> dict[str, float]:
    """Seconds by phase, and the number of rounds."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(client.metrics_text()):
        for sample in family.samples:
            if sample.name == "talon:seconds_total":
                samples[sample.labels["phase"]] = samples.get(sample.labels["phase"], 0.0) + sample.value
            elif sample.name == "talon:rounds_total":
                samples["rounds"] = samples.get("rounds", 0.0) + sample.value
    return samples


def print_table(breakdowns: list[Breakdown], console: Console) -> None:
    table = Table(title="ms per round, by phase")
    table.add_column("phase")
    for breakdown in breakdowns:
        table.add_column(breakdown.name, justify="right")
    for phase in FORWARDS + OVERHEAD:
        table.add_row(phase, *(f"{b.phase_ms[phase]:.2f}" for b in breakdowns), end_section=phase in (FORWARDS[-1], OVERHEAD[-1]))
    table.add_row("round", *(f"{b.round_ms:.1f}" for b in breakdowns))
    table.add_row("not a forward", *(f"{b.overhead:.1%}" for b in breakdowns))
    table.add_row("accept length", *(f"{b.accept_length:.2f}" for b in breakdowns))
    table.add_row("rounds measured", *(str(b.rounds) for b in breakdowns))
    console.print(table)


def draw(breakdowns: list[Breakdown], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.7 * len(breakdowns)), layout="constrained")
    left = [0.0] * len(breakdowns)
    for i, phase in enumerate(FORWARDS + OVERHEAD):
        widths = [b.phase_ms[phase] for b in breakdowns]
        axes.barh([b.name for b in breakdowns], widths, left=left, label=phase, color=pyplot.get_cmap("tab20")(i))
        left = [a + b for a, b in zip(left, widths)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per round")
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=150)
    os.replace(temporary, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="target model folder")
    parser.add_argument("--head", type=Path, required=True, help="EAGLE-3 head folder (SGLang layout)")
    parser.add_argument("--prompts", type=Path, required=True, help="prompt file")
    parser.add_argument("--limit", type=positive, default=6, help="prompts to send")
    parser.add_argument("--max-new-tokens", type=positive, default=64)
    parser.add_argument("--talon", type=talon_config, action="append", metavar=TALON_CONFIG, help="default: 16,4 and 60,10")
    parser.add_argument("--dtype", default="auto", help="auto: bfloat16, but float32 on a CPU without AVX-512")
    parser.add_argument("--threads", type=positive, help="OMP threads of the server")
    parser.add_argument("--out", type=Path, default=Path("breakdown.json"), help="JSON; the bar lies beside it as .png")
    args = parser.parse_args()
    tokenizer, console = ChatTokenizer(args.target), Console()
    prompts = [tokenizer.encode(prompt.turns[:1]) for prompt in read_prompts(args.prompts, args.limit)]
    if not prompts:
        return f"--prompts {args.prompts} holds no usable prompt; each row needs a user turn."
    shared = {"dtype": fast_dtype("auto") if args.dtype == "auto" else args.dtype, "threads": args.threads}
    breakdowns = []
    try:
        for config in args.talon or [talon_config("16,4"), talon_config("60,10")]:
            spec = ServerSpec(args.target, args.head, "TALON", **config, **shared)
            breakdowns.append(measure(spec, prompts, args.max_new_tokens))
    except ServerError as error:
        return str(error)
    print_table(breakdowns, console)
    rows = [vars(b) | {"round_ms": b.round_ms, "overhead": b.overhead} for b in breakdowns]
    temporary = args.out.with_name(args.out.name + ".tmp")
    temporary.write_text(json.dumps({"dtype": shared["dtype"], "threads": args.threads, "breakdowns": rows}, indent=1))
    os.replace(temporary, args.out)
    draw(breakdowns, args.out.with_suffix(".png"))
    console.print(f"Written: {args.out} and {args.out.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
