"""What a run trains on: encoded conversations, their features, the held-out rows and the draft vocabulary."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from train.data import read_conversations
from train.features import Features, FeatureStore, compute_features, target_fingerprint
from train.masks import Encoded, MaskError, encode_chat
from train.progress import progress_bar
from train.recipe import Recipe, RecipeError
from train.target import FrozenTarget
from train.vocab import DraftVocab, build_vocab, count_supervised, special_token_ids


@dataclass
class Dataset:
    """Encoded chats for training and for evaluation, with the draft vocabulary of the training part."""

    train: list[Encoded]
    held_out: list[Encoded]
    vocab: DraftVocab
    notes: str

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for chat in [*self.train, *self.held_out]:
            digest.update(repr((chat.ids, chat.spans)).encode())
        digest.update(self.vocab.ids_Vd.numpy().tobytes())
        return digest.hexdigest()


def load_dataset(recipe: Recipe, tokenizer, vocab_size: int) -> Dataset:
    """Read and encode the answers. Raises RecipeError when nothing is left to train on, with the reasons."""
    path = recipe.answers.file
    if path is None or not path.exists():
        raise RecipeError(f"`answers.file` is {path}, which does not exist; run train/regenerate.py with this recipe first.")
    conversations, report = read_conversations(path)
    dropped: Counter = Counter()
    train, held_out = [], []
    for conversation in conversations:
        try:
            chat = encode_chat(tokenizer, conversation.messages, conversation.truncated)
        except MaskError as reason:
            dropped[str(reason)] += 1
            continue
        if len(chat.ids) > recipe.train.max_length:
            chat = chat.cut(recipe.train.max_length)
            dropped["(cut, not dropped) longer than train.max_length"] += 1
        if chat.predicted < 1:
            dropped["no answer token within train.max_length"] += 1
            continue
        (held_out if _is_held_out(conversation.id, recipe.train.held_out) else train).append(chat)
    notes = f"{path.name}: {report}" + "".join(f", {count} {reason}" for reason, count in dropped.items())
    if not train:
        raise RecipeError(f"`answers.file` holds no trainable conversation ({notes}).")
    counts_V = count_supervised(train, vocab_size)
    vocab = build_vocab(counts_V, min(recipe.head.draft_vocab_size, vocab_size), special_token_ids(tokenizer))
    return Dataset(train, held_out, vocab, notes)


def _is_held_out(row_id: str, share: float) -> bool:
    """By a hash of the id, so that all answers to one prompt fall on the same side, whatever the order of the file."""
    return int(hashlib.sha1(row_id.encode()).hexdigest()[:8], 16) / 2**32 < share


class FeatureSource:
    """Features of chats: from the store, or from the target in the moment they are needed."""

    def __init__(self, target: FrozenTarget, folder: Path | None):
        self.target = target
        self.store = FeatureStore(folder, target_fingerprint(target)) if folder else None

    def prepare(self, chats: list[Encoded], rank: int, size: int, budget: int) -> None:
        """Compute what the store lacks, this process's share of it; the caller synchronises and calls `refresh`."""
        if self.store is None:
            return
        missing = [chat for chat in chats if chat.ids[: chat.useful_length] not in self.store][rank::size]
        missing.sort(key=lambda chat: chat.useful_length)
        if not missing:
            return
        with progress_bar("features", sum(chat.useful_length for chat in missing)) as advance:
            while missing:
                group = [missing.pop()]
                while missing and len(group) < 64 and (len(group) + 1) * group[0].useful_length <= budget:
                    group.append(missing.pop())
                for chat, features in zip(group, self._compute(group)):
                    self.store.put(chat.ids[: chat.useful_length], features)
                    advance(chat.useful_length, "tokens")
                self.store.flush()

    def get(self, chats: list[Encoded]) -> list[Features]:
        if self.store is None:
            return self._compute(chats)
        found = [self.store.get(chat.ids[: chat.useful_length]) for chat in chats]
        for chat, features in zip(chats, found):
            self._fill_argmax(chat, features)
        return found

    def _compute(self, chats: list[Encoded]) -> list[Features]:
        found = compute_features(self.target, [chat.ids[: chat.useful_length] for chat in chats])
        for chat, features in zip(chats, found):
            self._fill_argmax(chat, features)
        return found

    def _fill_argmax(self, chat: Encoded, features: Features) -> None:
        """The target's greedy token wherever a supervised token is predicted and it is not yet known."""
        predicting = torch.zeros(len(features.argmax_T), dtype=torch.bool)
        for start, end in chat.spans:
            predicting[start : end - 1] = True
        open_T = predicting & (features.argmax_T.cpu() < 0)
        if open_T.any():
            hidden = self.target.config.hidden_size
            final_NH = features.kept_TX[open_T.to(features.kept_TX.device), 3 * hidden :].to(self.target.lm_head_VH)
            features.argmax_T[open_T] = self.target.argmax(final_NH).to(features.argmax_T)
