"""KV index lists of the frontier's lanes, for attention backends that read them token by token.

SGLang's Triton and FlashInfer decode kernels take `kv_indptr` (where each query's list begins) and `kv_indices` (KV slots, list after
list). Each lane's list here is its request's committed prefix, its true ancestors and itself: exact, where stock SGLang lists the history
of the lane's own slots (cache_locs.py:261-272), whoever its parent is.

Two layouts. Both have `batch * width` lists, and a dead lane (no frontier node) reads only the dummy slot, which SGLang keeps for padding:

- `compact` (Triton): a live lane has seq_len + depth entries, a dead one has 1. The lengths depend on the tree; the Triton backend reads
  them on the device.
- `uniform` (FlashInfer): every lane has seq_len + depth entries. FlashInfer plans its work on the host from the lengths; these depend on
  nothing but the committed lengths and the layer number, so a layer can be planned before its tree is known.

Memory: the lists of one step fit in `index_entries(max_batch, width, row_width)` entries, and every step reuses them.

Suffixes: B requests, N tree nodes, W lanes a request, R rows and C columns of SGLang's table of KV slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DUMMY_SLOT = 0  # SGLang's memory pools hand out slots from 1 on and let padding write to slot 0
INT32_MAX = 2**31 - 1


def index_entries(max_batch: int, width: int, row_width: int) -> int:
    """Entries that `kv_indices` needs: max_batch x width x row_width. (A request's committed tokens and its N tree slots share one row of
    `req_to_token`, so seq_len + depth never exceeds `row_width`.) An entry takes 8 bytes for Triton, 4 for FlashInfer.

    Raises ValueError where `kv_indptr`, which is int32 in both backends, could not count them.
    """
    entries = max_batch * width * row_width
    if entries > INT32_MAX:
        raise ValueError(
            f"max_batch is {max_batch}: with {width} lanes and rows of {row_width} slots the KV index lists can pass 2^31 entries; "
            f"use at most {INT32_MAX // (width * row_width)} running requests or a shorter context"
        )
    return entries


@torch.library.custom_op("talon::write_kv_indices", mutates_args=("kv_indptr", "kv_indices"))
def write_kv_indices(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    table_RC: torch.Tensor,
    rows_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    start_B: torch.Tensor,
    size_B: torch.Tensor,
    depth: torch.Tensor,
    ancestors_BNN: torch.Tensor,
    slots_BN: torch.Tensor,
    width: int,
    uniform: bool,
) -> None:
    """Write the lists of `width` lanes a request. Safe in a CUDA graph: the launch depends on shapes only.

    Args:
        kv_indptr: int32, [B * width + 1], written.
        kv_indices: int32 or int64, `index_entries(...)` or more, written up to kv_indptr[-1].
        table_RC: SGLang's `req_to_token`; rows_B picks each request's row.
        seq_lens_B: committed draft KV per request.
        start_B, size_B, depth, ancestors_BNN: of `StaticTrees`; every frontier node has `depth` ancestors without the root, itself
            included.
        slots_BN: KV slot of each node; the root's (column 0) is not read, its KV is the prefix's last.
    """
    batch, n = slots_BN.shape
    _write_kv_indices[(batch, width, SPLITS)](
        kv_indptr,
        kv_indices,
        table_RC,
        rows_B,
        seq_lens_B,
        start_B,
        size_B,
        depth,
        ancestors_BNN.view(torch.uint8),
        slots_BN,
        batch,
        n,
        table_RC.stride(0),
        slots_BN.stride(0),
        DUMMY=DUMMY_SLOT,
        UNIFORM=uniform,
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_N=triton.next_power_of_2(n),
        BLOCK=COPY_BLOCK,
    )


COPY_BLOCK, SPLITS = 512, 4  # a lane's prefix is copied by SPLITS programs, COPY_BLOCK slots at a time


@triton.jit
def _write_kv_indices(
    kv_indptr,
    kv_indices,
    table,
    rows,
    seq_lens,
    starts,
    sizes,
    depth_ptr,
    ancestors,
    slots,
    batch,
    n,
    table_stride,
    slots_stride,
    DUMMY: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, w, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width, splits = tl.num_programs(1), tl.num_programs(2)
    depth = tl.load(depth_ptr).to(tl.int32)

    # Where this lane's list begins: after all lists of the requests before, and of the lanes before.
    each = tl.arange(0, BLOCK_B)
    known = each < batch
    live = tl.load(sizes + each, known, other=0).to(tl.int32) - tl.load(starts + each, known, other=0).to(tl.int32)
    live = tl.minimum(live, width)
    length = tl.load(seq_lens + each, known, other=0).to(tl.int32) + depth
    if UNIFORM:
        entries = width * length
    else:
        entries = live * length + (width - live)
    seq_len = tl.load(seq_lens + b).to(tl.int32)
    start = tl.load(starts + b).to(tl.int32)
    live_b = tl.minimum(tl.load(sizes + b).to(tl.int32) - start, width)
    is_live = w < live_b
    length_b = seq_len + depth
    begin = tl.sum(tl.where(known & (each < b), entries, 0))
    if UNIFORM:
        begin += w * length_b
        own = length_b
    else:
        begin += tl.minimum(w, live_b) * length_b + tl.maximum(w - live_b, 0)
        own = tl.where(is_live, length_b, 1)
    if split == 0:
        tl.store(kv_indptr + b * width + w + 1, begin + own)
        if b + w == 0:
            tl.store(kv_indptr, 0)

    # The prefix; a dead lane repeats the dummy slot over its whole length.
    row = tl.load(rows + b).to(tl.int64) * table_stride
    copied = tl.where(is_live, seq_len, own)
    in_table = tl.where(is_live, seq_len, 0)
    for first in range(split * BLOCK, copied, splits * BLOCK):
        at = first + tl.arange(0, BLOCK)
        slot = tl.load(table + row + at, at < in_table, other=DUMMY)
        tl.store(kv_indices + begin + at, slot.to(kv_indices.dtype.element_ty), at < copied)

    # Ancestors and itself: node j goes behind the ancestors that came before it. The root (node 0) is the prefix's last.
    if split == 0:
        if is_live:
            node = tl.arange(0, BLOCK_N)
            on_path = tl.load(ancestors + (b * n + start + w).to(tl.int64) * n + node, (node > 0) & (node < n), other=0).to(tl.int32)
            position = tl.cumsum(on_path, 0) - 1
            slot = tl.load(slots + b.to(tl.int64) * slots_stride + node, on_path > 0, other=DUMMY)
            tl.store(kv_indices + begin + seq_len + position, slot.to(kv_indices.dtype.element_ty), on_path > 0)


def reference_kv_indices(
    table_RC, rows_B, seq_lens_B, start_B, size_B, depth, ancestors_BNN, slots_BN, width: int, uniform: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same lists from the definition, one lane at a time: (kv_indptr int32, kv_indices int64)."""
    lists = []
    for b, (row, seq_len, start, size) in enumerate(zip(rows_B.tolist(), seq_lens_B.tolist(), start_B.tolist(), size_B.tolist())):
        prefix = table_RC[row, :seq_len].long()
        for node in range(start, start + width):
            if node < size:
                path = ancestors_BNN[b, node].clone()
                path[0] = False
                lists.append(torch.cat((prefix, slots_BN[b, path].long())))
            else:
                lists.append(torch.full((seq_len + int(depth) if uniform else 1,), DUMMY_SLOT, device=prefix.device))
    lengths = torch.tensor([0] + [x.numel() for x in lists], dtype=torch.int32)
    return lengths.cumsum(0, dtype=torch.int32).to(table_RC.device), torch.cat(lists)
