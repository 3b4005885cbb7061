"""SGLang's own server with a clock on every model forward and every scheduler round, for eval/cost.py.

    TALON_TIMES=times.jsonl python eval/timed_server.py --model-path ... (the arguments of sglang.launch_server)

The hooks are SGLang's plugin hooks, registered when this file is imported: SGLang spawns its scheduler, and a spawned process imports the
main script again. One JSON line per event, in milliseconds:
    {"kind": "draft decode", "tokens": 7, "batch": 2, "ms": 3.1}    a forward: draft or target, SGLang's forward mode in lower case
    {"kind": "round", "mode": "decode", "batch": 2, "start": 1000.0, "ms": 80.2}
The clock is the processor's, so it is right where forwards are synchronous, on a CPU.
"""

import json
import os
import sys
import time
from pathlib import Path

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

TIMES_ENV = "TALON_TIMES"


def write(**event) -> None:
    with Path(os.environ[TIMES_ENV]).open("a") as file:
        file.write(json.dumps(event) + "\n")


def timed_forward(original, runner, forward_batch, *args, **kwargs):
    kind = f"{'draft' if runner.is_draft_worker else 'target'} {forward_batch.forward_mode.name.lower()}"
    tokens, batch = forward_batch.input_ids.numel(), forward_batch.batch_size
    started = time.perf_counter()
    result = original(runner, forward_batch, *args, **kwargs)
    write(kind=kind, tokens=tokens, batch=batch, ms=(time.perf_counter() - started) * 1e3)
    return result


def timed_round(original, scheduler, batch, *args, **kwargs):
    mode, requests, started = batch.forward_mode.name.lower(), len(batch.reqs), time.perf_counter()
    result = original(scheduler, batch, *args, **kwargs)
    write(kind="round", mode=mode, batch=requests, start=started * 1e3, ms=(time.perf_counter() - started) * 1e3)
    return result


HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", timed_forward, HookType.AROUND)
HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", timed_round, HookType.AROUND)


if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
