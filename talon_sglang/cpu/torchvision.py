"""A text-only stand-in for `torchvision`, which SGLang imports eagerly for its image processors. What would touch an image raises."""

from __future__ import annotations

import importlib.machinery
import sys
import types

SUBMODULES = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops")
INTERPOLATION_MODES = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "LANCZOS", "BOX", "HAMMING")


def publish() -> None:
    for name in ("torchvision", *(f"torchvision.{m}" for m in SUBMODULES)):
        sys.modules[name] = _Stub(name)
    for name in SUBMODULES:
        parent, _, leaf = f"torchvision.{name}".rpartition(".")
        setattr(sys.modules[parent], leaf, sys.modules[f"torchvision.{name}"])


class _Stub(types.ModuleType):
    __talon_stand_in__ = True
    __version__ = "0.0.0+text.only"

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"

        def refuse(*args, **kwargs):
            raise RuntimeError(f"{full} needs torchvision, which is not installed: TALON's CPU setup serves text models only")

        if not name[0].isupper():
            return refuse
        stub = type(name, (), {"__init__": refuse} | {mode: mode.lower() for mode in INTERPOLATION_MODES})
        setattr(self, name, stub)
        return stub
