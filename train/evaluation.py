"""The held-out measures: loss and accuracy by depth, and the accept length to expect of a chain and of TALON's tree.

Evaluation runs on a copy of the head, so it leaves no trace in the training state, needs no gathering of ZeRO-3 shards while it computes,
and lets processes have different numbers of rows.

Accept length is SGLang's: tokens of an answer (the first one, which prefill gives, included) per target forward, so the target's own token
at the end of a round counts. Rounds are laid along the held-out answers as greedy decoding would lay them, each starting at the last token
of the one before. Where an answer was sampled at a temperature, "right" still means the target's first choice.

Shape suffixes: B batch, Q query rows, K training-time-test steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from eval.policies import Talon
from eval.policies.rounds import Committed, DraftRounds
from eval.rounds import follow
from train.batches import Batch, BatchLoader
from train.head import Eagle3Head
from train.losses import LOSSES
from train.schedule import plan_epoch
from train.ttt import DraftTarget, unroll

TREE = Talon(nodes=16, width=4)
TREE_TOKENS = 96  # of each answer: enough for some forty rounds, and a bound on the time


@dataclass
class Tokens:
    """Answer tokens and the target forwards (rounds) they took; adds up over answers and processes."""

    tokens: float = 0
    rounds: float = 0

    def add(self, tokens: int, rounds: int) -> None:
        self.tokens, self.rounds = self.tokens + tokens, self.rounds + rounds

    @property
    def accept_length(self) -> float | None:
        return self.tokens / self.rounds if self.rounds else None


@dataclass
class HeldOut:
    """`table_5K`: see `StepSums.table`; `chain`: drafts of `ttt_steps` tokens; `tree`: TALON N=16, K=4."""

    table_5K: torch.Tensor
    chain: Tokens
    tree: Tokens

    def flat(self) -> torch.Tensor:
        numbers = [self.chain.tokens, self.chain.rounds, self.tree.tokens, self.tree.rounds]
        return torch.cat([self.table_5K.double().flatten(), torch.tensor(numbers, device=self.table_5K.device, dtype=torch.double)])

    @classmethod
    def of_flat(cls, flat: torch.Tensor) -> HeldOut:
        chain_tokens, chain_rounds, tree_tokens, tree_rounds = flat[-4:].tolist()
        return cls(flat[:-4].view(5, -1), Tokens(chain_tokens, chain_rounds), Tokens(tree_tokens, tree_rounds))


def plain_head(head: Eagle3Head, weights: dict[str, torch.Tensor], device, dtype) -> Eagle3Head:
    """A head of the same sizes with these weights, for inference."""
    with torch.device("meta"):
        twin = Eagle3Head(head.config)
    twin._rotary = copy.deepcopy(head._rotary)
    twin.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    return twin.requires_grad_(False).eval()


@torch.no_grad()
def evaluate(head: Eagle3Head, loader: BatchLoader, target: DraftTarget, settings, device, dtype, rank: int = 0, size: int = 1) -> HeldOut:
    """This process's share of the held-out rows: every `size`-th micro-batch and tree row from `rank` on. The caller adds the shares up."""
    found = HeldOut(torch.zeros(5, settings.ttt_steps, device=device), Tokens(), Tokens())
    lengths = [len(chat.ids) for chat in loader.chats]
    for step in plan_epoch(lengths, settings.micro_batch_tokens, 1, 0, 0)[rank::size]:
        batch = loader.batch(step[0]).to(device, dtype)
        sums = unroll(head, batch, target, LOSSES[settings.loss])
        found.table_5K += sums.table()
        lay_chains(batch, sums.right_KBQ, found.chain)
    chats = [chat for chat in loader.chats if chat.spans[-1][1] - chat.spans[-1][0] >= 2][: settings.tree_rows][rank::size]
    if chats:
        with torch.device(device):
            lay_trees(head, chats, loader.get_features(chats), target, dtype, found.tree)
    return found


def lay_chains(batch: Batch, right_KBQ: torch.Tensor, into: Tokens) -> None:
    """Rounds of a chain of K drafted tokens along every answer of a batch."""
    wanted_KBQ = batch.wanted_KBQ.cpu() >= 0
    leading_BQ = (right_KBQ.cpu() & wanted_KBQ).int().cumprod(0).sum(0)
    for rows_Q, starts_Q, leading_Q in zip(batch.rows_BQ.tolist(), wanted_KBQ[0].tolist(), leading_BQ.tolist()):
        leading = {row: count for row, starts, count in zip(rows_Q, starts_Q, leading_Q) if starts}
        # A round can start in the rows that are supervised at step 0: one unbroken run of them for each answer.
        for first in (row for row in leading if row - 1 not in leading):
            last = first
            while last + 1 in leading:
                last += 1
            row, rounds = first, 0
            while row <= last:
                row, rounds = row + leading[row] + 1, rounds + 1
            into.add(last - first + 2, rounds)


@torch.inference_mode()
def lay_trees(head: Eagle3Head, chats: list, features: list, target: DraftTarget, dtype, into: Tokens) -> None:
    """Rounds of TALON's tree along the last answer of each chat, all chats side by side."""
    device = target.embedding_VH.device
    spans = [(start, min(end, start + TREE_TOKENS)) for start, end in (chat.spans[-1] for chat in chats)]
    ids = [chat.ids[:end] for chat, (_, end) in zip(chats, spans)]
    given = [one.aux_TF[: end - 1].to(device, dtype) for one, (_, end) in zip(features, spans)]
    committed = Committed(head, target.embedding_VH, ids, given, [start for start, _ in spans])
    answers, at = [chat.ids[start:end] for chat, (start, end) in zip(chats, spans)], [0] * len(chats)
    rounds = 0
    while going := [p for p, answer in enumerate(answers) if at[p] < len(answer) - 1]:
        sequence_B = torch.tensor(going, device=device)
        root_B = torch.tensor([spans[p][0] + at[p] for p in going], device=device)
        drafts = TREE.draft(DraftRounds(head, target.ids_Vd, target.embedding_VH, committed, sequence_B, root_B))
        for p, draft in zip(going, drafts):
            at[p] += follow(draft, at[p], answers[p]).emitted
        rounds += len(going)
    into.add(sum(map(len, answers)), rounds)
