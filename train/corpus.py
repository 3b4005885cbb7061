"""A file -> encoded conversations, each row with its outcome. Training and train/lint.py both read through here."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from train.data import Conversation, iter_conversations
from train.masks import ChatEncoder, Encoded, MaskError
from train.reasons import Outcome

SHORTENING = ("answer-rewritten", "answer-holds-end-token", "not-aligned")


@dataclass
class Row:
    """One row of a file: what became of it and, unless it was dropped, its tokens."""

    number: int
    outcome: Outcome
    conversation: Conversation | None = None
    chat: Encoded | None = None


def encode_rows(path: str | Path, encoder: ChatEncoder, max_length: int, vocab_size: int | None = None) -> Iterator[Row]:
    """Every row of a file. Longer conversations are cut to `max_length` tokens; token ids from `vocab_size` on make a row unusable.

    A conversation that an earlier row holds already is dropped: under two ids it could be trained on and held out at once.
    Raises SourceError when the file cannot be read.
    """
    seen: set[bytes] = set()
    for raw, conversation, outcome in iter_conversations(path):
        if conversation is None:
            yield Row(raw.number, outcome)
            continue
        key = _content_key(conversation)
        if key in seen:
            yield Row(raw.number, Outcome("dropped", "duplicate"), conversation)
            continue
        seen.add(key)
        try:
            chat = _encode(conversation, encoder, vocab_size, max_length)
        except MaskError as reason:
            yield Row(raw.number, Outcome("dropped", reason.code), conversation)
            continue
        shortened = [note for note in chat.notes if note in SHORTENING]
        repaired = [note for note in chat.notes if note not in SHORTENING]
        if len(chat.ids) > max_length:
            chat = chat.cut(max_length)
            shortened.append("too-long")
        if chat.predicted < 1:
            yield Row(raw.number, Outcome("dropped", "too-long"), conversation)
        else:
            yield Row(raw.number, outcome.with_changes(shortened, repaired), conversation, chat)


def _encode(conversation: Conversation, encoder: ChatEncoder, vocab_size: int | None, max_length: int) -> Encoded:
    if conversation.ids:
        return encoder.from_tokens(conversation.ids, conversation.mask, vocab_size)
    return encoder.encode(conversation.messages, conversation.truncated, max_length)


def _content_key(conversation: Conversation) -> bytes:
    content = conversation.messages or (conversation.ids, conversation.mask)
    return hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).digest()
