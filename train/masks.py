"""Which tokens carry loss: chat -> token ids and the exact spans that the model itself produced.

train/templates.py says where the answers are in the rendered text; here the text becomes tokens. They are produced piece by piece between
the boundaries, which is how they arise in serving: the prompt is tokenised, the answer is generated after it. A tokenizer that puts a space
before every piece (SentencePiece) gets the whole text at once instead, and an answer whose boundary falls inside a token is not trained.

The span rule (see `supervised_steps`): row i at training-time-test step k sees x[i+1+k] and predicts x[i+2+k]; it carries loss if and
only if both lie in the same span. So the first answer token is never predicted (in serving the target produces it) and nothing is
predicted beyond the end-of-turn token.

Shape suffixes: T positions.
"""

from dataclasses import dataclass, field

import torch

from train.reasons import BadRow
from train.templates import ChatRenderer, Rendered


@dataclass
class Encoded:
    """Token ids and the half-open [start, end) spans of supervised tokens, in order. `notes`: codes of train/reasons.py."""

    ids: list[int]
    spans: list[tuple[int, int]]
    notes: tuple[str, ...] = field(default=(), compare=False)

    def cut(self, length: int) -> "Encoded":
        """The first `length` tokens; spans are cut with them."""
        spans = [(start, min(end, length)) for start, end in self.spans if start < length]
        return Encoded(self.ids[:length], spans, self.notes)

    @property
    def useful_length(self) -> int:
        """Positions whose target output matters: the last supervised token is predicted, never read."""
        return self.spans[-1][1] - 1 if self.spans else 0

    @property
    def predicted(self) -> int:
        """Number of supervised predictions at step 0: every span token but the first."""
        return sum(max(end - start - 1, 0) for start, end in self.spans)

    def span_ids(self) -> torch.Tensor:
        """int64 [T]: 0 outside every span, else the span's number from 1."""
        numbers_T = torch.zeros(len(self.ids), dtype=torch.long)
        for number, (start, end) in enumerate(self.spans, 1):
            numbers_T[start:end] = number
        return numbers_T


class MaskError(BadRow):
    """Why a conversation yields no supervised token; `code` is a key of train/reasons.py."""


class ChatEncoder:
    """Encodes conversations with one tokenizer and its template.

    `end_ids`: token ids that end a turn, besides the tokenizer's eos and the token that the template itself writes after an answer.
    Raises ValueError when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer, end_ids: set[int] | None = None):
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or "the target"
            raise ValueError(f"The tokenizer of {name} has no chat template; add chat_template.jinja to its folder.")
        self.tokenizer = tokenizer
        self.special_ids = _special_tokens(tokenizer)
        self.end_ids = {tokenizer.eos_token_id, *(end_ids or ())}
        self.renderer = ChatRenderer(tokenizer, list(self.special_ids))
        self.piecewise = self._pieces_join()

    def encode(self, messages: list[dict], truncated: bool = False, enough: int | None = None) -> Encoded:
        """Token ids of a conversation and the spans of its assistant turns, each up to and including its end-of-turn token.

        `truncated`: the last answer was cut, so the tokens end with it and its end-of-turn token is left out. `enough`: the caller cuts at
        so many tokens; what follows the answer that reaches it need not be encoded. Raises MaskError when no turn can be supervised.
        """
        try:
            rendered = self.renderer.locate(messages)
        except BadRow as reason:
            raise MaskError(reason.code) from None
        notes = list(rendered.notes)
        ids, spans = self._by_pieces(rendered, enough) if self.piecewise else self._at_once(rendered, notes)
        if truncated and rendered.last and len(spans) == len(rendered.spans) and spans[-1]:
            start, end = spans[-1]
            end -= ids[end - 1] in self.special_ids.values()
            ids, spans[-1] = ids[:end], (start, end)
        kept = []
        for start, end in filter(None, spans):
            ended = self.end_ids | ({ids[end - 1]} & set(self.special_ids.values()))
            if ended.isdisjoint(ids[start : end - 1]):
                kept.append((start, end))
            else:
                notes.append("answer-holds-end-token")
        kept = [(start, end) for start, end in kept if end - start >= 2]
        if not kept:
            raise MaskError(next((note for note in notes if note in ("answer-holds-end-token", "not-aligned")), "no-supervised-token"))
        return Encoded(ids, kept, tuple(dict.fromkeys(notes)))

    def from_tokens(self, ids: list[int], mask: list[bool], vocab_size: int | None = None) -> Encoded:
        """Tokens that came with their mask: every unbroken run of the mask is a span. Raises MaskError."""
        if vocab_size is not None and max(ids) >= vocab_size:
            raise MaskError("bad-tokens")
        edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
        spans = [(start, end) for start, end in zip(edges[::2], edges[1::2]) if end - start >= 2]
        if not spans:
            raise MaskError("no-supervised-token" if any(mask) else "no-answer")
        return Encoded(ids, spans)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []  # length is the caller's matter

    def _by_pieces(self, rendered: Rendered, enough: int | None) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans, done = [], [], 0
        for start, end in rendered.spans:
            ids += self._ids(rendered.text[done:start])
            answer = self._ids(rendered.text[start:end])
            spans.append((len(ids), len(ids) + len(answer)))
            ids += answer
            done = end
            if enough is not None and len(ids) > enough:
                return ids, spans
        return ids + self._ids(rendered.text[done:]), spans

    def _at_once(self, rendered: Rendered, notes: list[str]) -> tuple[list[int], list[tuple[int, int] | None]]:
        encoding = self.tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, places = encoding["input_ids"], encoding["offset_mapping"]
        spans = []
        for start, end in rendered.spans:
            inside = [i for i, (a, b) in enumerate(places) if a < end and b > start]
            exact = inside and places[inside[0]][0] >= start and places[inside[-1]][1] <= end
            spans.append((inside[0], inside[-1] + 1) if exact else None)
            if not exact:
                notes.append("not-aligned")
        return ids, spans

    def _pieces_join(self) -> bool:
        """Do the tokens of two pieces, one after the other, read as the two pieces? A tokenizer that adds spaces says no."""
        return self.tokenizer.decode(self._ids("ab") + self._ids("cd")).strip() == "abcd" and self.tokenizer.decode(self._ids("ab")) == "ab"


def encode_chat(tokenizer, messages: list[dict], truncated: bool = False, end_ids: set[int] | None = None) -> Encoded:
    """`ChatEncoder.encode` for a single conversation."""
    return ChatEncoder(tokenizer, end_ids).encode(messages, truncated)


def _special_tokens(tokenizer) -> dict[str, int]:
    """text -> id of the tokens that a template writes and a text does not: special ones, and added ones in brackets."""
    added = {
        token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special or _in_brackets(token.content)
    }
    return added | {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens}


def _in_brackets(text: str) -> bool:
    return len(text) > 2 and (text[0], text[-1]) in (("<", ">"), ("[", "]"))


def supervised_steps(span_ids_T: torch.Tensor, step: int) -> torch.Tensor:
    """bool [T]: which rows carry loss at training-time-test step `step` (the span rule)."""
    length = len(span_ids_T)
    rows_T = torch.zeros(length, dtype=torch.bool)
    count = length - 2 - step
    if count > 0:
        seen, predicted = span_ids_T[1 + step : 1 + step + count], span_ids_T[2 + step : 2 + step + count]
        rows_T[:count] = (seen == predicted) & (seen > 0)
    return rows_T
