"""Precisions by their names in a recipe, and which this machine computes faster."""

import re
from functools import cache
from pathlib import Path

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fast_bfloat16() -> bool:
    """Whether matrix products are faster in bfloat16 than in float32: on CUDA, and on CPUs with an instruction for them."""
    return torch.cuda.is_available() or fast_bfloat16_cpu()


@cache
def fast_bfloat16_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Without such an instruction a product of 16 rows takes 14 times as long as one of a single row (AVX2, PyTorch 2.9)."""
    return cpuinfo.exists() and bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", cpuinfo.read_text()))
