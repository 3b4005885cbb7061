"""Held-out accept lengths against rounds that are walked one by one with the reference head, as a server at temperature 0 drafts."""

import pytest
import torch

from talon_sglang.settings import DEFAULT_DEPTH_CAP
from talon_sglang.tree import TreeConfig, grow_tree
from tests.train.toy import VOCAB, toy_batch, toy_draft_target, toy_features, toy_head, toy_target
from train.batches import BatchLoader
from train.evaluation import HeldOut, Tokens, evaluate, lay_chains, plain_head
from train.masks import Encoded
from train.recipe import TrainSettings
from train.reference import ReferenceHead
from train.ttt import TTTModel, unroll

STEPS = 3
IDS_VD = torch.tensor(sorted(set(range(VOCAB)) - {7, 19}))


@pytest.fixture(scope="module")
def toys():
    """Greedy answers of a toy target (two in the first chat, one of them too short for a round), and a head that knows some of them."""
    target = toy_target()
    chats = []
    for prompt, lengths in (([3, 9], [6, 2, 7]), ([5, 31, 8], [9]), ([30], [6])):
        ids, spans = list(prompt), []
        for number, length in enumerate(lengths):
            ids += [10 + number] * (number > 0)  # a token between answers
            start = len(ids)
            for _ in range(length):
                ids.append(int(target.argmax(target.hidden(torch.tensor([ids]))[1][0, -1:])))
            spans.append((start, len(ids)))
        chats.append(Encoded(ids, spans))
    head, draft = toy_head(target, IDS_VD), toy_draft_target(target, IDS_VD)
    model, batch, optimizer = TTTModel(head, 0.8), toy_batch(target, chats, STEPS), torch.optim.Adam(head.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        model(batch, draft, torch.full((STEPS,), 40.0))[0].backward()
        optimizer.step()
    return target, chats, head.requires_grad_(False), draft


def reference(target, head):
    weights = dict(head.named_parameters()) | {"d2t": IDS_VD - torch.arange(len(IDS_VD))}
    return ReferenceHead(weights, head.config.to_json(), target.embedding.weight, torch.float64)


def walk(target, chat, span, accepted):
    """-> tokens and rounds of one answer; `accepted(features, committed tokens, future tokens)`: how much of a draft is right."""
    features_TF = toy_features(target, chat).aux_TF
    (start, end), root, rounds = span, span[0], 0
    while root < end - 1:
        root += min(accepted(features_TF[:root], chat.ids[: root + 1], chat.ids[root + 1 : end]) + 1, end - 1 - root)
        rounds += 1
    return end - start, rounds


def test_chain_equals_rounds_walked_one_by_one(toys):
    target, chats, head, draft = toys
    slow = reference(target, head)

    def accepted(features_nF, tokens, future):
        path = []
        for _ in range(STEPS):
            path.append(int(slow.draft_ids_Vd[slow.chain_log_probs(features_nF, tokens, path)[-1].argmax()]))
        return next((n for n, (ours, theirs) in enumerate(zip(path, future)) if ours != theirs), min(STEPS, len(future)))

    expected = Tokens()
    for chat in chats:
        for span in chat.spans:
            expected.add(*walk(target, chat, span, accepted))
    for rows in (None, [[1, 0], [2]]):
        batch, found = toy_batch(target, chats, STEPS, rows), Tokens()
        lay_chains(batch, unroll(head, batch, draft).right_KBQ, found)
        assert (found.tokens, found.rounds) == (expected.tokens, expected.rounds)
    assert 1.3 < expected.accept_length < 1 + STEPS  # some guesses are right and some are not


def test_tree_equals_rounds_walked_one_by_one(toys):
    target, chats, head, draft = toys
    slow = reference(target, head)
    config = TreeConfig(16, 4, TreeConfig.gate, DEFAULT_DEPTH_CAP)

    def accepted(features_nF, tokens, future):
        def log_probs(paths):
            ids = [[int(slow.draft_ids_Vd[token]) for token in path] for path in paths]
            return torch.stack([slow.chain_log_probs(features_nF, tokens, path)[-1] for path in ids])

        tree, node, length = grow_tree(log_probs, config), 0, 0
        for token in future:
            children = (i for i, p in enumerate(tree.parents) if i and p == node and int(slow.draft_ids_Vd[tree.tokens[i]]) == token)
            node = next(children, None)
            if node is None:
                break
            length += 1
        return length

    expected = Tokens()
    for chat in chats:
        expected.add(*walk(target, chat, chat.spans[-1], accepted))
    settings = TrainSettings(epochs=1, micro_batch_tokens=64, learning_rate=1.0, precision="fp32", ttt_steps=STEPS)
    loader = BatchLoader(chats, lambda some: [toy_features(target, chat) for chat in some], STEPS)
    twin = plain_head(head, head.state_dict(), "cpu", torch.float64)
    whole = evaluate(twin, loader, draft, settings, "cpu", torch.float64)
    assert (whole.tree.tokens, whole.tree.rounds) == (expected.tokens, expected.rounds)
    shares = [evaluate(twin, loader, draft, settings, "cpu", torch.float64, rank, 2).flat() for rank in range(2)]
    total = HeldOut.of_flat(sum(shares))
    assert total.chain == whole.chain and total.tree == whole.tree
    torch.testing.assert_close(total.table_5K.float(), whole.table_5K)
    torch.testing.assert_close(whole.table_5K, unroll(head, toy_batch(target, chats, STEPS), draft).table())
    assert 1.3 < whole.tree.accept_length


def test_no_tree_rows_no_trees(toys):
    target, chats, head, draft = toys
    settings = TrainSettings(epochs=1, micro_batch_tokens=64, learning_rate=1.0, precision="fp32", ttt_steps=STEPS, tree_rows=0)
    loader = BatchLoader(chats, lambda some: [toy_features(target, chat) for chat in some], STEPS)
    found = evaluate(head, loader, draft, settings, "cpu", torch.float64)
    assert found.tree.accept_length is None and found.chain.accept_length >= 1
