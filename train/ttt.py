"""Training-time test: the head is unrolled on its own states, as it will be when it drafts (EAGLE-3; SafeAILab `traineagle3`).

At step k the row r reads token x[r+1+k] and its own state of step k-1 (step 0: fc of the target's features) and predicts x[r+2+k].
Its query attends to the step-0 keys of rows <= r and to its own keys of steps 1..k. Rotary position of row r at step k is r + k.
The loss of a step is the soft cross-entropy against the target's distribution, renormalised over the draft vocabulary; a position whose
greedy token is outside that vocabulary gives none. It is divided by the number of positions that the span rule supervises, and
weighted with decay ** k. Only rows that carry loss at some step are run as queries: for the others nothing but their step-0 keys and values
matters.

Shape suffixes: B batch, T positions, K steps, Q query rows, P positions with a target distribution, N rows that carry loss at one step,
H hidden size, V and Vd target and draft vocabulary, A heads, G key/value heads, R = A / G, d head size.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as fn

from train.batches import Batch
from train.head import Eagle3Head
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
    """Per step, sums over the batch's supervised positions ([K]): loss, hits (draft argmax = target's greedy token), their number.

    A greedy token outside the draft vocabulary counts as a miss.
    """

    loss_K: torch.Tensor
    hits_K: torch.Tensor
    positions_K: torch.Tensor


class TTTModel(nn.Module):
    """The head as DeepSpeed drives it: forward(batch, counts_K) -> (loss, StepSums). The target is not part of the module."""

    def __init__(self, head: Eagle3Head, decay: float):
        super().__init__()
        self.head, self.decay = head, decay

    def forward(self, batch: Batch, target: DraftTarget, counts_K: torch.Tensor) -> tuple[torch.Tensor, StepSums]:
        """`counts_K`: the divisor of each step, usually the supervised positions of the whole optimiser step."""
        sums = unroll(self.head, batch, target)
        steps = torch.arange(len(sums.loss_K), device=sums.loss_K.device)
        loss = (self.decay**steps * sums.loss_K / counts_K.to(sums.loss_K).clamp(min=1)).sum()
        detached = StepSums(sums.loss_K.detach(), sums.hits_K, sums.positions_K)
        return loss, detached


def unroll(head: Eagle3Head, batch: Batch, target: DraftTarget) -> StepSums:
    """All steps of one batch."""
    probs_PVd = target.probabilities(batch.final_PH)
    reachable_P = target.in_draft_V[batch.argmax_P]
    rows_BQ = batch.rows_BQ
    extent = int(rows_BQ.max()) + 1  # rows behind the last query are never attended to
    rows_T = torch.arange(extent, device=rows_BQ.device)

    state_BTH = head.fc(batch.features_BTF[:, :extent])
    inputs_BTD = head.layer_inputs(fn.embedding(batch.ids_BT[:, 1 : extent + 1], target.embedding_VH), state_BTH)
    keys_BGTd, values_BGTd = head.keys_values(inputs_BTD, rows_T.expand(len(rows_BQ), -1))
    attention = RowAttention(keys_BGTd, values_BGTd, rows_T <= rows_BQ[..., None])

    state_BQH, inputs_BQD = _gather(state_BTH, rows_BQ), _gather(inputs_BTD, rows_BQ)
    last_token = batch.ids_BT.shape[1] - 1
    losses, hits, positions = [], [], []
    for step, wanted_BQ in enumerate(batch.wanted_KBQ):
        if step:
            tokens_BQ = batch.ids_BT.gather(1, (rows_BQ + 1 + step).clamp(max=last_token))
            inputs_BQD = head.layer_inputs(fn.embedding(tokens_BQ, target.embedding_VH), state_BQH)
            attention.append(*head.keys_values(inputs_BQD, rows_BQ + step))
        state_BQH = head.finish(state_BQH, attention(head.queries(inputs_BQD, rows_BQ + step)))
        supervised_BQ = wanted_BQ >= 0
        carries_BQ = supervised_BQ.clone()
        carries_BQ[supervised_BQ] = reachable_P[wanted_BQ[supervised_BQ]]
        wanted_N = wanted_BQ[carries_BQ]
        logits_NVd = widen(head.logits(state_BQH[carries_BQ]))
        losses.append(fn.cross_entropy(logits_NVd, probs_PVd[wanted_N], reduction="sum"))
        hits.append((target.ids_Vd[logits_NVd.detach().argmax(-1)] == batch.argmax_P[wanted_N]).sum())
        positions.append(supervised_BQ.sum())
    return StepSums(torch.stack(losses), torch.stack(hits).float(), torch.stack(positions).float())


class RowAttention:
    """Attention of compact query rows: shared step-0 keys under a mask, plus each row's own keys of the later steps."""

    def __init__(self, keys_BGTd, values_BGTd, visible_BQT):
        self.keys_BGTd, self.values_BGTd = keys_BGTd, values_BGTd
        self.hidden_B1QT = ~visible_BQT[:, None]
        self.own_keys: list[torch.Tensor] = []  # [B, G, Q, d] each
        self.own_values: list[torch.Tensor] = []

    def append(self, keys_BGQd, values_BGQd) -> None:
        self.own_keys.append(keys_BGQd)
        self.own_values.append(values_BGQd)

    def __call__(self, queries_BAQd) -> torch.Tensor:
        """-> context [B, A, Q, d]; scores and softmax in float32 (float64 stays)."""
        groups = self.keys_BGTd.shape[1]
        q_BGRQd = queries_BAQd.unflatten(1, (groups, -1)) * queries_BAQd.shape[-1] ** -0.5
        repeats = q_BGRQd.shape[2]
        flat_BGXd = q_BGRQd.flatten(2, 3)  # X = R * Q: the heads of one group share its keys in a single product
        scores_BGRQT = (flat_BGXd @ self.keys_BGTd.transpose(-1, -2)).unflatten(2, (repeats, -1))
        scores_BGRQT = scores_BGRQT.masked_fill(self.hidden_B1QT[:, :, None], float("-inf"))
        own = [(q_BGRQd * keys[:, :, None]).sum(-1, keepdim=True) for keys in self.own_keys]
        scores = torch.cat([scores_BGRQT, *own], dim=-1)
        weights = torch.softmax(widen(scores), dim=-1).to(queries_BAQd.dtype)
        extent = self.keys_BGTd.shape[2]
        context = (weights[..., :extent].flatten(2, 3) @ self.values_BGTd).unflatten(2, (repeats, -1))
        for index, values_BGQd in enumerate(self.own_values):
            context = context + weights[..., extent + index, None] * values_BGQd[:, :, None]
        return context.flatten(1, 2)


def widen(x: torch.Tensor) -> torch.Tensor:
    """To float32, where softmax is safe; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def _gather(x_BTX: torch.Tensor, rows_BQ: torch.Tensor) -> torch.Tensor:
    return x_BTX.gather(1, rows_BQ[..., None].expand(-1, -1, x_BTX.shape[-1]))
