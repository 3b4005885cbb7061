"""The Triton kernel against its PyTorch reference on random ragged batches, on a CPU in Triton's interpreter.

Triton decides at import whether it interprets, and the other tests must not run so: without TRITON_INTERPRET=1 this file runs itself once
more, with it, in a process of its own.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from eval.gpu_cases import RandomBatch
    from talon_sglang.gpu.kernels import index_entries, reference_kv_indices, write_kv_indices


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
def test_this_file_and_test_gpu_round_in_tritons_interpreter(repo_root):
    files = [__file__, str(Path(__file__).with_name("test_gpu_round.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    env = dict(os.environ, TRITON_INTERPRET="1")
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=repo_root, check=False)
    assert run.returncode == 0 and "8 passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_for_nvidia_gpus_without_having_one(capability, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from talon_sglang.gpu.kernels import COPY_BLOCK, DUMMY_SLOT, _write_kv_indices

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = dict.fromkeys(("rows", "seq_lens", "starts", "sizes", "depth_ptr", "slots"), "*i64") | {"ancestors": "*u8"}
    numbers = dict.fromkeys(("batch", "n", "table_stride", "slots_stride"), "i32")
    constants = {"DUMMY": DUMMY_SLOT, "BLOCK_B": 32, "BLOCK_N": 64, "BLOCK": COPY_BLOCK}
    for uniform, index in ((False, "*i64"), (True, "*i32")):
        types = pointers | numbers | {"kv_indptr": "*i32", "kv_indices": index, "table": "*i32"} | dict.fromkeys(constants, "constexpr")
        signature = {name: types.get(name, "constexpr") for name in _write_kv_indices.arg_names}  # in the kernel's own order
        source = ASTSource(_write_kv_indices, signature, constexprs=constants | {"UNIFORM": uniform})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert f".target sm_{capability}" in compiled.asm["ptx"] and compiled.asm["cubin"]


interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")


@interpreted
@pytest.mark.parametrize("uniform, dtype", [(False, torch.int64), (True, torch.int32)])  # as Triton's and FlashInfer's backends read them
def test_equals_the_reference_on_random_ragged_batches(uniform, dtype):
    rng = random.Random(f"{uniform} {dtype}")
    seen_dead = seen_deep = 0
    for case in range(12):
        batch = RandomBatch.make(rng, case, most_nodes=16, longest=200)
        for width in (batch.widest, batch.widest + 2)[: 1 + case % 2]:
            kv_indptr = torch.full((batch.size * width + 1,), -7, dtype=torch.int32)
            kv_indices = torch.full((index_entries(batch.size, width, batch.table_RC.shape[1]) + 1,), -7, dtype=dtype)
            write_kv_indices(kv_indptr, kv_indices, *batch.arguments(), width, uniform)
            expected_indptr, expected_indices = reference_kv_indices(*batch.arguments(), width, uniform)
            assert torch.equal(kv_indptr, expected_indptr)
            assert torch.equal(kv_indices[: expected_indices.numel()].long(), expected_indices)
            assert (kv_indices[expected_indices.numel() :] == -7).all()  # nothing is written past the lists
        seen_dead += int((batch.trees.size_B - batch.trees.start_B < width).any())
        seen_deep += int(batch.trees.depth) > 2
    assert seen_dead and seen_deep


@interpreted
def test_prefixes_longer_than_all_programs_copy_at_once():
    rng = random.Random(0)
    batch = RandomBatch.make(rng, 3, seq_lens=(5, 2500, 513), most_nodes=8)
    width = batch.widest
    kv_indptr = torch.zeros(3 * width + 1, dtype=torch.int32)
    kv_indices = torch.zeros(index_entries(3, width, batch.table_RC.shape[1]), dtype=torch.int64)
    write_kv_indices(kv_indptr, kv_indices, *batch.arguments(), width, False)
    expected_indptr, expected_indices = reference_kv_indices(*batch.arguments(), width, False)
    assert torch.equal(kv_indptr, expected_indptr) and torch.equal(kv_indices[: expected_indices.numel()], expected_indices)


@interpreted
def test_the_bound_on_entries():
    assert index_entries(4, 10, 300) == 12000
    with pytest.raises(ValueError, match="at most 341 running requests"):
        index_entries(342, 48, 131072)
