"""The CPU stand-ins: when they may be picked up, and what they compute, against loops and against SGLang's own Triton kernels' rules."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from talon_sglang import cpu
from talon_sglang.cpu import pointwise
from talon_sglang.cpu import sgl_kernel as ops
from talon_sglang.cpu.attention import Kept, decode_spans, worth_padding
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
    assert worth_padding(lengths) == (lengths[0] == 17)
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


def test_packed_products_are_products():
    generator = torch.Generator().manual_seed(4)
    weight, bias = torch.randn(30, 20, generator=generator), torch.randn(30, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        w, b = weight.to(dtype), bias.to(dtype)
        for rows in (0, 1, 2, 16, 300):
            x = torch.randn(rows, 20, generator=generator).to(dtype)
            torch.testing.assert_close(packed_linear(x, w), F.linear(x, w))
            torch.testing.assert_close(packed_linear(x, w, b), F.linear(x, w, b))
            wide = torch.randn(rows, 40, generator=generator).to(dtype)  # rows that do not follow each other
            torch.testing.assert_close(packed_linear(wide[:, 20:], w), F.linear(wide[:, 20:], w))


def test_a_changed_weight_is_packed_again():
    weight, x = torch.nn.Parameter(torch.ones(30, 20), requires_grad=False), torch.ones(2, 20)
    assert packed_linear(x, weight).unique().tolist() == [20]
    weight.mul_(2)
    assert packed_linear(x, weight).unique().tolist() == [40]
    weight.data.copy_(torch.full((30, 20), 3.0))  # SGLang's loaders write like this; its updates end with `forget`
    Packed.forget()
    assert packed_linear(x, weight).unique().tolist() == [60]


def test_nothing_is_packed_that_would_fill_the_memory(monkeypatch):
    weight = torch.randn(30, 20)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1000_000, available=100_000))
    assert Packed.of(weight) is None
    assert packed_linear(torch.ones(2, 20), weight).shape == (2, 30)


def test_spans_last_for_one_forward():
    table, rows, lengths = torch.arange(40).view(4, 10), torch.tensor([1]), torch.tensor([3])
    Kept.forget()
    spans = Kept.of((table, rows, lengths), decode_spans)
    assert spans[0].slots_BL.tolist() == [[10, 11, 12]]
    lengths += 1
    assert Kept.of((table, rows, lengths), decode_spans) is spans  # the next layer; SGLang changes no length between layers
    Kept.forget()  # the next forward
    assert Kept.of((table, rows, lengths), decode_spans)[0].slots_BL.tolist() == [[10, 11, 12, 13]]
    assert Kept.of((table, rows, lengths.clone()), decode_spans)[0].slots_BL.shape == (1, 4)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_norm_and_rotary_embedding_are_sglangs(dtype, tolerance):
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    generator = torch.Generator().manual_seed(6)
    x, residual = (torch.randn(5, 64, generator=generator).to(dtype) for _ in range(2))
    norm = RMSNorm(64, eps=1e-5)
    norm.weight.data.uniform_(0.5, 2, generator=generator)
    norm.to(dtype)
    close = dict(rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pointwise.rms_norm(fail, norm, x), RMSNorm.forward_native(norm, x), **close)
    got, want = pointwise.rms_norm(fail, norm, x, residual.clone()), RMSNorm.forward_native(norm, x, residual.clone())
    torch.testing.assert_close(got[0], want[0], **close)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=0)

    rope = RotaryEmbedding(16, 16, 512, 10000, True, dtype)
    for positions in (torch.tensor([3, 0, 500, 77, 3]), torch.tensor([4, 0, 500, 77, 3])):
        qkv = torch.randn(5, 6 * 16, generator=generator).to(dtype)
        query, key, _ = qkv.split((4 * 16, 16, 16), dim=-1)
        got = pointwise.rotary_embedding(fail, rope, positions, query, key)
        for mine, theirs in zip(got, RotaryEmbedding.forward_native(rope, positions, query, key)):
            torch.testing.assert_close(mine, theirs, **close)


def fail(*_args, **_kwargs):
    raise AssertionError("SGLang's own form was asked for")


def test_other_norms_and_embeddings_stay_sglangs():
    norm = SimpleNamespace(
        variance_size_override=None,
        override_orig_dtype=None,
        fp32_residual=True,
        cast_x_before_out_mul=False,
        weight=torch.ones(4),
        hidden_size=4,
    )
    rope = SimpleNamespace(is_neox_style=False, rotary_dim=8, head_size=8)
    x, positions = torch.ones(2, 4), torch.tensor([0, 1])
    assert pointwise.rms_norm(lambda *args: args, norm, x) == (norm, x, None, None)
    assert pointwise.rotary_embedding(lambda *args: args, rope, positions, x, x) == (rope, positions, x, x, None, None)


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
