"""Answers without a server: the target in this process, in a decode loop whose slots are refilled as answers end."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from train.answers import AnswerFile, Job
from train.decoder import SlotDecoder
from train.features import Features, predicting, target_fingerprint
from train.machine import DTYPES
from train.masks import ChatEncoder, MaskError
from train.progress import progress_bar
from train.recipe import AnswerSettings, FeatureSettings
from train.store import FeatureStore
from train.target import FrozenTarget

PREFILL_TOKENS = 2048  # at most this many (padded) prompt tokens in one forward
ROWS_AT_ONCE = 32
SOURCE = "built-in decode loop"


def answer_here(
    target_dir: Path,
    jobs: list[Job],
    done: int,
    file: AnswerFile,
    settings: AnswerSettings,
    features: FeatureSettings | None = None,
    aux_layers: tuple[int, ...] | None = None,
) -> None:
    """Answer the jobs; `done` were answered before. With `features`, what training needs of the target is kept on the way."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = aux_layers if features else (0,)  # without features it does not matter which
    target = FrozenTarget.load(target_dir, DTYPES[settings.precision], device, layers)
    store = FeatureStore(features.folder, target_fingerprint(target), features.dtype) if features else None
    total = (done + len(jobs)) * settings.max_new_tokens
    with (
        file.appending(ROWS_AT_ONCE) as emit,
        progress_bar("answer tokens, at most", total, done * settings.max_new_tokens) as bar,
    ):

        def advance(count: int):
            bar(count, f"{done + answerer.finished} conversations")

        answerer = Answerer(target, AutoTokenizer.from_pretrained(target_dir), settings, emit, advance, store)
        try:
            answerer.run(jobs)
        finally:
            if store:
                store.flush()
    file.refused = answerer.refused


class Answerer:
    """Runs jobs through a SlotDecoder.

    `emit(row)` receives each finished conversation, `advance(count)` hears of progress: max_new_tokens in all for each conversation.
    """

    def __init__(self, target: FrozenTarget, tokenizer, settings: AnswerSettings, emit, advance, store: FeatureStore | None = None):
        self.target, self.tokenizer, self.settings, self.store = target, tokenizer, settings, store
        self.emit, self.advance = emit, advance
        self.encoder = ChatEncoder(tokenizer) if store else None
        self.end_ids = end_of_answer(target.model.generation_config, tokenizer)
        self.refused: dict[str, int] = {}
        self.finished = 0
        self.waiting: list[Job] = []

    def run(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._queue(job)
        self.waiting.sort(key=lambda job: len(job.ids), reverse=True)  # neighbours of one length waste no padding
        slots = min(self.settings.slots, max(len(self.waiting), 1))
        keep = self.target.aux_layers if self.store else ()
        exact = self.store is not None and self.store.settings["dtype"] == "fp32"
        kept_dtype = torch.float32 if exact else torch.bfloat16
        decoder = SlotDecoder(self.target.model, slots, self.settings.max_length, keep, kept_dtype)
        decoder.share_prefix(_common_prefix([job.ids for job in self.waiting]))
        active: list[Job | None] = [None] * slots
        tokens_S = torch.zeros(slots, dtype=torch.long, device=self.target.embedding.weight.device)
        while self.waiting or any(active):
            free = [slot for slot, job in enumerate(active) if job is None]
            if self.waiting and (len(free) >= min(max(slots // 8, 1), len(self.waiting)) or len(free) == len(active)):
                self._admit(decoder, active, tokens_S, free)
                continue
            busy = [slot for slot, job in enumerate(active) if job is not None]
            if not self.waiting and len(busy) * 4 <= len(active) * 3:
                decoder.select(busy)
                active, tokens_S = [active[slot] for slot in busy], tokens_S[busy]
            logits_SV = decoder.step(tokens_S)
            self._choose(decoder, active, tokens_S, list(range(len(active))), logits_SV)

    def _queue(self, job: Job) -> None:
        reason = job.ask(self.tokenizer, self.settings)
        if reason:
            self._close(job, reason)
        else:
            self.waiting.append(job)

    def _admit(self, decoder, active, tokens_S, free: list[int]) -> None:
        group: list[Job] = []
        while self.waiting and len(group) < len(free):
            longest = max(len(job.ids) for job in [*group, self.waiting[0]])
            if group and longest * (len(group) + 1) > PREFILL_TOKENS:
                break
            group.append(self.waiting.pop(0))
        slots = free[: len(group)]
        logits_BV = decoder.prefill(slots, [job.ids for job in group])
        for slot, job in zip(slots, group):
            active[slot] = job
        self._choose(decoder, active, tokens_S, slots, logits_BV)

    def _choose(self, decoder, active, tokens_S, slots: list[int], logits_BV) -> None:
        """Pick the next token of every slot; close what ended."""
        greedy_B = logits_BV.argmax(-1).tolist()
        for row, slot in enumerate(slots):
            job = active[slot]
            if job is None:
                continue
            token = greedy_B[row]
            job.greedy.append(token)
            if self.settings.temperature > 0:
                token = sample(logits_BV[row], self.settings.temperature, job.rng.random())
            job.answer.append(token)
            tokens_S[slot] = token
            if job.steps < self.settings.max_new_tokens:
                job.steps += 1
                self.advance(1)
            ended = token in self.end_ids
            if ended or len(job.answer) >= self.settings.max_new_tokens:
                kept_TX = decoder.kept(slot) if self.store else None
                active[slot] = None
                self._finish_turn(job, ended, kept_TX)

    def _finish_turn(self, job: Job, ended: bool, kept_TX) -> None:
        text = self.tokenizer.decode(job.answer[:-1] if ended else job.answer)
        if not text.strip():
            self._close(job, "empty answer")
            return
        job.messages.append({"role": "assistant", "content": text})
        if ended and job.turn < len(job.prompt.turns):
            self._queue(job)
            return
        if self.store:
            self._keep(job, ended, kept_TX)
        self._close(job, truncated=not ended)

    def _keep(self, job: Job, ended: bool, kept_TX: torch.Tensor) -> None:
        """Store the features if these are the tokens that training will read.

        Text may tokenise otherwise than it was said; training then computes its own.
        """
        try:
            chat = self.encoder.encode(job.messages, truncated=not ended)
        except MaskError:
            return
        if chat.ids[: chat.useful_length] != job.ids + job.answer[:-1]:
            return
        features = 3 * self.target.config.hidden_size
        positions_P = predicting(chat)
        final_PH = kept_TX[positions_P.to(kept_TX.device), features:]
        argmax_P = torch.empty(len(positions_P), dtype=torch.int32)
        said_P = positions_P >= len(job.ids)  # behind the first token of the last answer: known from decoding
        argmax_P[said_P] = torch.tensor(job.greedy, dtype=torch.int32)[positions_P[said_P] - len(job.ids) + 1]
        if not said_P.all():  # earlier answers
            earlier_NH = final_PH[~said_P.to(final_PH.device)].to(self.target.lm_head_VH)
            argmax_P[~said_P] = self.target.argmax(earlier_NH).to(argmax_P)
        self.store.put(chat, Features(kept_TX[:, :features], final_PH, argmax_P))

    def _close(self, job: Job, reason: str = "", truncated: bool = False) -> None:
        if reason:
            self.refused[reason] = self.refused.get(reason, 0) + 1
        self.finished += 1
        self.advance(self.settings.max_new_tokens - job.steps)
        self.emit(job.row(self.settings, f"{SOURCE}, {self.settings.precision}", truncated))


def end_of_answer(generation_config, tokenizer) -> set[int]:
    """Token ids that end an answer: the model's own and the tokenizer's."""
    ends = generation_config.eos_token_id
    return {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}


def _common_prefix(prompts: list[list[int]]) -> list[int]:
    """What all prompts begin with, short of the last token of the shortest. Later turns of a conversation begin with its first prompt."""
    if len(prompts) < 2:
        return []
    shortest, other = min(prompts), max(prompts)  # in lexical order: what these two share, all share
    limit = min(map(len, prompts)) - 1
    return shortest[: next((i for i, (a, b) in enumerate(zip(shortest, other)) if a != b), limit)][:limit]


def sample(logits_V: torch.Tensor, temperature: float, uniform: float) -> int:
    """Inverse transform sampling, so that one number per token makes the draw repeatable whatever shares the batch."""
    cumulative_V = torch.softmax(logits_V.double() / temperature, dim=-1).cumsum(-1)
    return min(int(torch.searchsorted(cumulative_V, uniform * cumulative_V[-1], right=True)), len(cumulative_V) - 1)
