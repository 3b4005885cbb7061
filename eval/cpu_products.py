"""What the matrix products of a target cost on this CPU by number of rows: `F.linear` against packed weights (talon_sglang/cpu/linear.py).

All products of one forward, each layer with weights of its own (the caches do not hold a whole model), best of several rounds.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from talon_sglang.cpu.linear import packed_linear
from train.machine import DTYPES

EXAMPLES = """example:
  python eval/cpu_products.py --target .cache/smollm2-135m-instruct --dtype bf16 --threads 2
"""
ROUNDS = 7


def shapes(config: dict) -> list[tuple[int, int]]:
    """(out, in) of every product of a Llama-type model, as SGLang fuses them."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    qkv = (heads + 2 * config["num_key_value_heads"]) * size
    layer = [(qkv, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner)]
    return layer * config["num_hidden_layers"] + [(config["vocab_size"], hidden)]


def best_ms(product: Callable, weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> float:
    """Milliseconds for one pass over all weights."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for weight in weights:
            product(inputs[weight.shape[1]], weight)
        best = min(best, time.perf_counter() - start)
    return 1000 * best


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target; only its config.json is read")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    if not (args.target / "config.json").is_file():
        parser.error(f"--target {args.target} has no config.json; name the folder of a model.")
    if min(args.rows) < 1 or args.threads < 1:
        parser.error("--rows and --threads count from 1.")

    torch.set_num_threads(args.threads)
    dtype = DTYPES[args.dtype]
    table = Table(title=f"ms for all products of a forward, {args.dtype}, {args.threads} threads")
    for column in ("rows", "F.linear", "packed", "ratio"):
        table.add_column(column, justify="right")
    with torch.inference_mode():
        weights = [torch.randn(shape).to(dtype) for shape in shapes(json.loads((args.target / "config.json").read_text()))]
        for rows in args.rows:
            inputs = {size: torch.randn(rows, size).to(dtype) for size in {weight.shape[1] for weight in weights}}
            stock, packed = (best_ms(product, weights, inputs) for product in (F.linear, packed_linear))
            table.add_row(str(rows), f"{stock:.1f}", f"{packed:.1f}", f"{stock / packed:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
