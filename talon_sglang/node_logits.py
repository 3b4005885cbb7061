"""What plain decoding does to a token's logits before it chooses, done at every tree node for the tokens of that node's own path:

    penalties and min_new_tokens  ->  grammar mask  ->  logit bias  ->  custom logit processors

(SGLang's verify is approximate here: it applies one row of penalties, without the drafted tokens, to all nodes of a request, and ignores
custom processors.) It costs a pass over the logits, and only in batches with a request that asks for it.

SGLang's penalizers keep running totals, and only hear of the last token of each round. Nothing of theirs is used here: the history is the
request's own output, whose last token is the root.

Suffixes: B requests, N tree nodes, V target vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from talon_sglang.tree import TreeBatch


def needs_node_logits(sampling_info) -> bool:
    """True if a request of the batch has a penalty, min_new_tokens or a custom processor; bias and grammar alone are exact in SGLang."""
    penalised = sampling_info.acc_additive_penalties is not None or sampling_info.acc_scaling_penalties is not None
    return penalised or sampling_info.has_custom_logit_processor


def adjust_node_logits(logits, reqs, trees: TreeBatch, tokens_BN, sampling_info, grammar_mask):
    """Adjust `logits` [B*N, V] in place, completely; returns `sampling_info` without what is now in the logits."""
    logits_BNV = logits.view(*tokens_BN.shape, -1)
    for b, req in enumerate(reqs):
        penalise_nodes(logits_BNV[b], req, tokens_BN[b], trees.ancestors_BNN[b], trees.depths_BN[b])
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if sampling_info.logit_bias is not None:
        logits_BNV += sampling_info.logit_bias[:, None]
    if sampling_info.has_custom_logit_processor:
        run_processors(logits_BNV, reqs, trees, tokens_BN, sampling_info)
    return replace(
        sampling_info, acc_additive_penalties=None, acc_scaling_penalties=None, logit_bias=None, has_custom_logit_processor=False,
        custom_logit_processor=None, custom_params=None,
    )  # fmt: skip


# ---------------------------------------------------------------- penalties


def penalise_nodes(logits_NV, req, tokens_N, ancestors_NN, depths_N) -> None:
    """Penalties and min_new_tokens of one request, in place. The root (node 0) is the last token of the request's output."""
    params, vocab = req.sampling_params, logits_NV.shape[1]
    if has_penalty(params):
        count_V = output_counts(req, vocab, logits_NV.device)
        path_NN = ancestors_NN.float()
        path_NN[:, 0] = 0  # counted in the output
        same_NN = (tokens_N[:, None] == tokens_N).float()
        # A node's counts differ from the request's only at tokens of the tree: column a of node v is the count of a's token after v.
        token_NN = tokens_N.expand_as(path_NN)
        special_NN = penalised(logits_NV.gather(1, token_NN), count_V[tokens_N] + path_NN @ same_NN, params)
        logits_NV.copy_(penalised(logits_NV, count_V, params))
        logits_NV.scatter_(1, token_NN, special_NN)
    if params.min_new_tokens > len(req.output_ids):
        too_short_N = len(req.output_ids) + depths_N < params.min_new_tokens
        logits_NV[:, stop_ids(req, vocab)] += torch.where(too_short_N, -torch.inf, 0.0)[:, None]


def committed_penalties(reqs, vocab: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(additive [B, V], scaling [B, V]) for each request's next token, from its whole output, in the form of SamplingBatchInfo's `acc_*`.

    For the prefill of requests that were retracted: SGLang's penalizers start from nothing there.
    """
    additive, scaling = [], []
    for req in reqs:
        params = req.sampling_params
        count_V = output_counts(req, vocab, device)
        additive_V = -additive_penalty(count_V, params)
        if len(req.output_ids) < params.min_new_tokens:
            additive_V[stop_ids(req, vocab)] = -torch.inf
        additive.append(additive_V)
        scaling.append(torch.where(count_V > 0, params.repetition_penalty, 1.0))
    return torch.stack(additive), torch.stack(scaling)


def has_penalty(params) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def additive_penalty(count, params):
    return params.frequency_penalty * count + params.presence_penalty * (count > 0)


def penalised(logits, count, params):
    """SGLang's rules (srt/sampling/penaltylib) for tokens that the output holds `count` times."""
    logits = logits - additive_penalty(count, params)
    if params.repetition_penalty == 1.0:
        return logits
    scaling = torch.where(count > 0, params.repetition_penalty, 1.0)
    return torch.where(logits < 0, logits * scaling, logits / scaling)


def output_counts(req, vocab: int, device) -> torch.Tensor:
    """How often the request's output holds each token, [V] float."""
    return torch.bincount(torch.tensor(req.output_ids, dtype=torch.int64), minlength=vocab).float().to(device)


def stop_ids(req, vocab: int) -> list[int]:
    """Tokens that min_new_tokens holds back, as in SGLang's BatchedMinNewTokensPenalizer."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(getattr(req.tokenizer, "additional_stop_token_ids", None) or ()) | {req.tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None and 0 <= i < vocab)


# ---------------------------------------------------------------- custom processors


def run_processors(logits_BNV, reqs, trees: TreeBatch, tokens_BN, sampling_info) -> None:
    """SGLang's custom logit processors, one row per tree node; `__req__` of a node's row shows the output with the node's path appended."""
    n, vocab = logits_BNV.shape[1:]
    rows_XV = logits_BNV.view(-1, vocab)
    for entry in sampling_info.custom_logit_processor.values():
        index, params = [], []
        for b in entry.rows:
            for node, path in enumerate(node_paths(trees, tokens_BN, b)):
                index.append(b * n + node)
                params.append(params_at_node(sampling_info.custom_params[b], reqs[b], path))
        index = torch.tensor(index, device=rows_XV.device)
        rows_XV[index] = entry.processor(rows_XV[index], params).to(rows_XV.dtype)


def params_at_node(params: dict | None, req, path: list[int]) -> dict | None:
    if not path or params is None or "__req__" not in params:
        return params
    view = copy.copy(req)
    view.output_ids = req.output_ids + type(req.output_ids)(req.output_ids.typecode, path)
    return params | {"__req__": view}


def node_paths(trees: TreeBatch, tokens_BN, b: int) -> list[list[int]]:
    """The drafted tokens (target ids) from below the root to each node of request b's tree."""
    size = int(trees.size_B[b])
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens_BN[b, 1:size].tolist(), trees.parents_BN[b, 1:size].tolist()):
        paths.append([*paths[parent], token])
    return paths
