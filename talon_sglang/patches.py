"""The names of SGLang 0.5.23 that TALON exchanges while one of its own calls runs, because SGLang offers no seam there.

Each is a context around an inherited method and puts the originals back. A version of SGLang without the name fails inside the context with
AttributeError, at the first request.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

from sglang.srt.speculative import eagle_utils, eagle_worker_common, eagle_worker_v2

from talon_sglang.node_logits import adjust_node_logits, needs_node_logits
from talon_sglang.sampling import accept_sampled
from talon_sglang.seeds import with_seeds
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


def exact_verify(sampler, round_):
    """SGLang's `eagle_sample` accepts by argmax on a CPU, whatever the sampling parameters, and its penalties and custom processors are
    approximate. Inside this context a request's rules hold at every node (node_logits.py), and a batch with a sampled request draws the
    target's tokens with `sampler`, SGLang's own (sampling.py). A greedy batch without such rules takes SGLang's path unchanged.

    `round_()` gives the current round's (TreeBatch, target tokens [B, N]).
    """

    def eagle_sample(verify_input, batch, logits_output, grammar_mask=None, *args, **kwargs):
        if batch.forward_mode.is_idle():
            return stock(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
        given, logits = batch.sampling_info, logits_output.next_token_logits
        if needs_node_logits(given):
            batch.sampling_info = adjust_node_logits(logits, batch.reqs, *round_(), given, grammar_mask)
            grammar_mask = None
        # By the time SGLang asks for the greedy walk, bias and grammar are in the logits too.
        walk = partial(accept_sampled, sampler, with_seeds(batch.sampling_info, batch.reqs), logits, verify_input.positions)
        walks = {} if given.is_all_greedy else {"verify_tree_greedy_func": walk}
        try:
            with exchanged(eagle_utils, **walks):
                return stock(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
        finally:
            batch.sampling_info = given

    stock = eagle_worker_common.eagle_sample
    return exchanged(eagle_worker_common, eagle_sample=eagle_sample)
