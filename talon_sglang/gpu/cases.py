"""Random ragged batches on which the kernels are checked, by the tests and by eval/gpu_check.py.

Suffixes as in kernels.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from talon_sglang.gpu.tree import StaticTrees
from talon_sglang.tree import TreeConfig


@dataclass
class RandomBatch:
    """Trees in mid-growth, and the memory-pool tensors of a server that holds them."""

    trees: StaticTrees
    table_RC: torch.Tensor  # int32, every entry another slot
    rows_B: torch.Tensor
    seq_lens_B: torch.Tensor
    slots_BN: torch.Tensor
    widest: int  # lanes that the frontier can have

    @classmethod
    def make(
        cls,
        rng: random.Random,
        seed: int,
        *,
        seq_lens: tuple[int, ...] = (),
        most_nodes: int = 64,
        longest: int = 2000,
        device: str = "cpu",
    ) -> RandomBatch:
        """Random sizes, prefixes, budgets and drafts; grown by a random number of layers. Requests may be done or degraded."""
        batch, n = len(seq_lens) or rng.randint(1, 5), rng.randint(4, most_nodes)
        seq_lens = seq_lens or tuple(rng.choice((1, 2, rng.randint(1, 40), rng.randint(1, longest))) for _ in range(batch))
        config = TreeConfig(n, rng.randint(1, max(1, n // 4)), rng.choice((0.03, 0.3, 0.9)))
        vocab, scale = rng.choice((16, 100)), rng.choice((1.0, 4.0, 12.0))
        generator = torch.Generator().manual_seed(seed)
        trees = StaticTrees(batch, config, vocab, device)
        trees.expand_first(*(x.to(device) for x in first_layer(generator, batch, vocab, scale, trees.first_width)))
        layers = rng.randint(0, min(6, max(0, trees.max_steps - 1)))
        for step in range(layers):
            if int(trees.room) == 0:
                break
            log_probs = (torch.randn(batch, trees.widest(step), vocab, generator=generator) * scale).log_softmax(-1)
            if rng.random() < 0.1:
                log_probs[rng.randrange(batch), 0, 0] = float("nan")
            trees.expand(log_probs.to(device))
        return cls(trees, *memory_pools(generator, batch, n, seq_lens, device), trees.widest(layers))

    @property
    def size(self) -> int:
        return self.rows_B.numel()

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What `write_kv_indices` and its reference take between the outputs and `width`."""
        trees = self.trees
        in_tree = trees.start_B, trees.size_B, trees.depth, trees.ancestors_BNN
        return self.table_RC, self.rows_B, self.seq_lens_B, *in_tree, self.slots_BN


def first_layer(generator, batch: int, vocab: int, scale: float, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = (torch.randn(batch, vocab, generator=generator) * scale).log_softmax(-1).topk(k)
    return top.values, top.indices


def memory_pools(generator, batch: int, n: int, seq_lens, device) -> tuple[torch.Tensor, ...]:
    """(table_RC, rows_B, seq_lens_B, slots_BN) of `batch` requests in shuffled rows, nodes in the slots behind the prefix."""
    table_rows, columns = batch + 2, max(seq_lens) + n
    table_RC = (1 + torch.randperm(table_rows * columns, generator=generator)).view(table_rows, columns).int()
    rows_B = torch.randperm(table_rows, generator=generator)[:batch]
    seq_lens_B = torch.tensor(seq_lens)
    slots_BN = table_RC[rows_B[:, None], seq_lens_B[:, None] + torch.arange(n)].long()
    return tuple(x.to(device) for x in (table_RC, rows_B, seq_lens_B, slots_BN))
