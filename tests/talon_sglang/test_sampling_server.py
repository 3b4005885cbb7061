"""Sampling in the real server: the joint distribution of three tokens is the target's, by exact enumeration over the toy Markov chain.

Requests start where the draft is sure (deep, narrow trees) and where it is hopeless (wide ones).
"""

import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("sglang", reason="needs SGLang")
from eval.client import Client  # noqa: E402
from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import FORKING, GROUPS, VOCAB, spread_logits, write_toy  # noqa: E402

pytestmark = pytest.mark.slow
TOKENS = 3
DRAWS = int(os.environ.get("TALON_DRAWS", "2000"))  # per case and start; 20,000 take about five minutes each on a slow core
STARTS = {"sure": GROUPS["sure"][0], "hopeless": GROUPS["hopeless"][0]}
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 1.0, "min_p": 0.15},
    {"temperature": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0.7, "logit_bias": {"3": 2.0, "30": -3.0, "50": 1.0}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    target, head = write_toy(tmp_path_factory.mktemp("spread"), spread=True)
    extra = ("--skip-tokenizer-init",)
    spec = ServerSpec(target, head, "TALON", nodes=16, width=4, steps=0, threads=1, max_running_requests=96, extra=extra, launcher=FORKING)
    with serve(spec) as server, Client(server.url) as client:
        yield client


def draw(server, last: int, sampling: dict, draws: int) -> torch.Tensor:
    """[draws, 3] sampled tokens after `last`."""
    told = []
    while len(told) < draws:
        body = {"input_ids": [[3, 2, last]] * min(1000, draws), "sampling_params": {"max_new_tokens": TOKENS} | sampling}
        answers = httpx.post(server.url + "/generate", json=body, timeout=300, trust_env=False).json()
        told += [answer["output_ids"] for answer in answers]
    return torch.tensor(told)


def enumerate_joint(last: int, sampling: dict) -> torch.Tensor:
    """[V, V, V] probabilities of the next three tokens, by SGLang's documented rules: penalties over the output, bias, temperature,
    then top_k, top_p and min_p.
    """
    token_VV = torch.eye(VOCAB, dtype=torch.float64)
    none = torch.zeros(1, VOCAB, dtype=torch.float64)
    first = next_probabilities(torch.tensor([last]), none, sampling)[0]
    second = next_probabilities(torch.arange(VOCAB), token_VV, sampling)
    pair = (token_VV[:, None] + token_VV[None]).view(-1, VOCAB)  # counts after every (a, b)
    third = next_probabilities(torch.arange(VOCAB).repeat(VOCAB), pair, sampling).view(VOCAB, VOCAB, VOCAB)
    return first[:, None, None] * second[:, :, None] * third


def next_probabilities(last_R, count_RV, sampling):
    logits_RV = spread_logits().double()[last_R]
    logits_RV = logits_RV - sampling.get("frequency_penalty", 0.0) * count_RV
    repeat = sampling.get("repetition_penalty", 1.0)
    repeated = torch.where(logits_RV < 0, logits_RV * repeat, logits_RV / repeat)
    logits_RV = torch.where(count_RV > 0, repeated, logits_RV)
    for token, bias in sampling.get("logit_bias", {}).items():
        logits_RV[:, int(token)] += bias
    p_RV, order_RV = (logits_RV / sampling["temperature"]).softmax(-1).sort(dim=-1, descending=True)
    kept = (torch.arange(VOCAB) < sampling.get("top_k", VOCAB)) & (p_RV.cumsum(-1) - p_RV <= sampling.get("top_p", 1.0))
    kept &= p_RV >= sampling.get("min_p", 0.0) * p_RV[:, :1]
    p_RV = torch.where(kept, p_RV, 0.0)
    return torch.zeros_like(p_RV).scatter_(1, order_RV, p_RV / p_RV.sum(-1, keepdim=True))


def p_value(tokens: torch.Tensor, joint: torch.Tensor) -> float:
    """Chi-square over classes of tokens: each of the three by its residue modulo 4, or modulo 8 where the draws allow."""
    m = 8 if len(tokens) >= 10_000 else 4
    residue = torch.arange(VOCAB) % m
    member_MV = (residue == torch.arange(m)[:, None]).double()
    expected = torch.einsum("abc,ia,jb,kc->ijk", joint, member_MV, member_MV, member_MV).flatten() * len(tokens)
    counts = torch.bincount((tokens % m) @ torch.tensor([m * m, m, 1]), minlength=m**3).double()
    common = expected >= 5  # the chi-square approximation needs that; the rarer classes are counted together
    pooled = [torch.cat((x[common], x[~common].sum()[None])) for x in (counts, expected)]
    if pooled[1][-1] < 1e-9:
        assert pooled[0][-1] == 0, "a token that cannot occur did"
        pooled = [x[:-1] for x in pooled]
    return chisquare(*pooled).pvalue


@pytest.mark.parametrize("sampling", CASES, ids=str)
@pytest.mark.parametrize("start", STARTS)
def test_three_tokens_follow_the_targets_joint_distribution(server, start, sampling):
    tokens = draw(server, STARTS[start], sampling, DRAWS)
    assert p_value(tokens, enumerate_joint(STARTS[start], sampling)) > 0.001
    wrong = sampling | {"temperature": sampling["temperature"] * 1.3}  # what a wrong sampler would give
    assert p_value(tokens, enumerate_joint(STARTS[start], wrong)) < 1e-3


def test_penalties_within_one_round_keep_tokens_from_coming_back(server):
    """The share of answers that say a token twice, which SGLang's relaxed rule would not lower within a round."""
    penalties = {"temperature": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0}
    a, b, c = torch.meshgrid(*[torch.arange(VOCAB)] * 3, indexing="ij")
    again = (a == b) | (b == c) | (a == c)
    expected, without = (float(enumerate_joint(STARTS["sure"], rules)[again].sum()) for rules in (penalties, {"temperature": 1.0}))
    tokens = draw(server, STARTS["sure"], penalties, 4000)
    seen = float((tokens.sort(dim=1).values.diff(dim=1) == 0).any(dim=1).double().mean())
    error = (expected * (1 - expected) / len(tokens)) ** 0.5
    assert abs(seen - expected) < 4 * error and seen + 6 * error < without, (seen, expected, without)


def test_greedy_and_sampled_requests_share_a_batch(server):
    best = spread_logits().argmax(-1).tolist()
    expected, token = [], 5
    for _ in range(40):
        token = best[token]
        expected.append(token)
    jobs = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.2}] * 2
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda sampling: server.generate([1, 5], 40, **sampling).output_ids, jobs))
    for sampling, got in zip(jobs, answers):
        greedy = sampling["temperature"] == 0 or sampling.get("top_k") == 1
        assert (got == expected) == greedy
