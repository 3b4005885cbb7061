"""The draft vocabulary: the tokens that the target's answers use most, and those that must never be out of reach.

Shape suffixes: V target vocabulary, Vd draft vocabulary.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

MOST_SOURCES = 64  # a source may be the row's own address; each costs an array of the size of the target vocabulary
FORMAT = 1  # of the cached file and of the way it is derived; part of the key


@dataclass
class DraftVocab:
    """Ascending target ids [Vd]. `coverage` is the share of the supervised tokens that the draft can propose. `filled`: ids that are in it
    only because the data has fewer distinct tokens than asked for."""

    ids_Vd: torch.Tensor
    target_size: int
    coverage: float
    filled: int = 0

    @property
    def d2t_Vd(self) -> torch.Tensor:
        """int64 offsets `id - index`, as SGLang stores them."""
        return self.ids_Vd - torch.arange(len(self.ids_Vd))

    @property
    def t2d_V(self) -> torch.Tensor:
        """bool: is the target id in the draft vocabulary."""
        member_V = torch.zeros(self.target_size, dtype=torch.bool)
        member_V[self.ids_Vd] = True
        return member_V

    def share_of(self, counts_V: torch.Tensor) -> float:
        """The share of counted tokens that this vocabulary holds; 0 when nothing was counted."""
        return counts_V[self.ids_Vd].sum().item() / max(counts_V.sum().item(), 1)


def count_supervised(encoded_chats: Iterable, target_size: int) -> torch.Tensor:
    """How often each target id is a supervised token -> int64 [V]."""
    counts_V, waiting, held = np.zeros(target_size, dtype=np.int64), [], 0
    for chat in encoded_chats:
        for start, end in chat.spans:
            waiting.append(np.asarray(chat.ids[start:end], dtype=np.int64))
            held += end - start
        if held > 1 << 20:
            counts_V += np.bincount(np.concatenate(waiting), minlength=target_size)
            waiting, held = [], 0
    if waiting:
        counts_V += np.bincount(np.concatenate(waiting), minlength=target_size)
    return torch.from_numpy(counts_V)


class SourceCounts:
    """Counts supervised tokens by source without keeping the chats; sources beyond the first MOST_SOURCES are counted together."""

    def __init__(self, target_size: int):
        self.target_size, self.held = target_size, 0
        self._waiting: dict[str, list] = {}
        self._counts: dict[str, torch.Tensor] = {}

    def add(self, source: str, chat) -> None:
        known = {*self._counts, *self._waiting}
        name = source if source in known or len(known) < MOST_SOURCES else "(other sources)"
        self._waiting.setdefault(name, []).append(chat)
        self.held += 1
        if self.held >= 4096:
            self._count()

    def _count(self) -> None:
        for name, chats in self._waiting.items():
            self._counts[name] = self._counts.get(name, 0) + count_supervised(chats, self.target_size)
        self._waiting, self.held = {}, 0

    def finish(self) -> dict[str, torch.Tensor]:
        """int64 [V] for each source, by name."""
        self._count()
        return dict(sorted(self._counts.items()))


def build_vocab(counts_V: torch.Tensor, size: int, pinned: set[int]) -> DraftVocab:
    """The `pinned` ids and the commonest others, `size` in all; equal counts go to the lower id, which also fills up with unused ids.

    Raises ValueError when `size` is below the number of pinned ids or above the target vocabulary.
    """
    total = len(counts_V)
    pinned = {token for token in pinned if 0 <= token < total}
    least = max(len(pinned), 1)
    if not least <= size <= total:
        raise ValueError(f"draft_vocab_size is {size}; choose a value from {least} (pinned tokens) to {total} (target vocabulary).")
    rank_V = counts_V.clone()
    rank_V[list(pinned)] = torch.iinfo(torch.long).max
    ids_Vd = torch.argsort(rank_V, descending=True, stable=True)[:size].sort().values
    filled = int((rank_V[ids_Vd] == 0).sum())
    vocab = DraftVocab(ids_Vd, total, 0.0, filled)
    vocab.coverage = vocab.share_of(counts_V)
    return vocab


def vocab_from_d2t(d2t_Vd: torch.Tensor, target_size: int, counts_V: torch.Tensor) -> DraftVocab:
    """The vocabulary of an existing head, for a warm start: its lm_head rows belong to these ids, so they are kept whatever the data says.

    Raises ValueError when `d2t_Vd` does not hold ascending offsets into the target vocabulary.
    """
    ids_Vd = d2t_Vd.long() + torch.arange(len(d2t_Vd))
    if len(ids_Vd) == 0 or ids_Vd[0] < 0 or ids_Vd[-1] >= target_size or not (ids_Vd.diff() > 0).all():
        raise ValueError(f"d2t does not hold ascending offsets into the target's {target_size} tokens; export that head anew.")
    vocab = DraftVocab(ids_Vd, target_size, 0.0)
    vocab.coverage = vocab.share_of(counts_V)
    return vocab


def cached_vocab(folder: Path, chats: list, tokenizer, counts_V: torch.Tensor, size: int) -> DraftVocab:
    """`build_vocab` with the tokenizer's pinned ids, kept in `folder` under a key of data, tokenizer, template and size.

    A run that is resumed finds the vocabulary it began with; any change of the key derives a new one. A damaged file is derived anew, and a
    folder that cannot be written costs the cache only.
    """
    pinned = special_token_ids(tokenizer)
    path = folder / f"draft-vocab-{vocab_key(chats, tokenizer, size, pinned)[:20]}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            vocab = vocab_from_d2t(file.get_tensor("d2t"), len(counts_V), counts_V)
            vocab.filled = int(file.metadata()["filled"])
            if len(vocab.ids_Vd) == size:
                return vocab
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        pass
    vocab = build_vocab(counts_V, size, pinned)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"d2t": vocab.d2t_Vd}, temporary, metadata={"filled": str(vocab.filled)})
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
    return vocab


def vocab_key(chats: list, tokenizer, size: int, pinned: set[int]) -> str:
    """Hex digest of what a draft vocabulary depends on."""
    digest = hashlib.sha256()
    for chat in chats:
        digest.update(repr((chat.ids, chat.spans)).encode())
    template = getattr(tokenizer, "chat_template", None)
    about = [FORMAT, size, sorted(pinned), template, sorted(tokenizer.get_vocab().items())]
    digest.update(json.dumps(about, default=str).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


NOT_TEXT = re.compile(r"reserved|unused|placeholder|extra_id|image|vision|video|audio|(^|[^a-z])pad([^a-z]|$)|_pad", re.IGNORECASE)


def special_token_ids(tokenizer) -> set[int]:
    """Ids that must always be proposable, seen or not: end of turn, tool and thinking marks, other special tokens, and the single bytes.

    Left out are reserved places and the marks of pictures and sound, of which some tokenizers have hundreds and a text model says none; one
    that does occur in the answers is counted like any token.
    """
    named = {**tokenizer.get_added_vocab(), **{text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens}}
    specials = {index for text, index in named.items() if not NOT_TEXT.search(text) and not text.isspace()}
    ends = {tokenizer.eos_token_id} - {None}
    return {token for token in specials if token is not None} | ends | _byte_token_ids(tokenizer)


def _byte_token_ids(tokenizer) -> set[int]:
    """The 256 byte tokens of a byte-level or byte-fallback tokenizer, so that any text stays reachable (other languages, emoji)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = tokenizer.get_vocab()
    names = list(bytes_to_unicode().values()) if "Ġ" in vocab else [f"<0x{value:02X}>" for value in range(256)]
    return {vocab[name] for name in names if name in vocab}
