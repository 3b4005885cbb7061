"""The vectorised losses against an unroll that treats every row and step by itself: no batch, no cache, no mask."""

import math
from functools import cache

import pytest
import torch

from tests.train.toy import VOCAB, toy_batch, toy_chats, toy_draft_target, toy_features, toy_head, toy_target
from train.batches import supervised_counts
from train.losses import LOSSES
from train.reference import ReferenceHead
from train.ttt import TTTModel, unroll

STEPS, DECAY = 5, 0.8
IDS_VD = torch.tensor([0, 2, 3, 5, 8, 9, 12, 13, 17, 20, 21, 22, 25, 28, 30, 31, 33, 35, 38, 39])
LAYOUTS = {"padded": None, "packed in one row": [[2, 0, 1]], "packed in two rows": [[1, 2], [0]]}
CHECKPOINTING = pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])


def slow_value(loss: str, p_Vd, log_q_Vd):
    """The loss of one position by its definition, token by token."""
    total = 0.0
    for p, log_q in zip(p_Vd.tolist(), log_q_Vd):
        if loss in ("soft_ce", "kl"):
            total = total - p * (log_q - (math.log(p) if loss == "kl" else 0.0))
        else:
            total = total + torch.minimum(torch.tensor(p), log_q.exp())
    return {"tv": 1 - total, "lk": -torch.log(torch.as_tensor(total))}.get(loss, total)


def slow_unroll(head, target, chats):
    """Row by row: a fresh forward over the row's own prefix and the ground-truth path.

    -> per step the (p, log q) of every position with a reachable target; then hits, positions, reached, passed.
    """
    weights = dict(head.named_parameters()) | {"d2t": IDS_VD - torch.arange(len(IDS_VD))}
    reference = ReferenceHead(weights, head.config.to_json(), target.embedding.weight, torch.float64)
    pairs, hits, counts, reached, passed = [[] for _ in range(STEPS)], [0] * STEPS, [0] * STEPS, [0] * STEPS, [0] * STEPS
    for chat in chats:
        (aux_TF,), (final_TH,) = target.hidden(torch.tensor([chat.ids]))
        number_of = [next((n for n, (a, b) in enumerate(chat.spans) if a <= t < b), None) for t in range(len(chat.ids))]
        for row in range(len(chat.ids)):
            alive = True
            for step in range(STEPS):
                seen, predicted = row + 1 + step, row + 2 + step
                if predicted >= len(chat.ids) or number_of[seen] is None or number_of[seen] != number_of[predicted]:
                    alive = False
                    continue
                counts[step] += 1
                reached[step] += alive
                full_logits_V = target.lm_head_VH @ final_TH[seen]
                hit = False
                if int(full_logits_V.argmax()) in IDS_VD.tolist():
                    path = chat.ids[row + 2 : row + 2 + step]
                    log_q_Vd = reference.chain_log_probs(aux_TF[: row + 1], chat.ids[: row + 2], path)[step]
                    pairs[step].append((full_logits_V[IDS_VD].softmax(-1), log_q_Vd))
                    hit = int(IDS_VD[log_q_Vd.argmax()]) == int(full_logits_V.argmax())
                alive = alive and hit
                hits[step] += hit
                passed[step] += alive
    return pairs, [hits, counts, reached, passed]


@pytest.fixture(scope="module")
def toys():
    """Target, chats, head and draft target; the head is fitted a little, so that some of its guesses are right."""
    target, chats = toy_target(), toy_chats()
    head, draft = toy_head(target, IDS_VD), toy_draft_target(target, IDS_VD)
    optimizer, model, batch = torch.optim.Adam(head.parameters(), 0.02), TTTModel(head, DECAY), toy_batch(target, chats, STEPS)
    for _ in range(25):
        optimizer.zero_grad()
        model(batch, draft, supervised_counts(chats, STEPS))[0].backward()
        optimizer.step()
    return target, chats, head, draft


@pytest.fixture(scope="module")
def slow(toys):
    """By loss name: value, gradients and counts of the slow unroll, which runs once."""
    target, chats, head, _ = toys
    pairs, counts = slow_unroll(head, target, chats)

    @cache
    def get(loss: str):
        values = [sum(slow_value(loss, *pair) for pair in step) / count for step, count in zip(pairs, counts[1])]
        value = sum(DECAY**step * value for step, value in enumerate(values))
        return value, torch.autograd.grad(value, list(head.parameters()), retain_graph=True), counts

    return get


@CHECKPOINTING
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_gradients_and_counts_equal_the_slow_unroll(toys, slow, loss, layout, checkpointing):
    """Several spans, padding, packing, unreachable targets; float64, relative error below 1e-5 everywhere."""
    target, chats, head, draft = toys
    batch = toy_batch(target, chats, STEPS, LAYOUTS[layout])
    assert batch.ids_BT.shape[0] == len(LAYOUTS[layout] or chats)
    value, table_5K = TTTModel(head, DECAY, loss, checkpointing)(batch, draft, supervised_counts(chats, STEPS))
    found = torch.autograd.grad(value, list(head.parameters()))
    expected, gradients, counts = slow(loss)
    assert table_5K[1:].tolist() == counts
    hits, positions, reached, passed = counts
    assert 0 < min(positions) and 0 < sum(hits) < sum(positions) and reached[1] == passed[0] < positions[1]
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)  # rotary angles are float32 on both sides
    for (name, _), ours, theirs in zip(head.named_parameters(), found, gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8, msg=name)
        assert theirs.abs().max() > 0, name


def test_out_of_vocabulary_positions_give_no_loss_but_count(toys):
    target, chats, *_ = toys
    features = [toy_features(target, chat) for chat in chats]
    tops = torch.cat([feature.argmax_P for feature in features])
    unreachable = torch.tensor(sorted(set(range(VOCAB)) - set(tops.tolist())))
    head = toy_head(target, unreachable)
    for loss in LOSSES.values():
        sums = unroll(head, toy_batch(target, chats, 2), toy_draft_target(target, unreachable), loss)
        assert sums.loss_K.tolist() == [0, 0] and sums.hits_K.tolist() == [0, 0] and min(sums.positions_K.tolist()) > 0


def test_padding_and_neighbours_do_not_matter(toys):
    """A batch's sums are those of its rows alone, and of any packing of them."""
    target, chats, head, draft = toys
    together = unroll(head, toy_batch(target, chats, STEPS), draft)
    alone = [unroll(head, toy_batch(target, [chat], STEPS), draft) for chat in chats]
    torch.testing.assert_close(together.loss_K, sum(part.loss_K for part in alone))
    for rows in ([[0, 1, 2]], [[1], [2, 0]], [[0, 2], [1]]):
        packed = unroll(head, toy_batch(target, chats, STEPS, rows), draft)
        torch.testing.assert_close(packed.loss_K, together.loss_K)
        assert torch.equal(packed.table()[1:], together.table()[1:])


def test_recomputing_keeps_less_for_the_backward_pass(toys):
    target, chats, head, draft = toys
    kept = []
    for checkpointing in (False, True):
        storages = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, into=storages: into.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
        ):
            unroll(head, toy_batch(target, chats, STEPS), draft, checkpointing=checkpointing)
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
    assert kept[1] < 0.7 * kept[0]
