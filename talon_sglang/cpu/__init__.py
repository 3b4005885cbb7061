"""Run stock SGLang on a CPU that has no build of `sgl_kernel`.

SGLang 0.5.23 imports its compiled operators from the top-level package `sgl_kernel` as soon as it believes to be on a CPU, and PyPI has no
CPU wheel of it. `activate` is the entry point `talon_cpu` of SGLang's group `sglang.srt.platforms`: SGLang calls it in the parent and in
every spawned process, before the scheduler module is imported (a general plugin would be too late there). It returns None, so SGLang goes
on with its own CPU platform.

The stand-ins (`sgl_kernel.py`, `torchvision.py` beside this file) are private modules that are published under the public names only if all
of these hold: SGLANG_USE_CPU_ENGINE=1 is set, no CUDA device is visible, and no real package of that name is installed or imported. A real
package therefore always wins.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys


def activate() -> None:
    if not wanted():
        return
    if not installed("torchvision"):
        importlib.import_module("talon_sglang.cpu.torchvision").publish()
    if not installed("sgl_kernel"):
        importlib.import_module("talon_sglang.cpu.sgl_kernel").publish()
        keep_intel_amx_selectable()
        keep_threads_awake()


def register_hooks() -> None:
    """Called by the plugin's `load`, which is early enough for hooks; only where our stand-ins are in use."""
    stand_in = sys.modules.get("sgl_kernel")
    if stand_in is not None and getattr(stand_in, "__talon_stand_in__", False):
        for part in ("attention", "linear", "pointwise"):
            importlib.import_module(f"talon_sglang.cpu.{part}").register_hooks()


def wanted() -> bool:
    """The user asked for SGLang's CPU engine and there is no GPU to confuse it with."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return False
    import torch

    return not torch.cuda.is_available()


def installed(package: str) -> bool:
    """True if `package` can be imported, or was; our own stand-ins do not count, so that a second call changes nothing."""
    module = sys.modules.get(package)
    if module is not None:
        return not getattr(module, "__talon_stand_in__", False)
    return importlib.util.find_spec(package) is not None


def keep_intel_amx_selectable() -> None:
    """SGLang's `intel_amx` backend is plain Python around two operators; argument resolution drops it on CPUs without AMX, whose operators
    we just supplied.

    Only argument resolution and the kernel-independent paths read this override: layers ask `cpu_has_amx_support()` instead, which stays
    False.
    """
    from sglang.srt.runtime_context import get_platform

    get_platform()._overrides["has_amx"] = True


def keep_threads_awake() -> None:
    """PyTorch's second thread falls asleep between two products, and waking it costs as much as a product of a small model.

    Spinning for a few milliseconds before it sleeps made a plain server on two Zen 5 cores 1.3 times as fast, a TALON one 1.4 times. OpenMP
    reads this when it is loaded, so it counts for the processes that this one starts, which is where the models run.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000000")
