"""Check and time the GPU path's own parts on a CUDA device: PyTorch and Triton are enough, SGLang is not needed.

    python -m eval.gpu_check                        all checks, then the table of times; under 8 minutes
    python -m eval.gpu_check --checks-only
    python -m eval.gpu_check --json results.json    the same figures for a machine
    TRITON_INTERPRET=1 python -m eval.gpu_check     on a machine without a GPU: the checks, small, in Triton's interpreter

Checks, each against an independent reference: fixed-shape expansion against TreeBatch, bit for bit; the KV index kernel against its PyTorch
reference; whole rounds, graphs replayed (CUDA only), against trees grown from the definition; no call of a round waits for the device.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

NO_DEVICE = "There is no CUDA device here, so there is nothing to time; TRITON_INTERPRET=1 runs the checks on the CPU."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks-only", action="store_true", help="leave the timing out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write checks and times to FILE")
    options = parser.parse_args(argv)
    interpreted, cuda = os.environ.get("TRITON_INTERPRET") == "1", torch.cuda.is_available()
    if not cuda and not interpreted:
        print(NO_DEVICE)
        return 0
    device = "cpu" if interpreted else "cuda"
    print(f"torch {torch.__version__}, {'Triton interpreter on the CPU' if interpreted else torch.cuda.get_device_name()}")
    checks = [run_check(check, device) for check in (check_expansion, check_kernel, check_rounds, check_no_waiting)]
    rows = []
    if not interpreted and not options.checks_only and all(ok for _, ok, _ in checks):
        rows = list(timings())
    if options.json:
        report = {"torch": torch.__version__, "device": device, "checks": checks, "times_us": rows}
        partial = options.json.with_name(options.json.name + ".partial")
        partial.write_text(json.dumps(report, indent=1))
        partial.replace(options.json)
    return 0 if all(ok for _, ok, _ in checks) else 1


def run_check(check: Callable[[str], str], device: str) -> tuple[str, bool, str]:
    start = time.monotonic()
    name = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        ok, found = True, check(device)
    except AssertionError as error:
        ok, found = False, str(error) or "an assertion without a message"
    print(f"{'ok    ' if ok else 'FAILED'} {name}: {found} ({time.monotonic() - start:.1f} s)", flush=True)
    return name, ok, found


# ------------------------------------------------------------ checks


def check_expansion(device: str) -> str:
    from eval.gpu_cases import differences, grow_both
    from talon_sglang.tree import TreeConfig

    rng, trees = random.Random(0), 0
    for case in range(60 if device == "cpu" else 150):
        n = rng.randint(2, 64)
        config = TreeConfig(n, rng.randint(1, n + 3), 10 ** rng.uniform(-3, 0), rng.choice((0, 0, rng.randint(1, 12))))
        batch, vocab, scale = rng.randint(1, 5), rng.choice((5, 40, 200, 4000)), rng.choice((0.0, 0.5, 2.0, 6.0, 20.0))
        oracle, static, _ = grow_both(batch, config, vocab, scale, case % 2 == 0, case, failing=0.01 * (case % 3), device=device)
        different = differences(oracle, static)
        assert not different, f"case {case} differs from TreeBatch in {', '.join(different)}"
        trees += batch
    return f"{trees} random trees equal TreeBatch's"


def check_kernel(device: str) -> str:
    from eval.gpu_cases import RandomBatch
    from talon_sglang.gpu.kernels import index_entries, reference_kv_indices, write_kv_indices

    rng, small = random.Random(1), device == "cpu"
    size = {"most_nodes": 10, "longest": 100} if small else {"most_nodes": 64, "longest": 4000}
    count, entries = (4, 0) if small else (60, 0)
    for case in range(count):
        batch = RandomBatch.make(rng, case, device=device, **size)
        width = batch.widest + case % 2
        for uniform, dtype in ((False, torch.int64), (True, torch.int32)):
            kv_indptr = torch.zeros(batch.size * width + 1, dtype=torch.int32, device=device)
            kv_indices = torch.zeros(index_entries(batch.size, width, batch.table_RC.shape[1]), dtype=dtype, device=device)
            write_kv_indices(kv_indptr, kv_indices, *batch.arguments(), width, uniform)
            expected_indptr, expected_indices = reference_kv_indices(*batch.arguments(), width, uniform)
            assert torch.equal(kv_indptr, expected_indptr), f"case {case}, uniform {uniform}: kv_indptr differs"
            assert torch.equal(kv_indices[: expected_indices.numel()].long(), expected_indices), f"case {case}: kv_indices differ"
            entries += expected_indices.numel()
    return f"{entries} entries of {2 * count} random ragged batches equal the reference's"


def check_rounds(device: str) -> str:
    from eval.gpu_cases import RoundCase
    from talon_sglang.gpu.loop import CudaGraph, DraftLoop, Eager

    small = device == "cpu"
    sizes = [(12, 3, 3)] if small else [(16, 4, 5), (60, 10, 3), (60, 10, 8)]
    trees = 0
    for n, k, batch in sizes:
        case = RoundCase(n, k, batch, longest=40 if small else 300, device=device)
        loop = DraftLoop(case.round.trees, case.round.begin, case.round.step, capture=Eager if small else CudaGraph)
        loop.prepare()
        for seed in range(1 if small else 10):
            case.load(seed)
            loop.run()
            for b, oracle in enumerate(case.oracles()):
                assert case.round.trees.tree(b) == oracle.tree(0), f"N={n}, B={batch}, seed {seed}: tree {b} differs"
                trees += 1
    return f"{trees} trees of whole rounds ({'eager' if small else 'graphs replayed'}) equal those grown from the definition"


def check_no_waiting(device: str) -> str:
    if device == "cpu":
        return "needs a CUDA device, left out"
    from eval.gpu_cases import RoundCase

    case = RoundCase(60, 10, 4, longest=300, device=device)
    case.load(0)
    case.round.begin()
    case.round.step(case.round.trees.widest(0))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.round.begin()
        case.round.step(case.round.trees.widest(0))
    except RuntimeError as error:
        raise AssertionError(f"a call waits for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "PyTorch's sync detector saw no call that waits in a round's work"


# ------------------------------------------------------------ times

SETTING = {"n": 60, "k": 10, "vocab": 32000}  # the paper's tree over EAGLE-3's usual draft vocabulary


def timings() -> Iterator[dict]:
    """Median times in microseconds, printed row by row: eager calls, and the same work as a CUDA graph."""
    print(f"\nN={SETTING['n']}, K={SETTING['k']}, draft vocabulary {SETTING['vocab']}; median of 50, microseconds")
    print(f"{'work':<34}{'B':>4}{'lanes':>7}{'context':>9}{'eager':>10}{'graph':>10}")
    for work, batch, width, context, call in timed_work():
        row = {"work": work, "batch": batch, "lanes": width, "context": context, **measure(call)}
        print(f"{work:<34}{batch:>4}{width:>7}{context or '':>9}{row['eager']:>10.1f}{row['graph']:>10.1f}", flush=True)
        yield row


def timed_work() -> Iterator[tuple[str, int, int, int | None, Callable[[], None]]]:
    from eval.gpu_cases import memory_pools
    from talon_sglang.gpu.kernels import index_entries, write_kv_indices
    from talon_sglang.gpu.tree import StaticTrees
    from talon_sglang.tree import TreeConfig

    n, k, vocab = SETTING.values()
    for batch in (1, 8, 32):
        trees = StaticTrees(batch, TreeConfig(n, k), vocab, "cuda")
        top = torch.randn(batch, vocab, device="cuda").log_softmax(-1).topk(k)
        trees.expand_first(top.values, top.indices)
        state = {name: value.clone() for name, value in vars(trees).items() if isinstance(value, torch.Tensor)}
        yield "restoring the state", batch, k, None, partial(restore, trees, state)
        for width in (k, 16, 48):
            log_probs = (torch.randn(batch, width, vocab, device="cuda") * 3).log_softmax(-1)
            yield "restoring + expansion of a layer", batch, width, None, partial(expand_again, trees, state, log_probs)
        restore(trees, state)
        for context in (1024, 8192):
            pools = memory_pools(torch.Generator().manual_seed(0), batch, n, [context] * batch, "cuda")
            table, rows, seq_lens, slots = pools
            for width in (k, 48):
                indptr = torch.zeros(batch * width + 1, dtype=torch.int32, device="cuda")
                indices = torch.zeros(index_entries(batch, width, table.shape[1]), dtype=torch.int64, device="cuda")
                in_tree = trees.start_B, trees.size_B, trees.depth, trees.ancestors_BNN
                arguments = (indptr, indices, table, rows, seq_lens, *in_tree, slots, width, False)
                yield "KV index lists, 10 live lanes", batch, width, context, partial(write_kv_indices, *arguments)


def restore(trees, state: dict[str, torch.Tensor]) -> None:
    for name, value in state.items():
        getattr(trees, name).copy_(value)


def expand_again(trees, state: dict[str, torch.Tensor], log_probs: torch.Tensor) -> None:
    restore(trees, state)
    trees.expand(log_probs)


def measure(call: Callable[[], None], repeats: int = 50) -> dict[str, float]:
    from talon_sglang.gpu.loop import CudaGraph

    return {"eager": median_us(call, repeats), "graph": median_us(CudaGraph(call).replay, repeats)}


def median_us(call: Callable[[], None], repeats: int) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
