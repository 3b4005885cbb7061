"""Which tokens carry loss: chat -> token ids and the exact spans that the model itself produced.

The boundaries of an answer come from the tokenizer's own chat template, rendered twice: once up to the generation prompt and once with the
answer. No header string is searched for, so a user message that contains one changes nothing. Tokens are produced piece by piece between
those boundaries, which is how they arise in serving: the prompt is tokenised, the answer is generated after it.

The span rule (see `supervised_steps`): row i at training-time-test step k sees x[i+1+k] and predicts x[i+2+k]; it carries loss if and
only if both lie in the same span. So the first answer token is never predicted (in serving the target produces it) and nothing is
predicted beyond the end-of-turn token.

Shape suffixes: T positions.
"""

from dataclasses import dataclass

import torch


@dataclass
class Encoded:
    """Token ids and the half-open [start, end) spans of supervised tokens, in order."""

    ids: list[int]
    spans: list[tuple[int, int]]

    def cut(self, length: int) -> "Encoded":
        """The first `length` tokens; spans are cut with them."""
        return Encoded(self.ids[:length], [(start, min(end, length)) for start, end in self.spans if start < length])

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


class MaskError(ValueError):
    """Why a conversation yields no supervised token."""


def encode_chat(tokenizer, messages: list[dict], truncated: bool = False, end_ids: set[int] | None = None) -> Encoded:
    """Token ids of a conversation and the spans of its assistant turns, each up to and including its end-of-turn token.

    `truncated`: the last answer was cut, its span ends before the end-of-turn token. `end_ids`: token ids that end a turn (default:
    the tokenizer's eos). A turn that the template renders differently once the conversation goes on (some templates drop earlier
    reasoning) is kept as context and not supervised. Raises MaskError when no turn is left.
    """
    end_ids = end_ids or {tokenizer.eos_token_id}
    whole = _render(tokenizer, messages, False)
    pieces: list[tuple[str, bool]] = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = _render(tokenizer, messages[:index], True), _render(tokenizer, messages[: index + 1], False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            continue
        pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    pieces.append((whole[done:], False))

    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for text, supervised in pieces:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if supervised:
            end = next((i + 1 for i, token in enumerate(piece) if token in end_ids), len(piece))
            spans.append((len(ids), len(ids) + end))
        ids += piece
    if truncated and spans:
        start, end = spans[-1]
        end -= ids[end - 1] in end_ids
        ids = ids[:end]
        spans[-1] = (start, end)
    if not any(end - start >= 2 for start, end in spans):
        raise MaskError("no answer of two tokens or more that the chat template renders stably")
    return Encoded(ids, spans)


def supervised_steps(span_ids_T: torch.Tensor, step: int) -> torch.Tensor:
    """bool [T]: which rows carry loss at training-time-test step `step` (the span rule)."""
    length = len(span_ids_T)
    rows_T = torch.zeros(length, dtype=torch.bool)
    count = length - 2 - step
    if count > 0:
        seen, predicted = span_ids_T[1 + step : 1 + step + count], span_ids_T[2 + step : 2 + step + count]
        rows_T[:count] = (seen == predicted) & (seen > 0)
    return rows_T


def _render(tokenizer, messages: list[dict], generation_prompt: bool) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
