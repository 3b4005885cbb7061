"""SGLang's server, started in a third of the processor time: its scheduler and detokenizer are forked from a process that has imported
everything, where SGLang spawns them and each imports PyTorch and SGLang again (12 of the 44 s that a start takes on a slow core, each).

For tests that are about what a server answers; those about starting one run `python -m sglang.launch_server`.
"""

import multiprocessing
import os
import sys
from pathlib import Path

# As with `python -m` from the clone: beside this file stand packages of tests with the names of those that they test.
sys.path[0] = str(Path(__file__).resolve().parents[1])

# SGLang asks for "spawn", which CUDA needs. On a CPU "fork" does as well: no thread runs yet.
multiprocessing.set_start_method("fork")
multiprocessing.set_start_method = lambda *_, **__: None

from sglang.launch_server import run_server  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402
from sglang.srt.utils import kill_process_tree  # noqa: E402


def main(words: list[str]) -> None:
    load_plugins()
    try:
        run_server(prepare_server_args(words))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
