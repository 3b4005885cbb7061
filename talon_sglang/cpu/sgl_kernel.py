"""PyTorch stand-ins for the CPU operators of `sgl_kernel` that a text model with EAGLE-type speculation calls in SGLang 0.5.23.

The signatures are those of the call sites in `sglang/kernels/ops/{speculative,kvcache}`, `sglang/srt/mem_cache/allocation.py` and
`intel_amx_backend.py`. See `talon_sglang/cpu/__init__.py` for when they are used.

Suffixes: B requests, N tree nodes per request, V vocabulary. Attention itself: `attention.py`.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import torch

from talon_sglang.cpu.attention import Kept, decode_spans, extend_spans

__talon_stand_in__ = True
__version__ = "0.4.10+talon.pytorch"


def publish() -> None:
    """Make this module importable as `sgl_kernel`, and its attention entry points reachable under `torch.ops.sgl_kernel`."""
    sys.modules["sgl_kernel"] = sys.modules[__name__]
    for op in (extend_attention_cpu, decode_attention_cpu, murmur_hash32_cpu):
        setattr(torch.ops.sgl_kernel, op.__name__, op)
    murmur_hash32_cpu.default = murmur_hash32_cpu  # SGLang names the overload of this one


# ---------------------------------------------------------------- sampling seeds


def murmur_hash32_cpu(seed_B, position_B, column_V):
    """[B, V] uint32: MurmurHash3 (x86, 32 bit, start value 0) of the 16 bytes seed, position, column; 8, 4 and 4 bytes, little-endian.

    The GPU's version is sglang/kernels/ops/sampling/murmur_hash.py: with the same seeds a CPU draws what a GPU draws.
    """
    seed_B = seed_B.view(torch.int64).numpy()
    hash_B = np.zeros(seed_B.size, np.uint32)
    for block_B in (seed_B, seed_B >> 32, position_B.to(torch.int64).numpy()):
        hash_B = murmur_block(hash_B, block_B.astype(np.uint32))
    hash_BV = murmur_block(hash_B[:, None], column_V.numpy().astype(np.uint32)) ^ np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hash_BV = (hash_BV ^ hash_BV >> np.uint32(shift)) * np.uint32(factor)
    return torch.from_numpy(hash_BV ^ hash_BV >> np.uint32(16))


def murmur_block(hash_, block):
    """The hash after four more bytes."""
    block = rotate(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return rotate(hash_ ^ block, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def rotate(bits, left: int):
    return bits << np.uint32(left) | bits >> np.uint32(32 - left)


# ---------------------------------------------------------------- slots


def ragged_rows(start_B, end_B):
    """(request, column) of every position in [start_b, end_b), request after request."""
    lengths = (end_B - start_B).long()
    request = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    offset = torch.arange(request.numel()) - (lengths.cumsum(0) - lengths)[request]
    return request, start_B.long()[request] + offset


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    request, column = ragged_rows(start, end)
    req_to_token[req_pool_indices.long()[request], column] = out_cache_loc[: column.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    request, column = ragged_rows(start, end)
    out_cache_loc[: column.numel()] = req_to_token[req_pool_indices.long()[request], column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps):
    column = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], column].flatten())


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move KV rows inside each layer's buffer; the buffers come as raw addresses and row sizes in bytes."""
    moved = tgt_loc != src_loc  # often none: the likeliest path comes first in the verify window
    target, source = tgt_loc[moved].numpy(), src_loc[moved].numpy()
    if target.size == 0:
        return
    rows = int(max(target.max(), source.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist()):
        memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(address)
        buffer = np.ctypeslib.as_array(memory).reshape(rows, row_bytes)
        buffer[target] = buffer[source]  # the right side is a copy, so overlapping moves are safe


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    accepted = accept_index.flatten()
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


# ---------------------------------------------------------------- tokens and trees


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens[: accept_lens.numel()] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def rotate_input_ids_cpu(input_ids, start, lengths, topk_index, select_index=None):
    """Shift each request's ids left by one and put its next token last (or at `select_index`)."""
    for i, (first, length) in enumerate(zip(start.tolist(), lengths.tolist())):
        if length == 0:
            continue
        input_ids[first : first + length - 1] = input_ids[first + 1 : first + length].clone()
        last = first + length - 1 if select_index is None else int(select_index[i])
        input_ids[last] = topk_index.flatten()[i]


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    n,
    mode,
):
    """Stock EAGLE's tree (TALON builds its own, `talon_sglang/verify_input.py`): candidate ids in layer-major order, parents by `id //
    topk`; mask mode QLEN_ONLY.
    """
    if int(mode) != 1:
        raise NotImplementedError(f"tree mask mode {int(mode)}: SGLang's CPU path uses QLEN_ONLY (1)")
    batch = seq_lens.numel()
    mask_BNN = tree_mask[: batch * n * n].view(batch, n, n)
    positions_BN = positions.view(batch, n)
    retrieve_index.copy_(torch.arange(batch * n).view(batch, n))
    for b, (selected, parents) in enumerate(zip(selected_index.tolist(), parent_list.tolist())):
        node_of = {candidate: node + 1 for node, candidate in enumerate(selected)}
        groups = [candidate // topk for candidate in selected]
        parent_of = [0] + [0 if g == 0 else node_of[parents[g]] for g in groups]
        next_token, next_sibling = [-1] * n, [-1] * n
        for node in range(n - 1, 0, -1):
            next_sibling[node], next_token[parent_of[node]] = next_token[parent_of[node]], node
        mask_NN, depth_N = torch.eye(n, dtype=tree_mask.dtype), [0] * n
        for node in range(1, n):  # parents come before children
            mask_NN[node] |= mask_NN[parent_of[node]]
            depth_N[node] = depth_N[parent_of[node]] + 1
        mask_BNN[b] = mask_NN
        positions_BN[b] = torch.tensor(depth_N) + seq_lens[b]
        retrieve_next_token[b] = torch.tensor(next_token)
        retrieve_next_sibling[b] = torch.tensor(next_sibling)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict
):
    """Walk each tree from the root while a child carries the target's token; `predicts` receives the target's token after each accepted
    node.
    """
    width = accept_index.shape[1]
    trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict.view_as(candidates))
    for b, (tokens, index, first_child, sibling, target) in enumerate(zip(*(t.tolist() for t in trees))):
        node, path = 0, [0]
        while len(path) < width:
            child = first_child[node]
            while child != -1 and tokens[child] != target[node]:
                child = sibling[child]
            if child == -1:
                break
            node = child
            path.append(node)
        for step, accepted in enumerate(path):
            accept_index[b, step] = index[accepted]
            predicts[index[accepted]] = target[accepted]
        accept_token_num[b] = len(path) - 1


# ---------------------------------------------------------------- attention


def extend_attention_cpu(
    q, k, v, o, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens, extend_lens, extend_start, max_extend_len,
    scale, logit_cap, is_cross, window, encoder_lens=None, sinks=None, tree_mask=None, is_causal=True,
):  # fmt: skip
    """New tokens against their request's KV (already written): causal among themselves, or by `tree_mask` (flat N*N per request)."""
    refuse_unsupported(logit_cap, is_cross, window, sinks)
    sources = req_to_token, req_pool_indices, seq_lens, extend_lens, extend_start, tree_mask, is_causal
    for span in Kept.of(sources, extend_spans):
        o[span.rows] = span.attend(q, k_buffer, v_buffer, scale)


def decode_attention_cpu(
    q, k_buffer, v_buffer, k_scale, v_scale, o, k, v, loc, attn_logits, req_to_token, req_pool_indices, seq_lens,
    scale, logit_cap, is_cross, window, encoder_lens=None, sinks=None,
):  # fmt: skip
    """One new token per row; writes its K and V first."""
    refuse_unsupported(logit_cap, is_cross, window, sinks)
    if k is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for span in Kept.of((req_to_token, req_pool_indices, seq_lens), decode_spans):
        o[span.rows] = span.attend(q, k_buffer, v_buffer, scale).view_as(o[span.rows])


def refuse_unsupported(logit_cap, is_cross, window, sinks) -> None:
    """The stand-ins cover plain causal attention; a silently wrong answer would be worse than a stop."""
    if logit_cap or is_cross or sinks is not None or window > 0:
        raise NotImplementedError(
            "the PyTorch stand-ins for sgl_kernel do not implement logit caps, cross attention, sliding windows or attention sinks: "
            "serve this model with a real sgl_kernel"
        )


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """Stock EAGLE's per-branch slot table [B*topk, pool_len]: the request's prefix, then the branch's own `num_steps` slots."""
    table = torch.zeros(req_pool_indices.numel() * topk, pool_len, dtype=req_to_token.dtype)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        branches = table[i * topk : (i + 1) * topk]
        branches[:, :length] = req_to_token[row, :length]
        branches[:, length : length + num_steps] = req_to_token[row, length : length + topk * num_steps].view(topk, num_steps)
    return table
