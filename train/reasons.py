"""Every reason a row of training data can be kept, repaired, shortened or dropped for: one code, one sentence.

One rule decides the fate. A fault outside the turns drops the row. A fault in a turn cuts the conversation before that turn: what
precedes is kept when it holds a whole question and answer ("shortened"), else the row is dropped; answers that cannot be trained, or a
tail beyond the token limit, also shorten a row. What can be put right without guessing is put right ("repaired"). Each row has exactly one
outcome, so the outcomes of a file sum to the rows read. docs/data.md shows this table.
"""

from collections import Counter
from dataclasses import dataclass, field

FATES = ("kept", "repaired", "shortened", "dropped")

REASONS = {
    "ok": "nothing to say",
    # the file
    "bad-json": "the row is not JSON",
    "cut-off": "the file ends in the middle of this row",
    "damaged-stream": "the compressed or parquet data cannot be read from here on",
    "bad-utf8": "the row holds bytes that are not UTF-8",
    # the row
    "not-an-object": "the row is JSON but not an object",
    "unknown-layout": "none of the known fields (conversations, messages, data, turns, prompt, input_ids, ...) holds a list or text",
    "formatted-text": "the row is text that a chat template already formatted; give messages, or input_ids with loss_mask",
    "empty-row": "the list of turns is empty",
    "other-split": "the row belongs to another split",
    "no-question": "there is no user turn",
    "no-answer": "no question is followed by an answer",
    "unanswered-end": "the last question has no answer and is left out",
    "assistant-first": "answers before the first question are left out",
    "duplicate": "an earlier row holds the same conversation",
    # a turn
    "turn-not-an-object": "a turn is not an object",
    "role-missing": "a turn has no role, or null as role",
    "role-unknown": "a turn has a role that is not user, assistant, system, or a known name of them",
    "tool-call": "an answer calls a tool",
    "tool-turn": "a turn is a tool's result",
    "system-late": "a system message follows other turns",
    "consecutive-user": "two questions in a row",
    "consecutive-assistant": "two answers in a row",
    "text-missing": "a turn has no text, or null as text",
    "not-text": "a turn's text is a number, an image or another thing that is not text",
    "content-parts": "text given as a list of text parts is joined",
    "empty-turn": "a question or an answer is empty or blank",
    "empty-system": "an empty system message is left out",
    "lone-surrogate": "a text holds half a surrogate pair, which is no character",
    # tokens and template
    "bad-tokens": "input_ids and loss_mask are not two lists of one length, of token ids of the target and of 0 and 1",
    "template-refuses": "the target's chat template raises an error on these messages",
    "not-aligned": "no answer can be located exactly in what the chat template renders",
    "answer-rewritten": "the template shows some answers differently once the conversation goes on; those are context, not trained",
    "answer-holds-end-token": "an answer holds the text of the end-of-turn token; it is context, not trained",
    "no-end-of-turn": "the template writes no end-of-turn token after an answer; the answer is trained without one",
    "no-supervised-token": "no answer is long enough to be trained (two tokens with its end of turn)",
    "too-long": "the conversation is longer than the token limit",
}


class BadRow(ValueError):
    """Why a row cannot be used: `code` is a key of REASONS."""

    def __init__(self, code: str):
        super().__init__(REASONS[code])
        self.code = code


@dataclass(frozen=True)
class Outcome:
    """What became of a row. `also` are further codes that apply to a row that is kept."""

    fate: str
    code: str
    also: tuple[str, ...] = ()

    @classmethod
    def of(cls, shortened: list[str], repaired: list[str]) -> "Outcome":
        """The outcome of a row that is kept: the gravest change names it."""
        return cls("kept", "ok").with_changes(shortened, repaired)

    def with_changes(self, shortened: list[str], repaired: list[str]) -> "Outcome":
        """This outcome and what was found later about the same row."""
        before = [] if self.code == "ok" else [self.code, *self.also]
        first, second = (before + shortened, repaired) if self.fate == "shortened" else (shortened, before + repaired)
        codes = list(dict.fromkeys(first + second))
        if not codes:
            return self
        return Outcome("shortened" if first else "repaired", codes[0], tuple(codes[1:]))


@dataclass
class Report:
    """What became of the rows of a file. The values of `outcomes`, keyed by (fate, code), sum to `rows`."""

    rows: int = 0
    outcomes: Counter = field(default_factory=Counter)
    also: Counter = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.rows += 1
        self.outcomes[outcome.fate, outcome.code] += 1
        self.also.update(outcome.also)

    @property
    def dropped(self) -> int:
        return sum(count for (fate, _), count in self.outcomes.items() if fate == "dropped")

    @property
    def kept(self) -> int:
        """Rows that go on, changed or not."""
        return self.rows - self.dropped

    def by_fate(self, fate: str) -> dict[str, int]:
        """code -> rows, commonest first."""
        found = [(code, count) for (kind, code), count in self.outcomes.items() if kind == fate]
        return dict(sorted(found, key=lambda pair: (-pair[1], pair[0])))

    def __str__(self) -> str:
        parts = [f"{self.rows} rows read, {self.kept} kept"]
        for fate in FATES[1:]:
            parts += [f"{count} {fate} ({REASONS[code]})" for code, count in self.by_fate(fate).items()]
        return ", ".join(parts)
