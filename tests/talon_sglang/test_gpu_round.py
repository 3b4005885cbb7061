"""A whole round with the KV index kernel in it, captured and replayed, against trees grown from the definition. Run in Triton's interpreter by
test_gpu_kernels.py.
"""

import os
import random

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process of its own, started by test_gpu_kernels.py", allow_module_level=True)

from eval.gpu_cases import HashDraft, memory_pools  # noqa: E402
from talon_sglang.gpu.loop import DraftLoop, Eager  # noqa: E402
from talon_sglang.gpu.round import StaticRound  # noqa: E402
from talon_sglang.tree import TreeConfig, exact_topk  # noqa: E402
from tests.talon_sglang.fake_graph import RecordedGraph  # noqa: E402

VOCAB = 40


@pytest.mark.parametrize("uniform, dtype", [(False, torch.int64), (True, torch.int32)])
@pytest.mark.parametrize("capture", [Eager, RecordedGraph])
def test_rounds_of_other_batches_through_the_same_buffers(capture, uniform, dtype):
    config, rng, depths = TreeConfig(12, 3, 0.2), random.Random(0), set()
    table_RC = torch.zeros(5, 60, dtype=torch.int32)
    draft = HashDraft(VOCAB, 5 * 60 + 1)
    shared = StaticRound(3, config, VOCAB, 1, table_RC, draft, uniform=uniform, index_dtype=dtype)
    loop = DraftLoop(shared.trees, shared.begin, shared.step, capture=capture, widths=(4,))
    loop.prepare()
    for case in range(4):
        generator = torch.Generator().manual_seed(case)
        seq_lens = [rng.randint(1, 48) for _ in range(rng.randint(1, 3))]
        table, rows_B, seq_lens_B, slots_BN = memory_pools(generator, 3, 12, seq_lens + [48] * (3 - len(seq_lens)), "cpu")
        table_RC.copy_(table)
        b = len(seq_lens)
        log_probs = (torch.randn(b, VOCAB, generator=generator) * 2).log_softmax(-1)
        top = exact_topk(log_probs, 3)
        hidden_B1 = torch.randint(1000, (b, 1), generator=generator)
        shared.load(seq_lens_B[:b], rows_B[:b], slots_BN[:b], *top, hidden_B1.float())
        prefixes = [draft.keys_S[table_RC[rows_B[i], : seq_lens[i]].long()].clone() for i in range(b)]
        loop.run()
        for i in range(b):
            oracle = draft.grow(config, prefixes[i], [x[i : i + 1] for x in top], int(hidden_B1[i]))
            assert shared.trees.tree(i) == oracle.tree(0)
            depths.add(oracle.depth)
        assert shared.trees.degraded_B.tolist() == [False] * b + [True] * (3 - b)  # padding drafts nothing
    assert len(depths) > 1
