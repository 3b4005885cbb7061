"""Penalties at tree nodes against SGLang's own penalizers, fed the path of each node token by token."""

from array import array
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
from sglang.srt.sampling.penaltylib import (  # noqa: E402
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from talon_sglang.node_logits import committed_penalties, node_paths, penalise_nodes  # noqa: E402
from talon_sglang.tree import TreeBatch, TreeConfig  # noqa: E402

VOCAB = 23
PENALIZERS = {BatchedFrequencyPenalizer, BatchedMinNewTokensPenalizer, BatchedPresencePenalizer, BatchedRepetitionPenalizer}


def request(generator, output):
    def draw(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    params = SimpleNamespace(
        frequency_penalty=draw(0.0, 0.7, -1.2),
        presence_penalty=draw(0.0, 0.5, -0.3),
        repetition_penalty=draw(1.0, 1.3, 0.8),
        min_new_tokens=draw(0, len(output), len(output) + 2, len(output) + 9),
        stop_token_ids={3, 7},
    )
    tokenizer = SimpleNamespace(eos_token_id=5, additional_stop_token_ids=None)
    return SimpleNamespace(sampling_params=params, output_ids=array("q", output), eos_token_ids={11}, tokenizer=tokenizer)


class Batch:  # the orchestrator keeps a weak reference, which a SimpleNamespace cannot have
    device = "cpu"

    def __init__(self, reqs):
        self.reqs = reqs


def slow(logits_V, req, said):
    """SGLang's plain decoding: the penalizers hear every token of the output, then change the logits of the next one."""
    batch = Batch([req])
    orchestrator = BatchedPenalizerOrchestrator(VOCAB, batch, PENALIZERS)
    for token in said:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    logits = logits_V[None].clone()
    additive = torch.zeros_like(logits)
    orchestrator.accumulate_additive_penalties(additive)
    scaling = orchestrator.accumulate_scaling_penalties()
    logits += additive
    if scaling is not None:
        logits = torch.where(logits < 0, logits * scaling, logits / scaling)
    return logits[0]


@pytest.mark.parametrize("seed", range(60))
def test_every_node_equals_plain_decoding_after_its_path(seed):
    generator = torch.Generator().manual_seed(seed)
    trees = TreeBatch(2, TreeConfig(12, 3, 0.05))
    while trees.num_lanes:
        trees.expand((torch.randn(trees.num_lanes, VOCAB, generator=generator) * 2).log_softmax(-1))
    for b in range(2):
        output = torch.randint(VOCAB, (1 + seed % 7,), generator=generator).tolist()
        req = request(generator, output)
        tokens_N = trees.tokens_BN[b].clone()
        tokens_N[0] = output[-1]
        logits_NV = torch.randn(12, VOCAB, generator=generator) * 3
        expected = [slow(logits_NV[node], req, output + path) for node, path in enumerate(node_paths(trees, trees.tokens_BN, b))]
        penalise_nodes(logits_NV, req, tokens_N, trees.ancestors_BNN[b], trees.depths_BN[b])
        torch.testing.assert_close(logits_NV, torch.stack(expected))


def test_a_retracted_requests_prefill_minds_its_whole_output():
    generator = torch.Generator().manual_seed(1)
    reqs = [request(generator, [4, 4, 9, 1]), request(generator, [2]), request(generator, [6, 5, 4, 3, 2, 1])]
    logits = torch.randn(3, VOCAB, generator=generator)
    additive, scaling = committed_penalties(reqs, VOCAB, "cpu")
    got = logits + additive
    got = torch.where(got < 0, got * scaling, got / scaling)
    torch.testing.assert_close(got, torch.stack([slow(logits[b], req, req.output_ids) for b, req in enumerate(reqs)]))
