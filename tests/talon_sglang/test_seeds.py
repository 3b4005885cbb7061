"""The seeded draw: what its hash is, that a row's token does not depend on other rows, and that it is exactly distributed over seeds."""

import struct
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("sglang", reason="needs SGLang")
from sglang.srt.sampling.sampling_params import TOP_K_ALL  # noqa: E402

from talon_sglang.cpu.sgl_kernel import murmur_hash32_cpu  # noqa: E402
from talon_sglang.seeds import draw_seeded, with_seeds  # noqa: E402
from tests.talon_sglang.test_sampling_server import next_probabilities  # noqa: E402
from tests.toy import VOCAB, spread_logits  # noqa: E402


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with start value 0, for whole words, one byte string at a time."""
    mask, h = 0xFFFFFFFF, 0
    for (word,) in struct.iter_unpack("<I", data):
        mixed = word * 0xCC9E2D51 & mask
        h ^= ((mixed << 15 | mixed >> 17) & mask) * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = h * 5 + 0xE6546B64 & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_the_hash_is_murmurs():
    assert murmur3(b"test") == 0xBA6BD213  # published
    seeds, positions = [0, 1, 42, -1, 2**63 - 1, -(2**63), 123456789012345], [0, 1, 5, 70000, 2**31 - 1, 17, 4]
    got = murmur_hash32_cpu(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.arange(100))
    for row, (seed, position) in enumerate(zip(seeds, positions)):
        assert got[row].tolist() == [murmur3(struct.pack("<qII", seed, position, column)) for column in range(100)]


RULES = [
    {},
    {"top_k": 1},
    {"top_k": 9},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.6},
]


def sampling_info(rules: list[dict], seeds: list[int]):
    return SimpleNamespace(
        top_ks=torch.tensor([r.get("top_k", TOP_K_ALL) for r in rules], dtype=torch.int32),
        top_ps=torch.tensor([r.get("top_p", 1.0) for r in rules]),
        min_ps=torch.tensor([r.get("min_p", 0.0) for r in rules]),
        sampling_seed=torch.tensor(seeds),
    )


def draw(rules: list[dict], logits_BV, seeds, positions) -> list[int]:
    temperature_B = torch.tensor([r.get("temperature", 1.0) for r in rules])
    probs_BV = (logits_BV / temperature_B[:, None]).softmax(-1)
    before_BV = probs_BV.clone()
    with torch.compiler.set_stance("force_eager"):
        tokens = draw_seeded(probs_BV, sampling_info(rules, seeds), torch.tensor(positions)).tolist()
    assert probs_BV.equal(before_BV)  # the logprobs that are returned come from them
    return tokens


def test_a_rows_token_does_not_depend_on_the_other_rows():
    logits_BV = torch.randn(len(RULES), VOCAB, generator=torch.Generator().manual_seed(1))
    seeds, positions = list(range(len(RULES))), [3] * len(RULES)
    together = draw(RULES, logits_BV, seeds, positions)
    alone = [draw([RULES[b]], logits_BV[b : b + 1], [seeds[b]], [3])[0] for b in range(len(RULES))]
    assert together == alone
    order = torch.randperm(len(RULES), generator=torch.Generator().manual_seed(2)).tolist()
    mixed = draw([RULES[b] for b in order], logits_BV[order], [seeds[b] for b in order], positions)
    assert mixed == [alone[b] for b in order]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_the_draw_has_the_targets_distribution_over_seeds_and_over_positions(rules, vary):
    count = 20_000
    values, same = list(range(count)), [7] * count
    seeds, positions = (values, same) if vary == "seed" else (same, values)
    tokens = draw([rules] * count, spread_logits()[5].expand(count, -1), seeds, positions)
    seen_V = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()

    def p_value(temperature):
        asked = {"temperature": temperature} | rules
        expected_V = next_probabilities(torch.tensor([5]), torch.zeros(1, VOCAB), asked)[0] * count
        assert seen_V[expected_V == 0].sum() == 0, "a token that cannot be drawn was"
        possible_V = expected_V > 0
        return chisquare(seen_V[possible_V], expected_V[possible_V]).pvalue if possible_V.sum() > 1 else 1.0

    assert p_value(rules.get("temperature", 1.0)) > 0.001
    if rules.get("top_k") != 1:
        rules = {key: value for key, value in rules.items() if key != "temperature"}
        assert p_value(1.4) < 1e-6  # what a wrong sampler would give


@dataclass
class SampleInfo:
    is_all_greedy: bool
    sampling_seed: torch.Tensor | None = None
    device: str = "cpu"


def test_only_a_batch_with_a_seed_pays_and_requests_without_one_are_drawn_anew():
    def batch(*seeds, greedy=False):
        info = SampleInfo(is_all_greedy=greedy)
        return info, with_seeds(info, [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=s)) for s in seeds])

    for given, got in (batch(None, None), batch(3, 4, greedy=True)):
        assert got is given
    rows = [batch(3, None, -5, None)[1].sampling_seed.tolist() for _ in range(2)]
    assert [row[0] for row in rows] == [3, 3] and [row[2] for row in rows] == [-5, -5]
    assert len({row[b] for row in rows for b in (1, 3)}) == 4
