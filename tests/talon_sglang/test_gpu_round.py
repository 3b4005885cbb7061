"""A whole round with the KV index kernel in it, captured and replayed, against trees grown from the definition. Run in Triton's interpreter
by test_gpu_kernels.py.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process of its own, started by test_gpu_kernels.py", allow_module_level=True)

from eval.gpu_cases import RoundCase  # noqa: E402
from talon_sglang.gpu.loop import DraftLoop, Eager  # noqa: E402
from tests.talon_sglang.fake_graph import RecordedGraph  # noqa: E402


@pytest.mark.parametrize("uniform, dtype", [(False, torch.int64), (True, torch.int32)])
@pytest.mark.parametrize("capture", [Eager, RecordedGraph])
def test_rounds_of_other_batches_through_the_same_buffers(capture, uniform, dtype):
    case = RoundCase(12, 3, 3, longest=48, uniform=uniform, index_dtype=dtype)
    loop = DraftLoop(case.round.trees, case.round.begin, case.round.step, capture=capture, widths=(4,))
    loop.prepare()
    depths, counts = set(), set()
    for seed in range(4):
        case.load(seed)
        loop.run()
        oracles = case.oracles()
        for b, oracle in enumerate(oracles):
            assert case.round.trees.tree(b) == oracle.tree(0)
            depths.add(oracle.depth)
        counts.add(len(oracles))
        padding = case.batch - len(oracles)
        assert case.round.trees.degraded_B.tolist() == [False] * len(oracles) + [True] * padding  # padding drafts nothing
    assert len(depths) > 1 and len(counts) > 1
