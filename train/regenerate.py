#!/usr/bin/env python3
"""Stage 2: the target answers the prompts itself, since a draft head must learn the target's own text.

Writes one JSON row per conversation: {"id", "sample", "category", "messages", "truncated"}. Questions after the first are asked on top of
the target's own earlier answers; a conversation ends early when an answer hits --max-new-tokens ("truncated": true). Killed and started
again, it goes on where it was. With --features, the hidden states that training needs are kept on the way.
"""

import argparse
import hashlib
import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from train.data import Prompt, read_prompts_with_report
from train.decoder import SlotDecoder
from train.features import Features, FeatureStore, target_fingerprint
from train.progress import progress_bar
from train.recipe import AnswerSettings, RecipeError, load_recipe
from train.target import FrozenTarget

PREFILL_TOKENS = 2048  # at most this many (padded) prompt tokens in one forward
FLUSH_ROWS = 32


@dataclass
class Job:
    """One conversation in the making."""

    prompt: Prompt
    sample: int
    messages: list[dict] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # the rendered prompt of the current turn
    answer: list[int] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)  # the target's argmax wherever an answer token was chosen
    rng: random.Random | None = None
    steps: int = 0  # tokens reported as progress

    @property
    def turn(self) -> int:
        return len(self.messages) // 2


class Answerer:
    """Runs jobs through a SlotDecoder, refilling slots as answers end.

    `emit(row)` receives each finished conversation, `advance(count)` hears of progress: max_new_tokens in all for each conversation.
    """

    def __init__(self, target: FrozenTarget, tokenizer, settings: AnswerSettings, emit, advance, store: FeatureStore | None = None):
        self.target, self.tokenizer, self.settings, self.store = target, tokenizer, settings, store
        self.emit, self.advance = emit, advance
        generation = target.model.generation_config.eos_token_id
        self.end_ids = set(generation if isinstance(generation, list) else [generation]) | {tokenizer.eos_token_id}
        self.refused: Counter = Counter()
        self.waiting: list[Job] = []

    def run(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._queue(job)
        self.waiting.sort(key=lambda job: len(job.ids), reverse=True)  # neighbours of one length waste no padding
        slots = min(self.settings.slots, max(len(self.waiting), 1))
        keep = self.target.aux_layers if self.store else ()
        decoder = SlotDecoder(self.target.model, slots, self.settings.max_length, keep)
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
        """Render the next question and put the job in line, or refuse it."""
        job.messages.append({"role": "user", "content": job.prompt.turns[job.turn]})
        text = self.tokenizer.apply_chat_template(job.messages, tokenize=False, add_generation_prompt=True)
        job.ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        job.answer = []
        if len(job.ids) + self.settings.max_new_tokens > self.settings.max_length:
            self._close(job, [], f"prompt and answer could exceed max_length {self.settings.max_length}")
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
                token = _sample(logits_BV[row], self.settings.temperature, job.rng.random())
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
            self._close(job, [], "empty answer")
            return
        job.messages.append({"role": "assistant", "content": text})
        if ended and job.turn < len(job.prompt.turns):
            self._queue(job)
            return
        if self.store:
            argmax_T = torch.full((len(kept_TX),), -1, dtype=torch.int32)
            argmax_T[len(job.ids) - 1 :] = torch.tensor(job.greedy[-len(job.answer) :])
            self.store.put(job.ids + job.answer[:-1], Features(kept_TX, argmax_T))
        self._close(job, job.messages, "", truncated=not ended)

    def _close(self, job: Job, messages: list[dict], reason: str, truncated: bool = False) -> None:
        if reason:
            self.refused[reason] += 1
            messages = job.messages[: len(job.messages) // 2 * 2]  # the turns before the refused one are good
        row = {"id": job.prompt.id, "sample": job.sample, "category": job.prompt.category, "messages": messages, "truncated": truncated}
        self.advance(self.settings.max_new_tokens - job.steps)
        self.emit(row)


def _common_prefix(prompts: list[list[int]]) -> list[int]:
    """What all prompts begin with, short of the last token of the shortest. Later turns of a conversation begin with its first prompt."""
    if len(prompts) < 2:
        return []
    shortest, other = min(prompts), max(prompts)  # in lexical order: what these two share, all share
    limit = min(map(len, prompts)) - 1
    return shortest[: next((i for i, (a, b) in enumerate(zip(shortest, other)) if a != b), limit)][:limit]


def _sample(logits_V: torch.Tensor, temperature: float, uniform: float) -> int:
    """Inverse transform sampling, so that one number per token makes the draw repeatable whatever shares the batch."""
    cumulative_V = torch.softmax(logits_V.double() / temperature, dim=-1).cumsum(-1)
    return min(int(torch.searchsorted(cumulative_V, uniform * cumulative_V[-1], right=True)), len(cumulative_V) - 1)


def regenerate(
    target_dir: Path, prompts: Path, out: Path, settings: AnswerSettings, features: Path | None = None, limit: int | None = None
) -> None:
    """Answer the prompts of a file into `out`; returns at once when `out` is already the answer to the same question."""
    found, report = read_prompts_with_report(prompts, limit, split="train")
    print(f"{prompts.name}: {report}", flush=True)
    if not found:
        raise RecipeError(f"{prompts.name} holds no usable prompt; see the reasons above.")
    asked = _settings_key(target_dir, found, settings)
    stamp, partial = out.with_name(out.name + ".settings.json"), out.with_name(out.name + ".partial")
    same = stamp.exists() and json.loads(stamp.read_text()) == asked
    if out.exists() and same:
        print(f"{out.name} is up to date", flush=True)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    if not same:
        partial.unlink(missing_ok=True)
        stamp.write_text(json.dumps(asked))
    done = _finished(partial)
    jobs = [Job(prompt, sample) for prompt in found for sample in range(settings.samples_per_prompt)]
    jobs = [job for job in jobs if (job.prompt.id, job.sample) not in done]
    for job in jobs:
        job.rng = random.Random(f"{settings.seed}/{job.prompt.id}/{job.sample}")
    _answer(target_dir, jobs, partial, settings, features, len(done))
    _drop_empty(partial, out)


def _answer(target_dir: Path, jobs: list[Job], partial: Path, settings: AnswerSettings, features: Path | None, done: int) -> None:
    from transformers import AutoTokenizer

    target = FrozenTarget.load(target_dir, torch.float32 if not torch.cuda.is_available() else torch.bfloat16, _device())
    store = FeatureStore(features, target_fingerprint(target)) if features else None
    buffer: list[str] = []
    finished = done
    total = (done + len(jobs)) * settings.max_new_tokens
    with open(partial, "a", encoding="utf-8") as file, progress_bar("answer tokens, at most", total, done * settings.max_new_tokens) as bar:

        def flush():
            if store:
                store.flush()  # before the rows: a row that is on disk has its features
            file.write("".join(buffer))
            file.flush()
            buffer.clear()

        def emit(row: dict):
            nonlocal finished
            finished += 1
            buffer.append(json.dumps(row, ensure_ascii=False) + "\n")
            if len(buffer) >= FLUSH_ROWS:
                flush()

        def advance(count: int):
            bar(count, f"{finished} conversations")

        answerer = Answerer(target, AutoTokenizer.from_pretrained(target_dir), settings, emit, advance, store)
        try:
            answerer.run(jobs)
        finally:
            flush()
    for reason, count in answerer.refused.items():
        print(f"{count} conversations ended early: {reason}", flush=True)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _settings_key(target_dir: Path, prompts: list[Prompt], settings: AnswerSettings) -> dict:
    digest = hashlib.sha256(json.dumps([[p.id, p.turns] for p in prompts]).encode() + (target_dir / "config.json").read_bytes())
    return {"prompts_and_target": digest.hexdigest(), **settings.model_dump(exclude={"slots", "prompts", "file"})}


def _finished(partial: Path) -> set[tuple[str, int]]:
    """Conversations already in the partial file; a last line cut by a kill is removed."""
    if not partial.exists():
        return set()
    data = partial.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        partial.write_bytes(whole)
    return {(row["id"], row["sample"]) for row in map(json.loads, whole.splitlines())}


def _drop_empty(partial: Path, out: Path) -> None:
    """Give the finished file its name; rows without an answer were only there to be remembered as done."""
    rows = [line for line in partial.read_bytes().split(b"\n") if line and json.loads(line)["messages"]]
    if not rows:
        raise RecipeError("No prompt got an answer; see the reasons above.")
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_bytes(b"\n".join(rows) + b"\n")
    os.replace(temporary, out)
    partial.unlink()
    truncated = sum(json.loads(row)["truncated"] for row in rows)
    print(f"{out.name}: {len(rows)} conversations, {truncated} of them cut at the token limit", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python train/regenerate.py --recipe recipes/smollm2-135m-cpu-quick.yaml\n"
        "  python train/regenerate.py --target DIR --prompts prompts.jsonl --out answers.jsonl --max-new-tokens 256\n"
        "  python train/regenerate.py --recipe R.yaml --prompts sharegpt.json --out my-answers.jsonl --limit 2000",
    )
    parser.add_argument("--recipe", type=Path, help="take everything not given here from this recipe's `target`, `answers` and `features`")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one field of the recipe (repeatable)")
    parser.add_argument("--target", type=Path, help="folder of the target model")
    parser.add_argument("--prompts", type=Path, help="prompts: JSONL (turns, ShareGPT, messages, UltraChat) or .txt")
    parser.add_argument("--out", type=Path, help="answers to write (JSONL)")
    parser.add_argument("--features", type=Path, help="folder that keeps the target's hidden states for training")
    parser.add_argument("--limit", type=int, help="use the first LIMIT prompts only")
    for name, kind, text in (
        ("max-new-tokens", int, "longest answer in tokens"),
        ("temperature", float, "0 is greedy"),
        ("samples-per-prompt", int, "answers per prompt (needs a temperature above 0)"),
        ("slots", int, "sequences decoded side by side"),
        ("seed", int, "seed of the sampling"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=text)
    args = parser.parse_args()
    try:
        _run(args, parser)
    except (RecipeError, OSError, ValueError) as error:
        sys.exit(f"regenerate: {error}")


def _run(args, parser) -> None:
    target, prompts, out, features, settings = args.target, args.prompts, args.out, args.features, AnswerSettings()
    if args.recipe:
        recipe = load_recipe(args.recipe, args.set)
        settings = recipe.answers
        target, prompts, out = target or recipe.target, prompts or settings.prompts, out or settings.file
        features = features or (recipe.features.folder if recipe.features.mode == "cache" else None)
    if not (target and prompts and out):
        parser.error("--target, --prompts and --out are needed, or a --recipe that names them")
    given = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "samples_per_prompt", "slots", "seed")}
    settings = AnswerSettings(**{**settings.model_dump(), **{name: value for name, value in given.items() if value is not None}})
    regenerate(Path(target), Path(prompts), Path(out), settings, features, args.limit)


if __name__ == "__main__":
    main()
