"""The vectorised loss against an unroll that treats every row and step by itself."""

import torch

from tests.train.toy import VOCAB, toy_batch, toy_chats, toy_draft_target, toy_features, toy_head, toy_target
from train.batches import supervised_counts
from train.reference import ReferenceHead
from train.ttt import TTTModel, unroll

STEPS, DECAY = 5, 0.8
IDS_VD = torch.tensor([0, 2, 3, 5, 8, 9, 12, 13, 17, 20, 21, 22, 25, 28, 30, 31, 33, 35, 38, 39])


def slow_loss(head, target, chats):
    """Row by row: a fresh chain forward over the row's own prefix and the ground-truth path, in plain loops."""
    weights = dict(head.named_parameters()) | {"d2t": IDS_VD - torch.arange(len(IDS_VD))}
    reference = ReferenceHead(weights, head.config.to_json(), target.embedding.weight, torch.float64)
    losses, hits, counts = [0.0] * STEPS, [0] * STEPS, [0] * STEPS
    for chat in chats:
        (aux_TF,), (final_TH,) = target.hidden(torch.tensor([chat.ids]))
        number_of = [next((n for n, (a, b) in enumerate(chat.spans) if a <= t < b), None) for t in range(len(chat.ids))]
        for row in range(len(chat.ids)):
            for step in range(STEPS):
                seen, predicted = row + 1 + step, row + 2 + step
                if predicted >= len(chat.ids) or number_of[seen] is None or number_of[seen] != number_of[predicted]:
                    continue
                counts[step] += 1
                full_logits_V = target.lm_head_VH @ final_TH[seen]
                if int(full_logits_V.argmax()) not in IDS_VD.tolist():
                    continue
                path = chat.ids[row + 2 : row + 2 + step]
                log_q_Vd = reference.chain_log_probs(aux_TF[: row + 1], chat.ids[: row + 2], path)[step]
                p_Vd = full_logits_V[IDS_VD].softmax(-1)
                losses[step] = losses[step] - (p_Vd * log_q_Vd).sum()
                hits[step] += int(IDS_VD[log_q_Vd.argmax()]) == int(full_logits_V.argmax())
    total = sum(DECAY**step * loss / count for step, (loss, count) in enumerate(zip(losses, counts)) if count)
    return total, hits, counts


def test_loss_gradients_hits_and_counts_equal_the_slow_unroll():
    target, chats = toy_target(), toy_chats()
    head = toy_head(target, IDS_VD)
    batch = toy_batch(target, chats, STEPS)
    loss, sums = TTTModel(head, DECAY)(batch, toy_draft_target(target, IDS_VD), supervised_counts(chats, STEPS))
    fast = torch.autograd.grad(loss, list(head.parameters()))
    expected, hits, counts = slow_loss(head, target, chats)
    slow = torch.autograd.grad(expected, list(head.parameters()))
    assert sums.positions_K.tolist() == counts and min(counts) > 0
    assert sums.hits_K.tolist() == hits
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)  # rotary angles are float32 on both sides
    for (name, _), ours, theirs in zip(head.named_parameters(), fast, slow):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8, msg=name)
        assert theirs.abs().max() > 0, name


def test_out_of_vocabulary_positions_give_no_loss_but_count():
    target, chats = toy_target(), toy_chats()
    features = [toy_features(target, chat) for chat in chats]
    tops = torch.cat([feature.argmax_P for feature in features])
    unreachable = torch.tensor(sorted(set(range(VOCAB)) - set(tops.tolist())))
    head = toy_head(target, unreachable)
    sums = unroll(head, toy_batch(target, chats, 2), toy_draft_target(target, unreachable))
    assert sums.loss_K.tolist() == [0, 0] and sums.hits_K.tolist() == [0, 0] and min(sums.positions_K.tolist()) > 0


def test_padding_and_neighbours_do_not_matter():
    """A batch's sums are those of its rows alone."""
    target, chats = toy_target(), toy_chats()
    head, draft = toy_head(target, IDS_VD), toy_draft_target(target, IDS_VD)
    together = unroll(head, toy_batch(target, chats, STEPS), draft)
    alone = [unroll(head, toy_batch(target, [chat], STEPS), draft) for chat in chats]
    torch.testing.assert_close(together.loss_K, sum(part.loss_K for part in alone))
    assert torch.equal(together.positions_K, sum(part.positions_K for part in alone))
