"""The draft loop: which steps are launched, when the host looks, and that a step can be captured and replayed."""

import math

import pytest
import torch

from eval.gpu_cases import random_log_probs
from talon_sglang.gpu.loop import DraftLoop, LateFlag, rank_zero
from talon_sglang.gpu.tree import StaticTrees
from talon_sglang.tree import TreeBatch, TreeConfig, exact_topk
from tests.talon_sglang.fake_graph import RecordedGraph

VOCAB = 50


class SpyFlag(LateFlag):
    """Records the order of sends and takes."""

    def __init__(self):
        super().__init__("cpu")
        self.events = []

    def send(self, value):
        self.events.append("send")
        super().send(value)

    def take(self):
        self.events.append("take")
        return super().take()


class Drafting:
    """Trees, and work on them whose distributions depend on each node's token alone: a draft without attention."""

    def __init__(self, config, batch=3, scale=3.0, seed=0):
        self.trees = StaticTrees(batch, config, VOCAB)
        self.table_VV = random_log_probs(torch.Generator().manual_seed(seed), VOCAB, VOCAB, scale, ties=False)
        self.roots_B = torch.arange(batch)
        self.needed = []

    def begin(self):
        self.trees.reset()
        self.trees.expand_first(*self.first())

    def first(self):
        top = self.table_VV[self.roots_B].topk(self.trees.first_width)
        return top.values, top.indices

    def step(self, width):
        live_BW, node_BW = self.trees.lanes(width)
        log_probs_BWV = self.table_VV[self.trees.tokens_BN.gather(1, node_BW)]
        self.trees.expand(torch.where(live_BW[:, :, None], log_probs_BWV, math.nan))

    def watched_step(self, width):
        most = int((self.trees.size_B - self.trees.start_B).amax())
        assert most <= width
        self.needed.append(most)
        self.step(width)

    def oracle(self):
        trees = TreeBatch(self.roots_B.numel(), self.trees.config)
        trees.expand_first(*exact_topk(self.table_VV[self.roots_B], self.trees.first_width))
        while trees.num_lanes:
            trees.expand(self.table_VV[trees.tokens_BN[trees.frontier]])
        return trees


CONFIGS = [TreeConfig(), TreeConfig(16, 4, 0.3), TreeConfig(24, 3, 0.1, 4), TreeConfig(40, 2, 1.0), TreeConfig(5, 4), TreeConfig(6, 4)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_every_tree_is_finished_with_at_most_one_idle_step(config, scale):
    drafting, flag = Drafting(config, scale=scale), SpyFlag()
    loop = DraftLoop(drafting.trees, drafting.begin, drafting.watched_step, flag=flag, widths=(2, 8))
    launched, oracle = loop.run(), drafting.oracle()
    assert torch.equal(drafting.trees.parents_BN, oracle.parents_BN) and torch.equal(drafting.trees.layers_B, oracle.layers_B)
    steps = max(0, oracle.depth - 1)
    assert steps <= len(launched) <= steps + 1 and all(drafting.needed[:steps])
    # The host looks at step i-1 after launching step i, and never before.
    assert flag.events[:4] == ["send", "send", "take", "send"][: len(flag.events)]
    assert "take take" not in " ".join(flag.events)


def test_widths_narrow_as_the_room_shrinks():
    drafting = Drafting(TreeConfig(60, 4, 0.05), scale=2.0)
    loop = DraftLoop(drafting.trees, drafting.begin, drafting.watched_step, widths=(4, 8, 16, 32))
    launched = loop.run()
    assert launched[0] == 4 and launched[1] == 54 and launched[2:] == sorted(launched[2:], reverse=True)
    assert all(width >= most for width, most in zip(launched, drafting.needed))


@pytest.mark.parametrize("config", [TreeConfig(16, 4, 0.3), TreeConfig(30, 10, 0.03), TreeConfig(24, 3, 0.1, 4)])
def test_recorded_steps_replay_to_the_eager_trees_for_other_inputs(config):
    recorded, captures = Drafting(config), []

    def capture(work):
        captures.append(work)
        return RecordedGraph(work)

    loop = DraftLoop(recorded.trees, recorded.begin, recorded.step, capture=capture)
    loop.prepare()
    count = len(captures)
    for seed in range(6):
        recorded.roots_B.copy_(torch.randint(VOCAB, (3,), generator=torch.Generator().manual_seed(seed)))
        loop.run()
        oracle = recorded.oracle()
        for name in ("parents_BN", "depths_BN", "size_B", "layers_B"):
            assert torch.equal(getattr(recorded.trees, name), getattr(oracle, name)), name
        live_BN = torch.arange(config.node_budget) < oracle.size_B[:, None]
        assert torch.equal(recorded.trees.tokens_BN[live_BN], oracle.tokens_BN[live_BN])
    assert len(captures) == count == len(loop.widths) + 1  # everything was captured beforehand


def test_ranks_follow_the_flag_they_agree_on():
    """This rank's own trees would go on; rank 0 says that they are done."""
    drafting, asked = Drafting(TreeConfig(40, 2, 1.0)), []
    loop = DraftLoop(drafting.trees, drafting.begin, drafting.step, agree=lambda room: asked.append(room) or 0)
    assert len(loop.run()) == 2 and asked[0] > 1


def run_rank(rank, rendezvous, results, broadcast):
    """Rank 0 has a flat draft (two layers), rank 1 a sure one (deep trees)."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    drafting = Drafting(TreeConfig(30, 4, 0.5), scale=(0.1, 30.0)[rank])
    options = {"agree": rank_zero()} if broadcast else {}
    launched = DraftLoop(drafting.trees, drafting.begin, drafting.step, **options).run()
    results.put((rank, len(launched)))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", [True, False])
def test_two_ranks_with_different_trees_launch_equally_many_steps_only_with_the_broadcast(tmp_path, broadcast):
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path / "rendezvous", results, broadcast)) for rank in range(2)]
    for process in ranks:
        process.start()
    steps = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    assert (steps[0] == steps[1]) == broadcast


def test_the_recorder_refuses_what_a_cuda_graph_cannot_hold():
    trees = TreeBatch(1, TreeConfig(16, 4, 0.1))
    trees.expand_first(*exact_topk(torch.randn(1, VOCAB).log_softmax(-1), 4))
    rows = torch.randn(4, VOCAB).log_softmax(-1)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        RecordedGraph(lambda: trees.expand(rows))  # the dynamic form


def test_a_late_flag_keeps_the_value_of_its_sending():
    flag, value = LateFlag("cpu"), torch.tensor(5)
    flag.send(value)
    value.fill_(3)
    flag.send(value)
    assert (flag.take(), flag.take()) == (5, 3)
    flag.send(value)
    flag.drop()
    for _ in range(3):
        flag.send(value)
    with pytest.raises(IndexError):
        flag.send(value)
