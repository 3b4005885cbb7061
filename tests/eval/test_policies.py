"""Every policy against a slow restatement that asks the reference head for one path at a time, on a random target and head."""

import math

import pytest
import torch

from eval.policies import Chain, Eagle, LaneTalon, OptTree, Talon, TalonLayers, parse_policy
from eval.policies.rounds import Committed, DraftRounds, ranked_tree
from talon_sglang.tree import TreeConfig, grow_tree, paths
from tests.train.toy import VOCAB, toy_head, toy_target
from train.reference import ReferenceHead

PROMPT_LENGTHS, ROOTS = (9, 5, 12), (9, 7, 15)  # of three sequences of 18 tokens; a root may stand anywhere in the answer


class World:
    """Three sequences, drafted together by `rounds`, one path at a time by `log_probs`."""

    def __init__(self):
        target = toy_target()
        draft_ids = torch.tensor(sorted(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:24].tolist()))
        head = toy_head(target, draft_ids, std=0.6)
        generator = torch.Generator().manual_seed(4)
        self.ids = [torch.randint(3, VOCAB, (18,), generator=generator).tolist() for _ in PROMPT_LENGTHS]
        self.features = [target.hidden(torch.tensor([ids[:-1]]))[0][0] for ids in self.ids]
        self.target, self.head, self.draft_ids = target, head, draft_ids
        weights = {**head.state_dict(), "d2t": draft_ids - torch.arange(len(draft_ids))}
        self.reference = ReferenceHead(weights, head.config.to_json(), target.embedding.weight, torch.float64)
        self.known: dict = {}

    def rounds(self) -> DraftRounds:
        committed = Committed(self.head, self.target.embedding.weight, self.ids, self.features, list(PROMPT_LENGTHS))
        return DraftRounds(self.head, self.draft_ids, self.target.embedding.weight, committed, torch.arange(3), torch.tensor(ROOTS))

    def log_probs(self, sequence: int, path: tuple[int, ...]) -> torch.Tensor:
        """After a path of draft ids, by the reference head."""
        if (sequence, path) not in self.known:
            root, tokens = ROOTS[sequence], self.draft_ids[list(path)].tolist()
            rows = self.reference.chain_log_probs(self.features[sequence][:root], self.ids[sequence][: root + 1], tokens)
            self.known[sequence, path] = rows[-1]
        return self.known[sequence, path]

    def scored(self, tree, sequence: int) -> dict[tuple[int, ...], float]:
        """Token path -> path log-probability of every node but the root."""
        return {path: score for path, score in zip(paths(tree)[1:], tree.log_probs[1:])}


@pytest.fixture(scope="module")
def world():
    return World()


def same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    assert all(math.isclose(found[path], wanted[path], abs_tol=1e-5) for path in wanted)


def as_ids(world, scores: dict) -> dict:
    return {tuple(world.draft_ids[list(path)].tolist()): score for path, score in scores.items()}


def children(world, sequence, path, score, count) -> list[tuple[tuple[int, ...], float]]:
    row = world.log_probs(sequence, path)
    best = sorted(range(len(row)), key=lambda token: -float(row[token]))[:count]
    return [(path + (token,), score + float(row[token])) for token in best]


def best(scored, count) -> list:
    return sorted(scored, key=lambda item: -item[1])[:count]


def test_a_node_sees_the_prefix_and_its_own_path_only(world):
    rounds = world.rounds()
    same_root = rounds.root_log_probs()
    for b in range(3):
        assert torch.allclose(same_root[b].double(), world.log_probs(b, ()), atol=1e-5)
    parents, tokens = [0, 0, 1, 2, 3], [4, 7, 1, 1, 9]  # slots 1 .. 5; siblings and cousins must not see each other
    path = {0: ()}
    for slot, (parent, token) in enumerate(zip(parents, tokens), start=1):
        path[slot] = (*path[parent], token)
    for layer in ([1, 2], [3, 4], [5]):
        lanes = [(b, slot) for b in (0, 2) for slot in layer]  # round 1 sits out
        picked = [torch.tensor(column) for column in zip(*((b, slot, parents[slot - 1], tokens[slot - 1]) for b, slot in lanes))]
        for (b, slot), row in zip(lanes, rounds.forward(*picked)):
            assert torch.allclose(row.double(), world.log_probs(b, path[slot]), atol=1e-5)


def test_chain(world):
    for b, draft in enumerate(Chain(4).draft(world.rounds())):
        wanted, path, score = {}, (), 0.0
        for _ in range(4):
            ((path, score),) = children(world, b, path, score, 1)
            wanted[path] = score
        same(world.scored(draft.tree, b), as_ids(world, wanted))
        assert draft.lanes == [1, 1, 1]


@pytest.mark.parametrize(("width", "steps", "nodes"), [(3, 4, 12), (2, 1, 3), (4, 2, 21), (1, 3, 4)])
def test_eagle_keeps_the_best_of_all_that_it_scored(world, width, steps, nodes):
    for b, draft in enumerate(Eagle(width, steps, nodes).draft(world.rounds())):
        lanes = children(world, b, (), 0.0, width)
        scored = list(lanes)
        for _ in range(steps - 1):
            pool = [child for path, score in lanes for child in children(world, b, path, score, width)]
            scored += pool
            lanes = best(pool, width)
        same(world.scored(draft.tree, b), as_ids(world, dict(best(scored, nodes - 1))))
        assert draft.lanes == [width] * (steps - 1) and len(draft.tree) == nodes


def test_approximate_eagle_reads_the_history_of_its_lane(world):
    width, steps, nodes = 3, 4, 14
    differing = 0
    exact = Eagle(width, steps, nodes).draft(world.rounds())
    for b, draft in enumerate(Eagle(width, steps, nodes, approximate=True).draft(world.rounds())):
        root, reference = ROOTS[b], world.reference
        keys, values, state = [], [], None
        for row in range(root):
            hidden = reference.w["fc.weight"] @ world.features[b][row]
            state = reference._layer(hidden, reference.embedding_VH[world.ids[b][row + 1]], row, keys, values)
        slots = [(list(keys), list(values)) for _ in range(width)]  # per lane: the committed rows, then what this lane itself has written
        lanes = [(*lane, state) for lane in children(world, b, (), 0.0, width)]
        scored = [lane[:2] for lane in lanes]
        for step in range(1, steps):
            pool = []
            for (path, score, hidden), (lane_keys, lane_values) in zip(lanes, slots):
                embed = reference.embedding_VH[world.draft_ids[path[-1]]]
                out = reference._layer(hidden, embed, root + step - 1, lane_keys, lane_values)
                row = torch.log_softmax(reference.w["lm_head.weight"] @ reference._norm(out, "norm"), dim=-1)
                pool += [(path + (token,), score + float(row[token]), out) for token in row.topk(width).indices.tolist()]
            scored += [item[:2] for item in pool]
            lanes = best(pool, width)
        same(world.scored(draft.tree, b), as_ids(world, dict(best(scored, nodes - 1))))
        differing += world.scored(draft.tree, b) != world.scored(exact[b].tree, b)
    assert differing, "approximate and exact ancestors gave the same trees: this test shows nothing"


@pytest.mark.parametrize(("nodes", "threshold", "depth"), [(10, 0.1, 6), (6, 0.0, 3), (12, 0.9, 8)])
def test_opt_tree_stops_when_the_expectation_stops_growing(world, nodes, threshold, depth):
    for b, draft in enumerate(OptTree(nodes, threshold, depth).draft(world.rounds())):
        layer = children(world, b, (), 0.0, nodes - 1)
        scored, layers, expected = list(layer), 1, 0.0
        while True:
            now = sum(math.exp(score) for _, score in best(scored, nodes - 1))
            gain, expected = now - expected, now
            if gain <= threshold or layers == depth:
                break
            layer = best([child for path, score in layer for child in children(world, b, path, score, nodes - 1)], nodes - 1)
            scored += layer
            layers += 1
        same(world.scored(draft.tree, b), as_ids(world, dict(best(scored, nodes - 1))))
        assert draft.lanes == [nodes - 1] * (layers - 1)


@pytest.mark.parametrize("settings", [(12, 3, 0, 0.03), (12, 3, 2, 0.03), (9, 2, 0, 1.0), (2, 4, 0, 0.1)])
def test_talon_is_the_tree_of_the_rule(world, settings):
    nodes, width, cap, gate = settings
    for b, draft in enumerate(Talon(*settings).draft(world.rounds())):
        tree = grow_tree(
            lambda wanted, b=b: torch.stack([world.log_probs(b, path) for path in wanted]), TreeConfig(nodes, width, gate, cap)
        )
        wanted = {path: score for path, score in zip(paths(tree)[1:], tree.log_probs[1:])}
        same(world.scored(draft.tree, b), as_ids(world, wanted))
        assert draft.lanes == [tree.depths.count(depth) for depth in range(1, max(tree.depths))]
        assert draft.forwards == max(tree.depths)


@pytest.mark.parametrize(("layers", "cap"), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 2), (2, 1)])
def test_layered_talon_takes_its_best_before_it_gates(world, layers, cap):
    nodes, width, gate = 14, 3, 0.2
    wide_roots = 0
    for b, draft in enumerate(TalonLayers(nodes, width, layers, cap, gate).draft(world.rounds())):
        wanted, frontier, sizes = {}, [((), 0.0)], []
        while len(wanted) < nodes - 1 and len(sizes) != (cap or nodes):
            pool = best([child for path, score in frontier for child in children(world, b, path, score, 24)], 10**6)
            if len(sizes) < layers:
                frontier = pool[:width]
            else:
                frontier = [child for child in pool if child[1] >= pool[0][1] + math.log(gate)]
            frontier = frontier[: nodes - 1 - len(wanted)]
            wanted |= dict(frontier)
            sizes.append(len(frontier))
        same(world.scored(draft.tree, b), as_ids(world, wanted))
        assert draft.lanes == sizes[:-1]
        wide_roots += sizes[0] != width
    assert bool(wide_roots) == (layers == 0), "a gated root must differ from a top-K root somewhere"


def test_layered_talon_with_a_flat_root_fills_its_budget(world):
    head = toy_head(world.target, world.draft_ids, std=0.6)
    head.lm_head.weight.data.zero_()
    embedding = world.target.embedding.weight
    committed = Committed(head, embedding, world.ids, world.features, list(PROMPT_LENGTHS))
    rounds = DraftRounds(head, world.draft_ids, embedding, committed, torch.arange(3), torch.tensor(ROOTS))
    for draft in TalonLayers(12, 3, 0).draft(rounds):
        assert draft.tree.depths == [0] + [1] * 11 and draft.tree.tokens[1:] == world.draft_ids[:11].tolist()


def test_lane_talon_reads_the_history_of_its_lane(world):
    nodes, width, gate = 16, 2, 0.3
    differing, widths = 0, set()
    exact = Talon(nodes, width, 0, gate).draft(world.rounds())
    for b, draft in enumerate(LaneTalon(nodes, width, 0, gate).draft(world.rounds())):
        slots: dict = {}  # lane -> (keys, values): the committed rows, then what this lane itself has written
        layer = [(*child, None) for child in children(world, b, (), 0.0, width)]
        wanted, depth = {path: score for path, score, _ in layer}, 1
        while len(wanted) < nodes - 1:
            pool = []
            for lane, (path, score, hidden) in enumerate(layer):
                keys, values = slots.setdefault(lane, ([], []))
                row, state = lane_row(world, b, keys, values, path, hidden, depth)
                pool += [(path + (token,), score + float(row[token]), state) for token in range(len(row))]
            pool = best(pool, 10**6)
            layer = [child for child in pool if child[1] >= pool[0][1] + math.log(gate)][: nodes - 1 - len(wanted)]
            wanted |= {path: score for path, score, _ in layer}
            widths.add(len(layer))
            depth += 1
        same(world.scored(draft.tree, b), as_ids(world, wanted))
        differing += world.scored(draft.tree, b) != world.scored(exact[b].tree, b)
    assert differing, "lane histories and true ancestors gave the same trees: this test shows nothing"
    assert len(widths) > 1, "layers of one width leave the history of a skipped lane untested"


def lane_row(world, b: int, keys: list, values: list, path, hidden, depth: int):
    """(draft log-probabilities, state) after `path`, whose last node is written behind the rows of its lane."""
    root, reference = ROOTS[b], world.reference
    if not keys:
        for row in range(root):
            inputs = reference.w["fc.weight"] @ world.features[b][row]
            reference._layer(inputs, reference.embedding_VH[world.ids[b][row + 1]], row, keys, values)
    if hidden is None:  # the root's state, which all of the first layer share
        scratch_keys, scratch_values = [], []
        for row in range(root):
            inputs = reference.w["fc.weight"] @ world.features[b][row]
            hidden = reference._layer(inputs, reference.embedding_VH[world.ids[b][row + 1]], row, scratch_keys, scratch_values)
    embed = reference.embedding_VH[world.draft_ids[path[-1]]]
    state = reference._layer(hidden, embed, root + depth - 1, keys, values)
    return torch.log_softmax(reference.w["lm_head.weight"] @ reference._norm(state, "norm"), dim=-1), state


def test_a_round_does_not_depend_on_its_neighbours(world):
    together = Talon(12, 3).draft(world.rounds())
    committed = Committed(world.head, world.target.embedding.weight, world.ids[1:2], world.features[1:2], [PROMPT_LENGTHS[1]])
    embedding = world.target.embedding.weight
    alone = DraftRounds(world.head, world.draft_ids, embedding, committed, torch.tensor([0]), torch.tensor([ROOTS[1]]))
    same(world.scored(Talon(12, 3).draft(alone)[0].tree, 0), world.scored(together[1].tree, 1))


def test_a_failed_draft_leaves_the_root(world):
    head = toy_head(world.target, world.draft_ids, std=0.6)
    head.lm_head.weight.data.fill_(math.nan)
    committed = Committed(head, world.target.embedding.weight, world.ids, world.features, list(PROMPT_LENGTHS))
    for policy in (Chain(3), Eagle(3, 3, 10), OptTree(8), Talon(8, 2), LaneTalon(8, 2), TalonLayers(8, 2, 0), TalonLayers(8, 2, 2)):
        rounds = DraftRounds(head, world.draft_ids, world.target.embedding.weight, committed, torch.arange(3), torch.tensor(ROOTS))
        for draft in policy.draft(rounds):
            assert len(draft.tree) == 1 and draft.tree.degraded


def test_of_equal_scores_a_parent_comes_before_its_child():
    tree = ranked_tree([5, 6, 7], [-1, 0, 1], [1, 2, 3], [-0.1, -0.1, -0.1], size=3)
    assert (tree.tokens, tree.parents) == ([-1, 5, 6], [-1, 0, 1])


def test_a_sequence_that_does_not_fit_its_features_is_refused(world):
    with pytest.raises(ValueError, match="17 features, 17 tokens"):
        Committed(world.head, world.target.embedding.weight, [world.ids[0][:17]], world.features[:1], [3])


@pytest.mark.parametrize(
    "text",
    [
        "chain:4",
        "eagle3:4,4,16",
        "sglang-eagle3:4,4,16",
        "opt-tree:16,0.5,10",
        "talon:16,4,10,0.03",
        "sglang-talon:16,4,0,0.1",
        "talon-layers:16,4,2,10,0.03",
    ],
)
def test_a_name_spells_its_policy(text):
    assert parse_policy(text).name == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tree:4", "is unknown; choose one of chain:4"),
        ("chain", "0 settings were given"),
        ("chain:0", "steps is 0: it must be at least 1"),
        ("eagle3:2,1,16", "N in 2 .. 3"),
        ("talon:16,x", "an example is talon:16,4,10,0.03"),
        ("talon:16,4,10,2", "gate is 2.0"),
        ("opt-tree:1", "want N >= 2"),
        ("talon-layers:16,4", "an example is talon-layers:16,4,2,10,0.03"),
        ("talon-layers:16,4,-1", "layers is -1"),
    ],
)
def test_a_bad_spelling_says_what_is_wrong(text, complaint):
    with pytest.raises(ValueError, match="policy '" + text) as caught:
        parse_policy(text)
    assert complaint in str(caught.value)
