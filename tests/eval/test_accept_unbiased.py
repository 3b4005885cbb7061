"""The closed-form accept length at T > 0 against 20,000 plainly sampled rounds, on the toy whose target is a known Markov chain.

The oracle shares nothing with eval/: it draws tokens from the chain's transition table, grows trees from the reference head, and walks.
"""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.accept import Models, commit, tallies
from eval.policies import Chain, Eagle, Talon
from eval.rollout import TargetRun
from eval.rounds import acceptance, ratio_error
from talon_sglang.tree import TreeConfig, children, grow_tree
from tests import toy
from train.head import Eagle3Head, HeadConfig
from train.reference import ReferenceHead
from train.target import FrozenTarget

pytestmark = pytest.mark.slow
LENGTH = 24  # tokens an answer
PROMPTS = [[3, 5], [3, 30], [3, 17], [3, 11], [3, 44], [3, 8], [3, 21], [3, 60]]  # all three groups of the toy
NODES, WIDTH = 12, 3


def lm_head_VH() -> torch.Tensor:
    """The toy's spread target, with more weight on the token that the draft expects too."""
    scores_VH = toy.spread_VH()
    for token in range(toy.VOCAB):
        scores_VH[toy.after(token), token] += 0.5
    return scores_VH


@pytest.fixture(scope="module")
def models():
    config = LlamaConfig(**{key: value for key, value in toy.target_config().items() if key != "torch_dtype"})
    model = LlamaForCausalLM(config)
    model.load_state_dict(toy.target_weights() | {"lm_head.weight": lm_head_VH()})
    head = Eagle3Head(HeadConfig.from_target(config, toy.VOCAB))
    head.load_state_dict(toy.head_weights())
    return Models(FrozenTarget(model, head.config.aux_layers), head.eval().requires_grad_(False), torch.arange(toy.VOCAB), set())


@pytest.fixture(scope="module")
def plain_rounds(models) -> tuple[list[int], list[int]]:
    """(tokens, rounds) of sampled answers until 20,000 rounds are drawn."""
    weights = {**toy.head_weights(), "d2t": torch.zeros(toy.VOCAB, dtype=torch.long)}
    reference = ReferenceHead(weights, models.head.config.to_json(), toy.embedding_VH())
    # All logits are those of the last token's (normed) embedding.
    normed_VH = toy.embedding_VH() * (toy.embedding_VH().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    chain = (normed_VH @ lm_head_VH().T).double().softmax(-1).tolist()
    known = {}

    def after(token: int) -> torch.Tensor:  # the toy's draft sees its last token only
        if token not in known:
            known[token] = reference.chain_log_probs(torch.zeros(1, 3 * toy.HIDDEN), [0, token], [])[0]
        return known[token]

    trees = {}
    for root in range(toy.VOCAB):
        tree = grow_tree(
            lambda lanes, root=root: torch.stack([after(lane[-1] if lane else root) for lane in lanes]), TreeConfig(NODES, WIDTH)
        )
        trees[root] = [{tree.tokens[kid]: kid for kid in kids} for kids in children(tree.parents)]
    rng, tokens, rounds = random.Random(11), [], []
    while sum(rounds) < 20_000:
        last, count, verified = PROMPTS[len(rounds) % len(PROMPTS)][-1], 0, 0
        last = rng.choices(range(toy.VOCAB), chain[last])[0]  # the first token, which prefill gives
        count = 1
        while count < LENGTH:
            verified += 1
            tree, node = trees[last], 0
            while node is not None and count < LENGTH:
                last = rng.choices(range(toy.VOCAB), chain[last])[0]
                count += 1
                node = tree[node].get(last)
        tokens.append(count)
        rounds.append(verified)
    return tokens, rounds


def estimate(models, policy, seed: str, repeats: int):
    run = TargetRun(models.target, PROMPTS * repeats, LENGTH, 1.0, models.end_ids)
    texts = run.answer([f"{seed}/{i}" for i in range(len(PROMPTS) * repeats)])
    return acceptance(tallies(models, run, commit(models, texts), policy))


def test_the_estimate_is_within_three_errors_of_plain_sampling_at_less_than_half_the_variance(models, plain_rounds):
    tokens, rounds = plain_rounds
    plain, plain_error = sum(tokens) / sum(rounds), ratio_error(tokens, rounds)
    figure = estimate(models, Talon(NODES, WIDTH, 0), "closed", repeats=12)
    print(f"plain {plain:.4f} ± {plain_error:.4f} ({sum(rounds)} rounds); {figure}")
    assert plain > 1.2, "almost nothing is accepted: this test shows little"
    assert abs(figure.accept_length - plain) <= 3 * (plain_error**2 + figure.standard_error**2) ** 0.5
    # Both errors are of the same rounds, so of the same number of target forwards.
    assert figure.standard_error**2 < 0.5 * figure.sampled_standard_error**2


def test_the_stated_error_is_the_spread_of_repeated_estimates(models):
    """Over 30 small runs: the closed form spreads less than the sampled outcomes, both means agree, and so does the stated error."""
    runs = [estimate(models, Talon(NODES, WIDTH, 0), f"run {i}", repeats=1) for i in range(30)]

    def spread(name):
        values = torch.tensor([getattr(run, name) for run in runs], dtype=torch.float64)
        return values.mean().item(), values.std().item()

    (closed, closed_spread), (sampled, sampled_spread) = spread("accept_length"), spread("sampled_accept_length")
    print(f"closed {closed:.4f}, spread {closed_spread:.4f}; sampled {sampled:.4f}, spread {sampled_spread:.4f}")
    assert abs(closed - sampled) <= 3 * sampled_spread / 30**0.5
    assert closed_spread < 0.75 * sampled_spread


@pytest.mark.parametrize("policy", [Chain(4), Eagle(3, 3, 12), Eagle(3, 3, 12, approximate=True)])
def test_every_policys_estimate_agrees_with_its_own_samples(models, policy):
    figure = estimate(models, policy, policy.name, repeats=12)
    assert abs(figure.accept_length - figure.sampled_accept_length) <= 3 * figure.sampled_standard_error
    assert figure.standard_error < figure.sampled_standard_error
