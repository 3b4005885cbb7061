"""What this machine computes faster."""

import re
from functools import cache
from pathlib import Path

import torch


@cache
def fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether matrix products are faster in bfloat16 than in float32: on CUDA, and on CPUs with an instruction for them."""
    if torch.cuda.is_available():
        return True
    return cpuinfo.exists() and bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", cpuinfo.read_text()))
