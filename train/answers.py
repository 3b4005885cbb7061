"""A conversation in the making, and the file of finished ones: resumable, and sure about which question it answers."""

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from train.data import Prompt
from train.recipe import AnswerSettings, RecipeError

# Settings that do not change the answers to given prompts (another precision seldom does; a row's `source` records it).
NOT_ASKED = {"slots", "prompts", "limit", "max_turns", "file", "server", "precision"}
SAMPLING = ("temperature", "max_new_tokens", "max_length", "seed")


@dataclass
class Job:
    """One conversation. Questions after the first are asked on top of the target's own earlier answers."""

    prompt: Prompt
    sample: int
    messages: list[dict] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # the rendered prompt of the current turn
    answer: list[int] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)  # the target's argmax wherever a token of `answer` was chosen
    rng: random.Random | None = None
    steps: int = 0  # tokens reported as progress

    @property
    def turn(self) -> int:
        return len(self.messages) // 2

    def ask(self, tokenizer, settings: AnswerSettings) -> str:
        """Render the next question into `ids`. -> why it cannot be asked, or ''."""
        self.messages.append({"role": "user", "content": self.prompt.turns[self.turn]})
        text = tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
        self.ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        self.answer, self.greedy = [], []
        fits = len(self.ids) + settings.max_new_tokens <= settings.max_length
        return "" if fits else f"prompt and answer could exceed max_length {settings.max_length}"

    def row(self, settings: AnswerSettings, source: str, truncated: bool = False) -> dict:
        """What is written: whole turns only, a question without an answer is left out. `source`: what computed the answers."""
        messages = self.messages[: self.turn * 2]
        row = {"id": self.prompt.id, "sample": self.sample, "category": self.prompt.category, "messages": messages, "truncated": truncated}
        return row | {"sampling": {name: getattr(settings, name) for name in SAMPLING} | {"source": source}}


class AnswerFile:
    """`out` appears when all is answered. Until then rows go to `out`.partial, and `out`.settings.json says what was asked."""

    def __init__(self, out: Path, asked: dict):
        self.out, self.asked = out, asked
        self.partial, self.stamp = out.with_name(out.name + ".partial"), out.with_name(out.name + ".settings.json")
        self.refused: Counter = Counter()

    def up_to_date(self) -> bool:
        return self.out.exists() and self._same()

    def open_jobs(self, prompts: list[Prompt], settings: AnswerSettings) -> tuple[list[Job], int]:
        """-> the jobs that are still to be done, and how many are. Rows that answer another question are thrown away."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        if not self._same():
            self.partial.unlink(missing_ok=True)
            self.stamp.write_text(json.dumps(self.asked))
        done = self._finished()
        jobs = [Job(prompt, sample) for prompt in prompts for sample in range(settings.samples_per_prompt)]
        jobs = [job for job in jobs if (job.prompt.id, job.sample) not in done]
        for job in jobs:
            job.rng = random.Random(f"{settings.seed}/{job.prompt.id}/{job.sample}")
        return jobs, len(done)

    @contextmanager
    def appending(self, rows_at_once: int) -> Iterator:
        """Yields `emit(row)`."""
        buffer: list[str] = []
        with open(self.partial, "a", encoding="utf-8") as file:

            def flush():
                file.write("".join(buffer))
                file.flush()
                buffer.clear()

            def emit(row: dict):
                buffer.append(json.dumps(row, ensure_ascii=False) + "\n")
                if len(buffer) >= rows_at_once:
                    flush()

            try:
                yield emit
            finally:
                flush()

    def finish(self) -> None:
        """Give the finished file its name; rows without an answer were only there to be remembered as done. Raises RecipeError."""
        for reason, count in self.refused.items():
            print(f"{count} conversations ended early: {reason}", flush=True)
        rows = [line for line in self.partial.read_bytes().split(b"\n") if line and json.loads(line)["messages"]]
        if not rows:
            raise RecipeError("No prompt got an answer; see the reasons above.")
        temporary = self.out.with_name(self.out.name + ".tmp")
        temporary.write_bytes(b"\n".join(rows) + b"\n")
        os.replace(temporary, self.out)
        self.partial.unlink()
        truncated = sum(json.loads(row)["truncated"] for row in rows)
        print(f"{self.out.name}: {len(rows)} conversations, {truncated} of them cut at the token limit", flush=True)

    def _same(self) -> bool:
        return self.stamp.exists() and json.loads(self.stamp.read_text()) == self.asked

    def _finished(self) -> set[tuple[str, int]]:
        """Conversations already in the partial file; a last line cut by a kill is removed."""
        if not self.partial.exists():
            return set()
        data = self.partial.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self.partial.write_bytes(whole)
        return {(row["id"], row["sample"]) for row in map(json.loads, whole.splitlines())}


def question(target_dir: Path, prompts: list[Prompt], settings: AnswerSettings) -> dict:
    """What decides the answers: target, prompts, sampling; and whether a server gave them, whose arithmetic differs a little."""
    digest = hashlib.sha256(json.dumps([[p.id, p.turns] for p in prompts]).encode() + (target_dir / "config.json").read_bytes())
    asked = {"prompts_and_target": digest.hexdigest(), **settings.model_dump(exclude=NOT_ASKED)}
    return asked | {"from_server": True} if settings.server else asked
