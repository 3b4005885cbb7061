"""Sampled acceptance is lossless: the joint distribution of three tokens over 40,000 draws against exact enumeration, for trees of both
extremes.
"""

import itertools

import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("sglang", reason="needs SGLang")
from talon_sglang.sampling import accept_sampled  # noqa: E402
from talon_sglang.tree import TreeBatch, TreeConfig  # noqa: E402
from talon_sglang.verify_input import build_verify_input  # noqa: E402

VOCAB, BATCH, TOKENS = 5, 40_000, 3
generator = torch.Generator().manual_seed(0)
TARGET = (torch.randn(VOCAB, VOCAB, generator=generator) * 1.5).log_softmax(-1)  # next token given the last
DRAFTS = {
    "sure, and often wrong": torch.full((VOCAB, VOCAB), -12.0).fill_diagonal_(0.0).roll(1, 1).log_softmax(-1),
    "hopeless": torch.zeros(VOCAB, VOCAB).log_softmax(-1),
    "good": (TARGET + 0.3 * torch.randn(VOCAB, VOCAB, generator=generator)).log_softmax(-1),
}
TREES = [TreeConfig(2, 1), TreeConfig(6, 2, 0.3), TreeConfig(12, 5, 0.03), TreeConfig(9, 1, 1.0)]


def fair(output, *_):
    return torch.multinomial(output.next_token_logits.softmax(-1), 1, generator=generator).view(-1)


def warmer(output, *_):
    """A wrong sampler: temperature 1.3 where 1.0 was asked for."""
    return torch.multinomial((output.next_token_logits / 1.3).softmax(-1), 1, generator=generator).view(-1)


def generate(draft, config, sampler):
    """Rounds of draft, verify and accept from token 0 until every request has three tokens. Returns [BATCH, 3]."""
    told = [[] for _ in range(BATCH)]
    root = torch.zeros(BATCH, dtype=torch.int64)
    while min(map(len, told)) < TOKENS:
        trees = TreeBatch(BATCH, config)
        trees.tokens_BN[:, 0] = root
        while trees.num_lanes:
            trees.expand(draft[trees.tokens_BN[trees.frontier]])
        n = config.node_budget
        verify = build_verify_input(
            trees, root, trees.tokens_BN, torch.ones(BATCH, dtype=torch.int64), torch.zeros(BATCH, n, dtype=torch.int64)
        )
        predicts = torch.zeros(BATCH * n, dtype=torch.int32)
        accepted = torch.full((BATCH, verify.max_tree_depth), -1, dtype=torch.int32)
        links = dict(retrieve_next_token=verify.retrieve_next_token, retrieve_next_sibling=verify.retrieve_next_sibling)
        accept_sampled(
            sampler, None, TARGET[verify.draft_token], verify.positions, predicts=predicts, accept_index=accepted,
            accept_token_num=torch.zeros(BATCH, dtype=torch.int32), candidates=verify.draft_token.view(BATCH, n), **links,
        )  # fmt: skip
        for tokens, row in zip(told, accepted.tolist()):
            tokens += [int(predicts[i]) for i in row if i >= 0]
        root = torch.tensor([tokens[-1] for tokens in told])
    return torch.tensor([tokens[:TOKENS] for tokens in told])


def p_value(tokens):
    triples = list(itertools.product(range(VOCAB), repeat=TOKENS))
    expected = torch.tensor([float((TARGET[0, a] + TARGET[a, b] + TARGET[b, c]).exp()) for a, b, c in triples]).double()
    code = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    counts = torch.bincount(code, minlength=len(triples)).double()
    common = expected * BATCH >= 5  # the chi-square approximation needs five expected draws; the rare triples form one class
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    probabilities = torch.cat((expected[common], expected[~common].sum()[None]))
    return chisquare(observed, probabilities / probabilities.sum() * BATCH).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("config", TREES, ids=str)
def test_the_joint_distribution_is_the_targets(name, config):
    assert p_value(generate(DRAFTS[name], config, fair)) > 0.001


@pytest.mark.slow
def test_a_wrong_sampler_fails_the_same_test():
    assert p_value(generate(DRAFTS["good"], TREES[2], warmer)) < 1e-6
