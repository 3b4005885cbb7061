"""What is counted about rounds, by hand and by brute force; the target's side against full forwards; and the command as a whole."""

import itertools
import json
import random
from argparse import Namespace

import pytest
import torch

from eval.accept import Models, answered, chunks, commit, lay_rounds, main, tallies
from eval.accept_file import AcceptFile
from eval.policies import Chain, Draft, Talon
from eval.results import ResultsError
from eval.rollout import TargetRun, draw
from eval.rounds import Tally, acceptance, follow, ratio_error, visit_probabilities
from talon_sglang.tree import DraftTree, paths
from tests.train.toy import VOCAB, toy_head, toy_target

#       root
#      5    6
#     7 8   9
#     1
TREE = DraftTree([-1, 5, 6, 7, 8, 9, 1], [-1, 0, 0, 1, 1, 2, 3], [0, 1, 1, 2, 2, 2, 3], [0.0] * 7)
DRAFT = Draft(TREE, [2, 3])
PROMPTS = [[5, 9, 3, 7], [4, 4, 8, 11, 6, 3, 12], [10, 3]]


# ------------------------------------------------------------ rounds


@pytest.mark.parametrize(
    ("answer", "path", "emitted"),
    [
        ([0, 5, 7, 1, 2, 2], [1, 3, 6], 4),  # three drafts and the bonus
        ([0, 4, 4, 4], [], 1),
        ([0, 6, 8, 3], [2], 2),
        ([0, 5, 7], [1, 3], 2),  # the answer is over: no bonus
        ([0, 5], [1], 1),
    ],
)
def test_a_round_follows_the_answer(answer, path, emitted):
    one = follow(DRAFT, 0, answer)
    assert (one.path, one.emitted) == (path, emitted)


def test_a_tally_by_hand():
    tally = Tally()
    answer = [0, 5, 7, 3, 6, 2]  # round 1: 5, 7, then the bonus 3; round 2 from 3: 6, then the bonus 2
    start = 0
    while start < len(answer) - 1:
        one = follow(DRAFT, start, answer)
        tally.add(one, visit_probabilities(TREE, one.path), len(answer) - 1 - start)
        start += one.emitted
    assert (tally.rounds, tally.emitted, tally.sampled, tally.forwards) == (2, 5.0, 5, 6)
    assert (tally.drafted, tally.accepted) == (12, 3.0)
    # The second round came to depth 1 with one more token to go: depth 2 could be judged, depth 3 could not.
    assert (tally.offered, tally.reached) == ([2.0, 2.0, 1.0], [2.0, 1.0, 0.0])
    assert (dict(tally.depths), dict(tally.widths), tally.width_at) == ({3: 2}, {2: 2, 3: 2, 1: 2}, [4, 6, 2])
    assert (tally.lanes, tally.forwarded) == ([4, 6], [2, 2])
    figure = acceptance([tally])
    assert figure.accept_length == 6 / 2 and figure.draft_forwards == 3.0 and figure.width_at == [2.0, 3.0, 1.0]
    assert Tally.from_json(json.loads(json.dumps(tally.to_json()))) == tally


def random_tree(rng: random.Random, nodes: int, vocab: int) -> DraftTree:
    tokens, parents, depths = [-1], [-1], [0]
    while len(tokens) < nodes:
        parent = rng.randrange(len(tokens))
        taken = {token for token, other in zip(tokens, parents) if other == parent}
        if free := [token for token in range(vocab) if token not in taken]:
            tokens.append(rng.choice(free))
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree(tokens, parents, depths, [0.0] * nodes)


@pytest.mark.parametrize("seed", range(8))
def test_expected_tokens_are_the_mean_over_all_outcomes(seed):
    """Every continuation of a small Markov chain is enumerated, with its probability; an end token and the limit cut it short."""
    rng, vocab, limit, end = random.Random(seed), 4, 4, 3
    chain = [[rng.random() for _ in range(vocab)] for _ in range(vocab)]
    chain = [[p / sum(row) for p in row] for row in chain]
    tree, root = random_tree(rng, 9, vocab), 1
    chances = [1.0] + [0.0] * (len(tree) - 1)
    for node, path in enumerate(paths(tree)[1:], start=1):
        before = path[-2] if len(path) > 1 else root
        chances[node] = chances[tree.parents[node]] * chain[before][path[-1]]
    draft, tally = Draft(tree, []), Tally()
    tally.add(follow(draft, 0, [root]), chances, limit, {end})

    emitted, accepted = 0.0, 0.0
    for tail in itertools.product(range(vocab), repeat=limit):
        probability = 1.0
        for before, token in zip((root, *tail), tail):
            probability *= chain[before][token]
        cut = tail.index(end) + 1 if end in tail else limit
        one = follow(draft, 0, [root, *tail[:cut]])
        emitted += probability * one.emitted
        accepted += probability * len(one.path)
    assert tally.emitted == pytest.approx(emitted, abs=1e-12)
    assert tally.accepted == pytest.approx(accepted, abs=1e-12)


def test_the_error_of_a_ratio_matches_repeated_draws():
    rng = random.Random(0)

    def sample():
        below = [rng.randrange(3, 9) for _ in range(50)]
        return [b * 2 + rng.gauss(0, 1) for b in below], below

    ratios = [sum(above) / sum(below) for above, below in (sample() for _ in range(2000))]
    mean = sum(ratios) / len(ratios)
    spread = (sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1)) ** 0.5
    assert ratio_error(*sample()) == pytest.approx(spread, rel=0.25)


def test_answers_without_a_round_have_no_accept_length():
    with pytest.raises(ValueError, match="No answer is longer than one token"):
        acceptance([Tally()])


# ------------------------------------------------------------ the target's side


@pytest.fixture(scope="module")
def target():
    return toy_target()


def logits(target, ids):
    return target.model(torch.tensor([ids])).logits[0].float()


def test_greedy_answers_are_the_models_own(target):
    texts = TargetRun(target, PROMPTS, 6, 0.0, {2}).answer(["a", "b", "c"])
    for prompt, text in zip(PROMPTS, texts):
        ids = list(prompt)
        while len(ids) - len(prompt) < 6 and ids[-1] != 2:
            ids.append(int(logits(target, ids)[-1].argmax()))
        assert text.ids == ids
        features, _ = target.hidden(torch.tensor([ids[:-1]]))
        assert torch.allclose(text.features_TF, features[0], atol=1e-9)


def test_features_come_in_the_order_of_the_heads_layers(target):
    odd = type(target)(target.model, (5, 2, 2))
    (text,) = TargetRun(odd, PROMPTS[:1], 4, 0.0, set()).answer(["a"])
    assert torch.allclose(text.features_TF, odd.hidden(torch.tensor([text.ids[:-1]]))[0][0], atol=1e-9)


def test_answers_read_again_give_the_same_state(target):
    run = TargetRun(target, PROMPTS, 6, 1.0, {2})
    texts = run.answer(["a", "b", "c"])
    again = TargetRun(target, PROMPTS, 6, 1.0, {2})
    for one, other in zip(texts, again.reread([text.answer for text in texts])):
        assert one.ids == other.ids and torch.allclose(one.features_TF, other.features_TF, atol=1e-9)
    trees = [(0, TREE), (2, TREE)]
    long = max(range(3), key=lambda slot: len(texts[slot].answer))
    assert torch.allclose(torch.tensor(run.node_probabilities(long, trees)), torch.tensor(again.node_probabilities(long, trees)))


def test_sampled_answers_do_not_depend_on_the_batch(target):
    together = TargetRun(target, PROMPTS, 6, 1.0, {2}).answer(["a", "b", "c"])
    alone = TargetRun(target, PROMPTS[1:2], 6, 1.0, {2}).answer(["b"])
    assert together[1].answer == alone[0].answer


def test_draws_follow_the_temperature():
    row = torch.tensor([1.0, 0.0, -1.0, 2.0])
    wanted = torch.softmax(row / 0.7, dim=-1)
    counts = torch.bincount(torch.tensor([draw(row, 0.7, (i + 0.5) / 4000) for i in range(4000)]), minlength=4)
    assert torch.allclose(counts / 4000, wanted, atol=1e-3)
    assert draw(row, 0.0, 0.1) == 3


def test_node_probabilities_are_those_of_full_forwards(target, monkeypatch):
    monkeypatch.setattr("eval.rollout.VERIFY_NODES", 7)  # several forwards, several trees in one
    run = TargetRun(target, PROMPTS, 6, 0.8, set())
    texts = run.answer(["a", "b", "c"])
    rng = random.Random(1)
    trees = [(start, random_tree(rng, 8, VOCAB)) for start in (0, 1, 3, 4)] + [(2, DraftTree([-1], [-1], [0], [0.0]))]
    for slot in (0, 2):
        for (start, tree), found in zip(trees, run.node_probabilities(slot, trees)):
            prefix = texts[slot].ids[: len(PROMPTS[slot]) + start + 1]
            for path, chance in zip(paths(tree), found):
                rows = (logits(target, [*prefix, *path]) / 0.8).softmax(-1)[len(prefix) - 1 :]
                wanted = 1.0
                for row, token in zip(rows, path):
                    wanted *= float(row[token])
                assert chance == pytest.approx(wanted, rel=1e-4)


def test_greedy_trees_have_no_path_probabilities(target):
    with pytest.raises(ValueError, match="temperature is 0.0"):
        TargetRun(target, PROMPTS, 6, 0.0, set()).node_probabilities(0, [(0, TREE)])


# ------------------------------------------------------------ rounds of whole answers


@pytest.fixture(scope="module")
def models(target):
    ids = torch.arange(VOCAB)
    return Models(target, toy_head(target, ids), ids, {2})


def test_greedy_rounds_are_those_of_drafting_and_verifying_one_by_one(models):
    """The answers' rounds, with each verified token asked of the target anew."""
    run = TargetRun(models.target, PROMPTS, 9, 0.0, models.end_ids)
    texts = run.answer(["a", "b", "c"])
    found = lay_rounds(models, texts, commit(models, texts), Talon(12, 4))
    for text, rounds in zip(texts, found):
        ids = text.prompt + text.answer[:1]
        for one in rounds:
            assert len(ids) == len(text.prompt) + one.start + 1
            kids = {(parent, token): node for node, (parent, token) in enumerate(zip(one.draft.tree.parents, one.draft.tree.tokens))}
            node, emitted = 0, 0
            while emitted < 12:
                ids.append(int(logits(models.target, ids)[-1].argmax()))
                emitted += 1
                node = kids.get((node, ids[-1]))
                if node is None or ids[-1] in models.end_ids or len(ids) == len(text.prompt) + 9:
                    break
            assert emitted == one.emitted
        assert ids == text.ids


def test_known_answers_are_not_written_again(models, tmp_path):
    args = Namespace(max_new_tokens=6, temperature=1.0, seed=0)
    results = AcceptFile(tmp_path / "accept.json", {"a": 1}, "")
    chunk = [("set", str(i), ids) for i, ids in enumerate(PROMPTS)]
    first = answered(models, chunk, results, args)
    reloaded = AcceptFile(tmp_path / "accept.json", {"a": 1}, "")
    args.seed = 1  # would give other answers
    second = answered(models, chunk, reloaded, args)
    assert [text.ids for text in first.texts] == [text.ids for text in second.texts]
    both = [tallies(models, run, commit(models, run.texts), Chain(2)) for run in (first, second)]
    for one, other in zip(*both):
        assert one.emitted == pytest.approx(other.emitted) and one.rounds == other.rounds


def test_a_file_of_other_settings_is_refused(tmp_path):
    AcceptFile(tmp_path / "a.json", {"dtype": "float32"}, "").save()
    with pytest.raises(ResultsError, match="measured with dtype = 'float32', this call has 'bfloat16'.*--fresh"):
        AcceptFile(tmp_path / "a.json", {"dtype": "bfloat16"}, "")
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ResultsError, match="not a results file of eval/accept.py"):
        AcceptFile(tmp_path / "b.json", {}, "")


def test_chunks_hold_all_jobs_and_their_size():
    jobs = [("s", str(i), [0] * length) for i, length in enumerate((1, 2, 4, 4, 30))]
    found = chunks(jobs, 6, most=20)
    assert [len(chunk) for chunk in found] == [2, 2, 1]
    assert [job for chunk in found for job in chunk] == jobs


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policy", "talon:4"], "an example is talon:16,4"),
        (["--samples", "2"], "at temperature 0 every answer is the same"),
        (["--temperature", "-1"], "not in 0 .. 100"),
    ],
)
def test_bad_arguments_are_named(words, complaint, capsys):
    with pytest.raises(SystemExit):
        main(["--target", "t", "--head", "h", "--prompts", "p", *words])
    assert complaint in capsys.readouterr().err


def test_a_missing_head_is_one_sentence(tmp_path, capsys):
    assert main(["--target", str(tmp_path), "--head", "h", "--prompts", "p"]) == 1
    assert "has no config.json; pass a model folder" in capsys.readouterr().out.replace("\n", " ")


# ------------------------------------------------------------ the command as a whole


@pytest.fixture
def command(models, monkeypatch, tmp_path):
    """`main` on the toy models and three prompts, one prompt a chunk."""
    monkeypatch.setattr("eval.accept.check_folders", lambda args: None)
    monkeypatch.setattr("eval.accept.check_draft_head", lambda head, target: None)
    monkeypatch.setattr("eval.accept.load_sets", lambda args: {"toy": [(str(i), ids) for i, ids in enumerate(PROMPTS)]})
    monkeypatch.setattr("eval.accept.load_models", lambda args: models)
    monkeypatch.setattr("eval.accept.fingerprint", lambda folder: folder.name)
    monkeypatch.setattr("eval.accept.chunks", lambda jobs, limit: [[job] for job in jobs])
    out = tmp_path / "accept.json"

    def run(*words, head="h"):
        return main(["--target", "t", "--head", head, "--prompts", "p", "--max-new-tokens", "8", "--out", str(out), *words])

    return run, out


def test_a_stopped_run_keeps_what_it_has_and_goes_on(command, monkeypatch, capsys):
    run, out = command
    drafted = []

    def interrupt(self, rounds, draft=Chain.draft):
        drafted.append(rounds.batch)
        if len(drafted) == 10:
            raise KeyboardInterrupt
        return draft(self, rounds)

    monkeypatch.setattr(Chain, "draft", interrupt)
    assert run("--policy", "chain:2") == 1
    assert "the same command continues from there" in capsys.readouterr().out.replace("\n", " ")
    kept = json.loads(out.read_text())["tallies"]["chain:2"]["toy"]
    assert 0 < len(kept) < 3
    before = len(drafted)
    assert run("--policy", "chain:2") == 0
    whole = json.loads(out.read_text())
    assert {prompt: whole["tallies"]["chain:2"]["toy"][prompt] for prompt in kept} == kept
    rounds = {prompt: tally["rounds"] for prompt, tally in whole["tallies"]["chain:2"]["toy"].items()}
    assert len(drafted) - before == sum(count for prompt, count in rounds.items() if prompt not in kept)  # nothing is measured twice
    out.unlink()
    assert run("--policy", "chain:2") == 0
    assert json.loads(out.read_text())["tallies"] == whole["tallies"]


def test_later_policies_use_the_answers_that_are_there(command, monkeypatch):
    run, out = command
    assert run("--policy", "chain:2") == 0
    monkeypatch.setattr(TargetRun, "answer", None)  # would fail
    assert run("--policy", "chain:2", "--policy", "talon:8,3", "--policy", "opt-tree:8") == 0
    summary = json.loads(out.read_text())["summary"]
    assert list(summary) == ["chain:2", "talon:8,3,10,0.03", "opt-tree:8,0.5,10"]
    assert all(figure["all"]["accept_length"] >= 1 for figure in summary.values())


def test_the_table_shows_every_policy(command, capsys):
    run, _ = command
    assert run("--policy", "chain:2", "--policy", "talon:8,3") == 0
    printed = capsys.readouterr().out
    assert "chain:2" in printed and "talon:8,3,10,0.03" in printed and "…" not in printed


def test_another_head_is_not_mixed_in(command, capsys):
    run, _ = command
    assert run("--policy", "chain:2") == 0
    assert run("--policy", "chain:2", head="other") == 1
    assert "was measured with head" in capsys.readouterr().out.replace("\n", " ")


def test_a_full_disk_is_one_sentence(command, monkeypatch, capsys):
    run, _ = command

    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert run("--policy", "chain:2") == 1
    assert "No space left on device" in capsys.readouterr().out
