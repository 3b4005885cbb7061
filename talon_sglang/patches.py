"""The names of SGLang 0.5.23 that TALON exchanges while one of its own calls runs, because SGLang offers no seam there.

Each is a context around an inherited method and puts the originals back. A version of SGLang without the name fails inside the context with
AttributeError, at the first request.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

from sglang.srt.speculative import eagle_utils, eagle_worker_common, eagle_worker_v2

from talon_sglang.sampling import accept_sampled
from talon_sglang.tree import exact_topk


@contextmanager
def exchanged(module, **names):
    """`module`'s globals `names` have other values inside the context."""
    originals = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)


def root_candidates_as_log_probs():
    """Draft extend ends with `fast_topk(renorm_draft_probs(logits))`, and the result travels to the next round: here log-probabilities, in
    `exact_topk`'s order of ties, instead of probabilities in `torch.topk`'s.
    """
    return exchanged(
        eagle_worker_v2,
        renorm_draft_probs=lambda logits, *_: logits.float().log_softmax(-1),
        fast_topk=lambda log_probs, k, dim: exact_topk(log_probs, min(k, log_probs.shape[-1])),
    )


def sampled_verify(sampler):
    """On a CPU SGLang's `eagle_sample` accepts by argmax whatever the sampling parameters. Inside this context a batch with a sampled
    request draws the target's tokens with `sampler`, SGLang's own; an all-greedy batch takes SGLang's path unchanged.
    """

    def eagle_sample(verify_input, batch, logits_output, *args, **kwargs):
        if batch.forward_mode.is_idle() or batch.sampling_info.is_all_greedy:
            return stock(verify_input, batch, logits_output, *args, **kwargs)
        # By the time SGLang asks for the greedy walk, it has applied penalties, bias and grammar to the logits in place.
        walk = partial(accept_sampled, sampler, batch.sampling_info, logits_output.next_token_logits, verify_input.positions)
        with exchanged(eagle_utils, verify_tree_greedy_func=walk):
            return stock(verify_input, batch, logits_output, *args, **kwargs)

    stock = eagle_worker_common.eagle_sample
    return exchanged(eagle_worker_common, eagle_sample=eagle_sample)
