"""SGLang's flat verify mask against its definition, entry by entry."""

from functools import partial

import torch

from talon_sglang.gpu.masks import full_mask
from tests.talon_sglang.fake_graph import RecordedGraph


def by_definition(mask_BNN, seq_lens):
    entries = []
    for rows, seq_len in zip(mask_BNN, seq_lens):
        for row in rows:
            entries += [True] * seq_len + row.tolist()
    return entries


def test_equals_the_definition_on_ragged_batches_and_can_be_captured():
    generator = torch.Generator().manual_seed(0)
    for seq_lens in ([1], [3, 1, 9], [5, 5], [1, 30, 2, 7]):
        n, out = 6, []
        mask_BNN = torch.rand(len(seq_lens), n, n, generator=generator) < 0.5
        work = partial(full_mask, mask_BNN, torch.tensor(seq_lens), n * sum(seq_lens) + mask_BNN.numel())
        graph = RecordedGraph(lambda run=work, into=out: into.append(run()))
        assert out[0].tolist() == by_definition(mask_BNN, seq_lens)
        mask_BNN.logical_not_()
        graph.replay()
        assert out[0].tolist() == by_definition(mask_BNN, seq_lens)
