"""Training-time test: the head is unrolled on its own states, as it will be when it drafts (EAGLE-3; SafeAILab `traineagle3`).

At step k the row r reads token x[r+1+k] and its own state of step k-1 (step 0: fc of the target's features) and predicts x[r+2+k].
Its query attends to the step-0 keys of rows <= r and to its own keys of steps 1..k. Rotary position of row r at step k is r + k.
The loss of a step compares with the target's distribution renormalised over the draft vocabulary (`train.losses`); a position whose
greedy token is outside that vocabulary gives none. It is divided by the number of positions that the span rule supervises, and
weighted with decay ** k. Only rows that carry loss at some step are run as queries: for the others nothing but their step-0 keys and values
matters.

Shape suffixes: B batch, T positions, K steps, Q query rows, P positions with a target distribution, N rows that carry loss at one step,
H hidden size, V and Vd target and draft vocabulary, A heads, G key/value heads, R = A / G, d head size.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from train.batches import Batch
from train.head import Eagle3Head
from train.losses import LOSSES, Loss, soft_ce
from train.target import capped


@dataclass
class DraftTarget:
    """What the loss needs of the frozen target, all without gradient."""

    embedding_VH: torch.Tensor
    lm_head_VdH: torch.Tensor  # rows of the draft vocabulary
    in_draft_V: torch.Tensor  # bool: t2d
    ids_Vd: torch.Tensor
    logit_cap: float | None = None  # Gemma's

    def probabilities(self, final_PH: torch.Tensor) -> torch.Tensor:
        """The target's distribution over the draft vocabulary, in float32 [P, Vd], once per batch."""
        with torch.no_grad():
            return torch.softmax(capped(widen(final_PH @ self.lm_head_VdH.t()), self.logit_cap), dim=-1)


@dataclass
class StepSums:
    """Per step, sums over the batch's supervised positions ([K]).

    loss_K; hits_K: the draft's first choice is the target's (outside the draft vocabulary that counts as a miss); positions_K: their
    number; reached_K: positions whose earlier steps, from 0 on, are all supervised and hits; passed_K: of those, the hits, so passed /
    reached is the accuracy at a depth given that all depths before it were right.
    right_KBQ: the hits, query by query.
    """

    loss_K: torch.Tensor
    hits_K: torch.Tensor
    positions_K: torch.Tensor
    reached_K: torch.Tensor
    passed_K: torch.Tensor
    right_KBQ: torch.Tensor

    def table(self) -> torch.Tensor:
        """The sums without gradient, as float32 [5, K] in the order above."""
        return torch.stack([self.loss_K.detach(), self.hits_K, self.positions_K, self.reached_K, self.passed_K]).float()


class TTTModel(nn.Module):
    """The head as DeepSpeed drives it: forward(batch, target, counts_K) -> (loss, table [5, K]). The target is not part of the module.

    `loss` is a name of `train.losses.LOSSES`; `checkpointing` computes each step's activations again in the backward pass.
    """

    def __init__(self, head: Eagle3Head, decay: float, loss: str = "soft_ce", checkpointing: bool = False):
        super().__init__()
        self.head, self.decay, self.loss, self.checkpointing = head, decay, LOSSES[loss], checkpointing

    def forward(self, batch: Batch, target: DraftTarget, counts_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`counts_K`: the divisor of each step, usually the supervised positions of the whole optimiser step."""
        sums = unroll(self.head, batch, target, self.loss, self.checkpointing)
        steps = torch.arange(len(sums.loss_K), device=sums.loss_K.device)
        loss = (self.decay**steps * sums.loss_K / counts_K.to(sums.loss_K).clamp(min=1)).sum()
        return loss, sums.table()


def unroll(head: Eagle3Head, batch: Batch, target: DraftTarget, loss: Loss = soft_ce, checkpointing: bool = False) -> StepSums:
    """All steps of one batch."""
    labels = Labels(target.probabilities(batch.final_PH), target.in_draft_V[batch.argmax_P], batch.argmax_P, target.ids_Vd, loss)
    rows_BQ = batch.rows_BQ
    extent = int(rows_BQ.max()) + 1  # rows behind the last query are never attended to
    positions_BT, positions_BQ = batch.positions_BT[:, :extent], batch.positions_BT.gather(1, rows_BQ)
    rows_T = torch.arange(extent, device=rows_BQ.device)

    state_BTH = head.fc(batch.features_BTF[:, :extent])
    inputs_BTD = head.layer_inputs(fn.embedding(batch.ids_BT[:, 1 : extent + 1], target.embedding_VH), state_BTH)
    visible_BQT = (rows_T <= rows_BQ[..., None]) & (rows_T >= (rows_BQ - positions_BQ)[..., None])  # of its own chat
    prefix = (*head.keys_values(inputs_BTD, positions_BT), ~visible_BQT[:, None, None])

    state_BQH, inputs_BQD = _gather(state_BTH, rows_BQ), _gather(inputs_BTD, rows_BQ)
    last_token = batch.ids_BT.shape[1] - 1
    own, losses, right = (), [], []
    for step, wanted_BQ in enumerate(batch.wanted_KBQ):
        embeds_BQH = None
        if step:
            embeds_BQH = fn.embedding(batch.ids_BT.gather(1, (rows_BQ + 1 + step).clamp(max=last_token)), target.embedding_VH)
        run = partial(_step, head, prefix, labels, wanted_BQ, positions_BQ + step, own, state_BQH)
        given = (embeds_BQH, None if step else inputs_BQD)
        state_BQH, new, loss_sum, right_BQ = checkpoint(run, *given, use_reentrant=False) if checkpointing else run(*given)
        own = (*own, *new)
        losses.append(loss_sum)
        right.append(right_BQ)
    return _count(torch.stack(losses), torch.stack(right), batch.wanted_KBQ >= 0)


@dataclass
class Labels:
    """What the positions of a batch are compared with, and how."""

    probs_PVd: torch.Tensor
    reachable_P: torch.Tensor  # bool: the target's greedy token is in the draft vocabulary
    argmax_P: torch.Tensor
    ids_Vd: torch.Tensor
    loss: Loss


def _step(head, prefix, labels: Labels, wanted_BQ, positions_BQ, own: tuple, state_BQH, embeds_BQH, inputs_BQD):
    """One step -> (state, this step's own (keys, values) or nothing at step 0, loss, hits [B, Q])."""
    new = ()
    if inputs_BQD is None:
        inputs_BQD = head.layer_inputs(embeds_BQH, state_BQH)
        new = (head.keys_values(inputs_BQD, positions_BQ),)
    context_BAQd = attend(head.queries(inputs_BQD, positions_BQ), prefix, (*own, *new))
    state_BQH = head.finish(state_BQH, context_BAQd)
    carries_BQ = wanted_BQ >= 0
    carries_BQ[carries_BQ.clone()] = labels.reachable_P[wanted_BQ[carries_BQ]]
    wanted_N = wanted_BQ[carries_BQ]
    logits_NVd = widen(head.logits(state_BQH[carries_BQ]))
    right_BQ = torch.zeros_like(carries_BQ)
    right_BQ[carries_BQ] = labels.ids_Vd[logits_NVd.detach().argmax(-1)] == labels.argmax_P[wanted_N]
    return state_BQH, new, labels.loss(logits_NVd, labels.probs_PVd[wanted_N]), right_BQ


def attend(queries_BAQd, prefix: tuple, own: tuple) -> torch.Tensor:
    """Attention of compact query rows: shared step-0 keys under a mask, and each row's own keys of the later steps.

    `prefix`: keys and values [B, G, T, d] and what is hidden [B, 1, 1, Q, T]; `own`: (keys, values) [B, G, Q, d] of each later step.
    -> context [B, A, Q, d]; scores and softmax in float32 (float64 stays).
    """
    keys_BGTd, values_BGTd, hidden_B11QT = prefix
    groups, extent = keys_BGTd.shape[1:3]
    q_BGRQd = queries_BAQd.unflatten(1, (groups, -1)) * queries_BAQd.shape[-1] ** -0.5
    repeats = q_BGRQd.shape[2]
    flat_BGXd = q_BGRQd.flatten(2, 3)  # X = R * Q: the heads of one group share its keys in a single product
    scores_BGRQT = (flat_BGXd @ keys_BGTd.transpose(-1, -2)).unflatten(2, (repeats, -1)).masked_fill(hidden_B11QT, float("-inf"))
    own_scores = [(q_BGRQd * keys_BGQd[:, :, None]).sum(-1, keepdim=True) for keys_BGQd, _ in own]
    weights = torch.softmax(widen(torch.cat([scores_BGRQT, *own_scores], dim=-1)), dim=-1).to(queries_BAQd.dtype)
    context = (weights[..., :extent].flatten(2, 3) @ values_BGTd).unflatten(2, (repeats, -1))
    for index, (_, values_BGQd) in enumerate(own):
        context = context + weights[..., extent + index, None] * values_BGQd[:, :, None]
    return context.flatten(1, 2)


def _count(loss_K, right_KBQ, supervised_KBQ) -> StepSums:
    passed_KBQ = (right_KBQ & supervised_KBQ).int().cumprod(0).bool()  # this step and all before it
    before_KBQ = torch.cat([torch.ones_like(passed_KBQ[:1]), passed_KBQ[:-1]])
    sums = [table.flatten(1).sum(1).float() for table in (right_KBQ, supervised_KBQ, supervised_KBQ & before_KBQ, passed_KBQ)]
    return StepSums(loss_K, *sums, right_KBQ)


def widen(x: torch.Tensor) -> torch.Tensor:
    """To float32, where softmax is safe; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def _gather(x_BTX: torch.Tensor, rows_BQ: torch.Tensor) -> torch.Tensor:
    return x_BTX.gather(1, rows_BQ[..., None].expand(-1, -1, x_BTX.shape[-1]))
