"""The draft vocabulary: the tokens that the target's answers use most.

Shape suffixes: V target vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass

import torch


@dataclass
class DraftVocab:
    """Ascending target ids [Vd]. `coverage` is the share of the supervised tokens that the draft can propose."""

    ids_Vd: torch.Tensor
    target_size: int
    coverage: float

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


def count_supervised(encoded_chats, target_size: int) -> torch.Tensor:
    """How often each target id is a supervised token -> int64 [V]."""
    counts_V = torch.zeros(target_size, dtype=torch.long)
    for chat in encoded_chats:
        for start, end in chat.spans:
            counts_V += torch.bincount(torch.tensor(chat.ids[start:end]), minlength=target_size)
    return counts_V


def build_vocab(counts_V: torch.Tensor, size: int, pinned: set[int]) -> DraftVocab:
    """The `pinned` ids and the commonest others, `size` in all; equal counts go to the lower id, which also fills up with unused ids.

    Raises ValueError when `size` is below the number of pinned ids or above the target vocabulary.
    """
    total = len(counts_V)
    pinned = {token for token in pinned if 0 <= token < total}
    if not max(len(pinned), 1) <= size <= total:
        least = max(len(pinned), 1)
        raise ValueError(f"draft_vocab_size is {size}; choose a value from {least} (pinned tokens) to {total} (target vocabulary).")
    rank_V = counts_V.clone()
    rank_V[list(pinned)] = torch.iinfo(torch.long).max
    ids_Vd = torch.argsort(rank_V, descending=True, stable=True)[:size].sort().values
    covered = counts_V[ids_Vd].sum().item() / max(counts_V.sum().item(), 1)
    return DraftVocab(ids_Vd, total, covered)


def special_token_ids(tokenizer) -> set[int]:
    """Ids that must always be proposable: the special tokens (end of turn, tool and thinking marks) and the single bytes."""
    specials = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return {token for token in specials if token is not None} | _byte_token_ids(tokenizer)


def _byte_token_ids(tokenizer) -> set[int]:
    """The 256 byte tokens of a byte-level or byte-fallback tokenizer, so that any text stays reachable (other languages, emoji)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = tokenizer.get_vocab()
    names = list(bytes_to_unicode().values()) if "Ġ" in vocab else [f"<0x{value:02X}>" for value in range(256)]
    return {vocab[name] for name in names if name in vocab}
