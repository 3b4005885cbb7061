"""Imports once what servers and training import, and writes its bytecode, even where PYTHONDONTWRITEBYTECODE says not to.

`make install` calls this: a server has three processes, and compiling SGLang's sources in each of them doubles the time it needs to start.
"""

import contextlib
import importlib
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not eval/, whose trace.py has the name of a standard module
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")

from talon_sglang.cpu import activate  # noqa: E402

MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.models.llama",
    "sglang.srt.models.llama_eagle3",
    "deepspeed",
    "transformers.models.llama.modeling_llama",
    "tensorboard",
    "matplotlib.pyplot",
)

activate()
for module in MODULES:
    with contextlib.suppress(Exception):  # a module that cannot be imported here will say so where it is needed
        importlib.import_module(module)
