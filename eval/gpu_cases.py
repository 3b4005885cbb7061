"""Random cases on which the GPU path is checked against its references, by the tests and by eval/gpu_check.py.

Suffixes as in kernels.py.
"""

from __future__ import annotations

import math
import random
from copy import copy
from dataclasses import dataclass

import torch

from talon_sglang.gpu.tree import StaticTrees
from talon_sglang.tree import TreeBatch, TreeConfig, exact_topk


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


def memory_pools(generator, batch: int, n: int, seq_lens, device, columns: int = 0) -> tuple[torch.Tensor, ...]:
    """(table_RC, rows_B, seq_lens_B, slots_BN) of `batch` requests in shuffled rows, nodes in the slots behind the prefix."""
    table_rows, columns = batch + 2, columns or max(seq_lens) + n
    table_RC = (1 + torch.randperm(table_rows * columns, generator=generator)).view(table_rows, columns).int()
    rows_B = torch.randperm(table_rows, generator=generator)[:batch]
    seq_lens_B = torch.tensor(seq_lens)
    slots_BN = table_RC[rows_B[:, None], seq_lens_B[:, None] + torch.arange(n)].long()
    return tuple(x.to(device) for x in (table_RC, rows_B, seq_lens_B, slots_BN))


def random_log_probs(generator, rows: int, vocab: int, scale: float, ties: bool) -> torch.Tensor:
    """[rows, vocab] in float32; with `ties` many entries are equal."""
    logits = torch.randn(rows, vocab, generator=generator) * scale
    return (logits.round() if ties else logits).log_softmax(-1)


def grow_both(
    batch: int,
    config: TreeConfig,
    vocab: int,
    scale: float,
    ties: bool,
    seed: int,
    *,
    failing: float = 0.0,
    spare: int = 0,
    device: str = "cpu",
) -> tuple[TreeBatch, StaticTrees, int]:
    """Grow the same random trees by `TreeBatch` on the CPU and by `StaticTrees` on `device`; dead lanes get NaN.

    Args:
        failing: share of the draft's rows that are NaN.
        spare: lanes beyond the widest that the rule can need.

    Returns both and the number of steps. Raises AssertionError as soon as the frontiers differ.
    """
    generator = torch.Generator().manual_seed(seed)
    oracle, static = TreeBatch(batch, config), StaticTrees(batch, config, vocab, device)
    first = random_log_probs(generator, batch, vocab, scale, ties)
    first[torch.rand(batch, generator=generator) < failing] = math.nan
    values, tokens = exact_topk(first, static.first_width)
    oracle.expand_first(values, tokens)
    static.expand_first(values.to(device), tokens.to(device))
    step = 0
    while oracle.num_lanes:
        width = static.widest(step) + spare
        live_BW, node_BW = (x.cpu() for x in static.lanes(width))
        request_L, node_L = oracle.frontier
        assert torch.equal(live_BW.nonzero()[:, 0], request_L) and torch.equal(node_BW[live_BW], node_L), "the frontiers differ"
        assert int(static.room) > 0, "done too early"
        rows_LV = random_log_probs(generator, request_L.numel(), vocab, scale, ties)
        rows_LV[torch.rand(request_L.numel(), generator=generator) < failing] = math.nan
        log_probs_BWV = torch.full((batch, width, vocab), math.nan)
        log_probs_BWV[live_BW] = rows_LV
        oracle.expand(rows_LV)
        static.expand(log_probs_BWV.to(device))
        step += 1
    assert int(static.room) == 0 and step <= static.max_steps, "not done in time"
    return oracle, static, step


def differences(oracle: TreeBatch, static: StaticTrees) -> list[str]:
    """Names of the tensors in which the grown trees differ; empty if they are the same, bit for bit."""
    live_BN = torch.arange(oracle.config.node_budget) < oracle.size_B[:, None]
    found = [name for name in ("size_B", "layers_B", "degraded_B") if not torch.equal(getattr(oracle, name), getattr(static, name).cpu())]
    rows = ("tokens_BN", "parents_BN", "depths_BN", "log_probs_BN", "ancestors_BNN")
    return found + [name for name in rows if not torch.equal(getattr(oracle, name)[live_BN], getattr(static, name).cpu()[live_BN])]


class HashDraft:
    """A draft model in whole numbers, so that its result does not depend on the order of additions: a lane's distribution is a row of a
    table, chosen by its token, its position, its parent's hidden state and the sum of everything that it attends to. One wrong KV slot
    anywhere gives another row, and so another tree.

    Suffixes: S slots, T table rows; the others as in gpu/round.py, whose `Forward` this is.
    """

    PRIME = 65521  # every number stays below it, so float32 holds hidden states exactly

    def __init__(self, vocab: int, slots: int, *, rows: int = 127, seed: int = 0, device: str = "cpu"):
        generator = torch.Generator().manual_seed(seed)
        scale_T1 = torch.tensor([0.3, 1.0, 3.0, 9.0])[torch.randint(4, (rows, 1), generator=generator)]
        self.table_TV = (torch.randn(rows, vocab, generator=generator) * scale_T1).to(device)
        self.code_V = torch.randint(self.PRIME, (vocab,), generator=generator).to(device)
        self.keys_S = torch.randint(self.PRIME, (slots,), generator=generator).to(device)

    def to(self, device: str) -> HashDraft:
        moved = copy(self)
        moved.table_TV, moved.code_V, moved.keys_S = (x.to(device) for x in (self.table_TV, self.code_V, self.keys_S))
        return moved

    def own_key(self, tokens, positions, hidden):
        return (self.code_V[tokens] * 31 + positions * 7 + hidden) % self.PRIME

    def row(self, attended, own):
        return (attended * 13 + own) % self.table_TV.shape[0]

    def __call__(self, lanes):
        own_L = self.own_key(lanes.tokens_L, lanes.positions_L, lanes.hidden_LH[:, 0].long())
        self.keys_S.scatter_(0, lanes.slots_L, own_L)
        entry_E = torch.arange(lanes.kv_indices.numel(), device=own_L.device, dtype=torch.int32)
        lane_E = torch.searchsorted(lanes.kv_indptr[1:], entry_E, right=True)  # entries past the last list go to a lane of their own
        attended_L = torch.zeros(own_L.numel() + 1, dtype=torch.int64, device=own_L.device)
        attended_L = attended_L.index_add(0, lane_E, self.keys_S[lanes.kv_indices.long()])[:-1] % self.PRIME
        hidden_L = (attended_L + own_L) % self.PRIME
        return self.table_TV[self.row(attended_L, own_L)], hidden_L[:, None].float()

    def grow(self, config: TreeConfig, prefix_keys: torch.Tensor, top, hidden: int) -> TreeBatch:
        """One request's tree from the definition: no slots, no lanes, each node's keys followed up its path. (On the CPU.)"""
        oracle, keys, hiddens = TreeBatch(1, config), {0: []}, {0: hidden}
        oracle.expand_first(*top)
        while oracle.num_lanes:
            rows = []
            for node in oracle.frontier[1].tolist():
                parent, token = int(oracle.parents_BN[0, node]), int(oracle.tokens_BN[0, node])
                own = int(self.own_key(token, prefix_keys.numel() + oracle.depth - 1, hiddens[parent]))
                keys[node] = keys[parent] + [own]
                attended = (int(prefix_keys.sum()) + sum(keys[node])) % self.PRIME
                hiddens[node] = (attended + own) % self.PRIME
                rows.append(self.table_TV[self.row(attended, own)])
            oracle.expand(torch.stack(rows).log_softmax(-1))
        return oracle


class RoundCase:
    """A `StaticRound` around a `HashDraft`, and random batches for it with their trees by definition. `load` a seed, run, compare with
    `oracles()`.

    Args:
        batch: requests the buffers are made for; a seed fills 1 .. batch of them, and the rest is padding.
        options: for `StaticRound`.
    """

    VOCAB = 40

    def __init__(self, n: int, k: int, batch: int, longest: int, *, device: str = "cpu", **options):
        from talon_sglang.gpu.round import StaticRound

        self.config, self.longest, self.batch = TreeConfig(n, k, 0.2), longest, batch
        self.table_RC = torch.zeros(batch + 2, longest + n, dtype=torch.int32, device=device)
        self.draft = HashDraft(self.VOCAB, self.table_RC.numel() + 1, device=device)
        self.round = StaticRound(batch, self.config, self.VOCAB, 1, self.table_RC, self.draft, **options)

    def load(self, seed: int) -> None:
        generator, n, device = torch.Generator().manual_seed(seed), self.config.node_budget, self.table_RC.device
        self.count = 1 + int(torch.randint(self.batch, (), generator=generator))
        seq_lens = torch.randint(1, self.longest + 1, (self.count,), generator=generator).tolist()
        padded = seq_lens + [1] * (self.batch - self.count)
        pools = memory_pools(generator, self.batch, n, padded, device, self.table_RC.shape[1])
        table_RC, rows_B, seq_lens_B, slots_BN = pools
        self.table_RC.copy_(table_RC)
        values, tokens = exact_topk(random_log_probs(generator, self.count, self.VOCAB, 2.0, ties=False), self.round.trees.first_width)
        hidden_B1 = torch.randint(1000, (self.count, 1), generator=generator)
        inputs = (x[: self.count] for x in (seq_lens_B, rows_B, slots_BN))
        self.round.load(*inputs, values.to(device), tokens.to(device), hidden_B1.float().to(device))
        # Drafting overwrites the tree's slots only, but the next seed shuffles all of them: the prefixes are read now.
        prefixes = [self.draft.keys_S[table_RC[row, :length].long()].cpu() for row, length in zip(rows_B.tolist(), seq_lens)]
        self.wanted = [(prefixes[b], (values[b : b + 1], tokens[b : b + 1]), int(hidden_B1[b])) for b in range(self.count)]

    def oracles(self) -> list[TreeBatch]:
        on_cpu = self.draft.to("cpu")
        return [on_cpu.grow(self.config, *wanted) for wanted in self.wanted]
