"""The CPU stand-ins: when they may be picked up, and what they compute, against loops and against SGLang's own Triton kernels' rules."""

import math
import subprocess
import sys

import pytest
import torch

from talon_sglang import cpu
from talon_sglang.cpu import sgl_kernel as ops
from talon_sglang.cpu.linear import Packed, packed_linear

PROBE = """
import sys, types
{before}
from talon_sglang import cpu
cpu.activate()
import sgl_kernel
print(getattr(sgl_kernel, "__talon_stand_in__", False))
"""


def probe(before: str, tmp_path, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(before=before)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"} | env,
    )


@pytest.mark.slow
def test_the_stand_in_is_published_only_on_request(tmp_path):
    assert probe("", tmp_path, SGLANG_USE_CPU_ENGINE="1").stdout.strip() == "True"
    assert "No module named 'sgl_kernel'" in probe("", tmp_path).stderr


@pytest.mark.slow
def test_a_real_package_always_wins(tmp_path):
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("")
    assert probe("", tmp_path, SGLANG_USE_CPU_ENGINE="1", PYTHONPATH=str(tmp_path)).stdout.strip() == "False"
    assert (
        probe("sys.modules['sgl_kernel'] = types.ModuleType('sgl_kernel')", tmp_path, SGLANG_USE_CPU_ENGINE="1").stdout.strip() == "False"
    )


@pytest.mark.slow
def test_never_beside_a_cuda_device(tmp_path):
    before = "import torch; torch.cuda.is_available = lambda: True"
    assert "No module named 'sgl_kernel'" in probe(before, tmp_path, SGLANG_USE_CPU_ENGINE="1").stderr


def test_stand_ins_refuse_what_they_do_not_compute():
    for case in (dict(logit_cap=30.0), dict(is_cross=True), dict(window=128), dict(sinks=torch.zeros(1))):
        with pytest.raises(NotImplementedError, match="real sgl_kernel"):
            ops.refuse_unsupported(**(dict(logit_cap=0.0, is_cross=False, window=0, sinks=None) | case))


def pool(generator, rows=4, length=24, kv_heads=2, size=8):
    slots = torch.randperm(200, generator=generator)[: rows * length].view(rows, length).int()
    keys, values = (torch.randn(200, kv_heads, size, generator=generator) for _ in range(2))
    return slots, keys, values


def slow_attention(q, keys, values, visible, scale):
    """One query and head at a time. q [heads, size]; visible: slots."""
    heads, kv_heads = q.shape[0], keys.shape[1]
    out = []
    for h in range(heads):
        k, v = keys[visible, h // (heads // kv_heads)], values[visible, h // (heads // kv_heads)]
        out.append(((q[h] @ k.T) * scale).softmax(-1) @ v)
    return torch.stack(out)


@pytest.mark.parametrize("lengths", [[17, 9], [23, 5]], ids=["padded", "one by one"])
@pytest.mark.parametrize("masked", [False, True])
def test_extend_attention(masked, lengths):
    assert ops.worth_padding(lengths) == (lengths[0] == 17)
    generator = torch.Generator().manual_seed(1)
    slots, keys, values = pool(generator)
    rows, lengths, new = torch.tensor([2, 0]), torch.tensor(lengths), torch.tensor([5, 5])
    start = torch.tensor([0, 5])
    q, o, scale = torch.randn(10, 4, 8, generator=generator), torch.empty(10, 4, 8), 1 / math.sqrt(8)
    tree = torch.rand(2, 5, 5, generator=generator) < 0.5
    tree |= torch.eye(5, dtype=torch.bool)
    ops.extend_attention_cpu(
        q,
        None,
        None,
        o,
        keys,
        values,
        1.0,
        1.0,
        slots,
        rows,
        lengths,
        new,
        start,
        5,
        scale,
        0.0,
        False,
        0,
        tree_mask=tree.flatten() if masked else None,
    )
    for b in range(2):
        prefix = int(lengths[b]) - 5
        for i in range(5):
            own = [j for j in range(5) if tree[b, i, j]] if masked else list(range(i + 1))
            visible = slots[rows[b], list(range(prefix)) + [prefix + j for j in own]].long()
            torch.testing.assert_close(o[b * 5 + i], slow_attention(q[b * 5 + i], keys, values, visible, scale))


@pytest.mark.parametrize("lengths", [[7, 12], [3, 20]], ids=["padded", "one by one"])
def test_decode_attention_writes_then_reads(lengths):
    generator = torch.Generator().manual_seed(2)
    slots, keys, values = pool(generator)
    rows, lengths = torch.tensor([1, 3]), torch.tensor(lengths)
    loc = slots[rows, lengths - 1].long()
    k, v, q = (torch.randn(2, heads, 8, generator=generator) for heads in (2, 2, 4))
    o = torch.empty(2, 4, 8)
    ops.decode_attention_cpu(q, keys, values, 1.0, 1.0, o, k, v, loc, None, slots, rows, lengths, 0.3, 0.0, False, 0)
    assert keys[loc].equal(k) and values[loc].equal(v)
    for b in range(2):
        torch.testing.assert_close(o[b], slow_attention(q[b], keys, values, slots[rows[b], : lengths[b]].long(), 0.3))


def test_few_rows_linear_is_linear():
    generator = torch.Generator().manual_seed(4)
    weight, bias = torch.randn(30, 20, generator=generator), torch.randn(30, generator=generator)
    for rows in (1, 2, 16, MAX_ROWS + 1):
        for dtype in (torch.float32, torch.bfloat16):
            x, w = torch.randn(rows, 20, generator=generator).to(dtype), weight.to(dtype)
            torch.testing.assert_close(few_rows_linear(x, w), torch.nn.functional.linear(x, w))
            got = few_rows_linear(x, w, bias.to(dtype))
            torch.testing.assert_close(got, torch.nn.functional.linear(x, w, bias.to(dtype)))
            assert got.is_contiguous()


def test_slot_operators_against_loops():
    generator = torch.Generator().manual_seed(3)
    table, rows = torch.randint(0, 99, (5, 40), generator=generator).int(), torch.tensor([4, 1, 3])
    start, end = torch.tensor([3, 0, 10]), torch.tensor([7, 0, 12])
    expected = [int(table[r, c]) for r, s, e in zip(rows, start, end) for c in range(s, e)]
    out = torch.zeros(6, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(rows, table, start, end, out, 40)
    assert out.tolist() == expected
    written = table.clone()
    ops.assign_req_to_token_pool_cpu(rows, written, start, end, torch.arange(100, 106), 40)
    assert [int(written[r, c]) for r, s, e in zip(rows, start, end) for c in range(s, e)] == list(range(100, 106))
    assert int((written != table).sum()) <= 6
    window = torch.zeros(3 * 4, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(rows, table, start, window, 40, 1, 4)
    assert window.tolist() == [int(table[r, s + i]) for r, s in zip(rows, start) for i in range(4)]


def test_kv_moves_read_everything_before_they_write():
    buffers = [torch.arange(60.0).view(10, 6), torch.arange(40, dtype=torch.bfloat16).view(10, 4)]
    before = [b.clone() for b in buffers]
    pointers = torch.tensor([b.data_ptr() for b in buffers])
    strides = torch.tensor([b.stride(0) * b.element_size() for b in buffers])
    ops.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([1, 2, 3]), torch.tensor([2, 3, 7]))
    for buffer, old in zip(buffers, before):
        assert buffer[[1, 2, 3]].equal(old[[2, 3, 7]]) and buffer[[0, 4, 5, 6, 7, 8, 9]].equal(old[[0, 4, 5, 6, 7, 8, 9]])


def test_stock_tree_and_chain_helpers():
    """Two layers of stock EAGLE with topk 2: candidates 0, 1 under the root; ids 2, 3 under candidate 0 and 4, 5 under candidate 1."""
    parent_list, selected = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2, 5]])
    mask, positions = torch.zeros(25, dtype=torch.bool), torch.zeros(5, dtype=torch.int64)
    index, first, sibling = (torch.full((1, 5), -1) for _ in range(3))
    ops.build_tree_kernel_efficient_cpu(parent_list, selected, torch.tensor([7]), mask, positions, index, first, sibling, 2, 2, 5, 1)
    assert positions.tolist() == [7, 8, 8, 9, 9]
    assert first.tolist() == [[1, 3, 4, -1, -1]] and sibling.tolist() == [[-1, 2, -1, -1, -1]]
    assert mask.view(5, 5).int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]

    ids = torch.tensor([1, 2, 3, 8, 9])
    ops.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[50], [60]]))
    assert ids.tolist() == [2, 3, 50, 9, 60]
    bonus = torch.zeros(2, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [6, 7]


def test_activation_without_the_request_changes_nothing(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    cpu.activate()
    assert "sgl_kernel" not in sys.modules
