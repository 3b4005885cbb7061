"""Sampling seeds: a token drawn for a request with `sampling_seed` depends on the seed, the token's position and the target's distribution
there, and on nothing else: not on the batch, the tree, or how often it was retracted.

The draw is the one that SGLang makes with --enable-deterministic-inference (Gumbel noise from a hash of seed, position and column, its
`multinomial_with_seed`), so such a server says the same. Two things differ:
- SGLang seeds every request of such a server, with 42 if it names no seed, and no request of any other server. Here a request has the seed
  that it names, and one without a seed is drawn at random.
- SGLang sorts all rows of a batch as soon as one of them is filtered (top_k, top_p; greedy is top_k 1), which gives the other rows' tokens
  other columns and so other draws, and ends its scheduler on a seed beside min_p. Here each row is drawn as if it were alone.

Suffixes: B rows of the batch, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from sglang.srt.layers.sampler import Sampler, sampling_from_probs_torch, top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL


def with_seeds(sampling_info, reqs):
    """`sampling_info` with `sampling_seed` [B] for these requests if one of them names a seed; a random one for those that do not."""
    seeds = [req.sampling_params.sampling_seed for req in reqs]
    if sampling_info.is_all_greedy or all(seed is None for seed in seeds):
        return sampling_info
    limits = torch.iinfo(torch.int64)
    seed_B = torch.randint(limits.min, limits.max, (len(seeds),))
    for row, seed in enumerate(seeds):
        if seed is not None:
            seed_B[row] = seed
    return replace(sampling_info, sampling_seed=seed_B.to(sampling_info.device))


class SeededSampler(Sampler):
    """SGLang's sampler, which draws the rows of a batch with seeds one kind at a time."""

    def _sample_from_probs(self, probs, sampling_info, positions, simple_sampling_case):
        if sampling_info.sampling_seed is None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        with torch.compiler.set_stance("force_eager"):  # SGLang compiles multinomial_with_seed: seconds, for every new number of rows
            return draw_seeded(probs, sampling_info, positions), None


def draw_seeded(probs_BV, info, position_B):
    """[B] int32 tokens. Unfiltered rows hash token ids, filtered ones ranks, as SGLang does for a request alone."""
    filtered_B = (info.top_ks != TOP_K_ALL) | (info.top_ps != 1.0) | (info.min_ps > 0)
    token_B = torch.empty(len(position_B), dtype=torch.int32, device=probs_BV.device)
    free, filtered = (~filtered_B).nonzero().flatten(), filtered_B.nonzero().flatten()
    if len(free):
        token_B[free] = sampling_from_probs_torch(probs_BV[free], info.sampling_seed[free], position_B[free])
    if len(filtered):
        rows_XV, min_p_X = probs_BV[filtered], info.min_ps[filtered]
        # SGLang filters by min_p last, on its sorted rows; here first, which keeps the same tokens: those of a row's tail go either way.
        rows_XV[rows_XV < rows_XV.max(-1, keepdim=True).values * min_p_X[:, None]] = 0.0
        token_B[filtered] = top_k_top_p_min_p_sampling_from_probs_torch(
            rows_XV, info.top_ks[filtered], info.top_ps[filtered], min_p_X, False, info.sampling_seed[filtered], position_B[filtered]
        )
    return token_B
