"""What a run trains on: encoded conversations, their features, the held-out rows and the draft vocabulary."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field

from train.corpus import encode_rows
from train.feature_size import describe_bytes
from train.features import Features, compute_features, target_fingerprint
from train.masks import ChatEncoder, Encoded
from train.paths import cache_dir
from train.progress import progress_bar
from train.reasons import Report
from train.recipe import FeatureSettings, Recipe, RecipeError
from train.store import FeatureStore
from train.target import FrozenTarget
from train.vocab import DraftVocab, SourceCounts, cached_vocab


@dataclass
class Dataset:
    """Encoded chats for training and for evaluation, with the draft vocabulary of the training part and its coverage of each source."""

    train: list[Encoded]
    held_out: list[Encoded]
    vocab: DraftVocab
    notes: str
    coverage_by_source: dict[str, float] = field(default_factory=dict)

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
    encoder, report = ChatEncoder(tokenizer), Report()
    train, held_out, counts = [], [], SourceCounts(vocab_size)
    for row in encode_rows(path, encoder, recipe.train.max_length, vocab_size):
        report.add(row.outcome)
        if row.chat is None:
            continue
        if _is_held_out(row.conversation.id, recipe.train.held_out):
            held_out.append(row.chat)
        else:
            train.append(row.chat)
            counts.add(row.conversation.source, row.chat)
    notes = f"{path.name}: {report}"
    if not train:
        raise RecipeError(f"`answers.file` holds no trainable conversation ({notes}).")
    by_source = counts.finish()
    counts_V = sum(by_source.values())
    vocab = cached_vocab(cache_dir() / "vocab", train, tokenizer, counts_V, min(recipe.head.draft_vocab_size, vocab_size))
    coverage = {source: vocab.share_of(counted_V) for source, counted_V in by_source.items()}
    notes += f"\ndraft vocabulary: {describe_coverage(vocab, coverage)}"
    return Dataset(train, held_out, vocab, notes, coverage)


def describe_coverage(vocab: DraftVocab, by_source: dict[str, float], worst: int = 5) -> str:
    """Coverage overall and of the worst covered sources."""
    text = f"{len(vocab.ids_Vd)} tokens cover {vocab.coverage:.2%} of the answers' tokens"
    if len(by_source) > 1:
        lowest = sorted(by_source.items(), key=lambda pair: (pair[1], pair[0]))[:worst]
        text += f" (lowest: {', '.join(f'{source} {share:.2%}' for source, share in lowest)})"
    if vocab.filled:
        text += f"; {vocab.filled} of them never occur, the answers have fewer distinct tokens"
    return text


def _is_held_out(row_id: str, share: float) -> bool:
    """By a hash of the id, so that all answers to one prompt fall on the same side, whatever the order of the file."""
    return int(hashlib.sha1(row_id.encode()).hexdigest()[:8], 16) / 2**32 < share


class FeatureSource:
    """Features of chats: from the store, or from the target in the moment they are needed."""

    def __init__(self, target: FrozenTarget, settings: FeatureSettings):
        self.target, self.settings = target, settings
        stored = settings.mode == "store"
        self.store = FeatureStore(settings.folder, target_fingerprint(target), settings.dtype) if stored else None

    def check(self, rank: int, size: int) -> list[str]:
        """Find, name and drop damaged shards, this process's share of them; the caller synchronises before `prepare`."""
        if self.store is None or not self.settings.check:
            return []
        shards = self.store.totals()["shards"]
        with progress_bar("checking feature shards", shards // size) if shards else nullcontext(lambda count: None) as advance:
            faults = self.store.check(rank, size, advance)
        for fault in faults:
            print(f"features: {fault}", flush=True)
        unused, count = self.store.others()
        if rank == 0 and unused:
            print(f"features: {unused} shards ({describe_bytes(count)}) are of other settings; train/make_features.py --prune deletes them")
        return faults

    def prepare(self, chats: list[Encoded], rank: int, size: int, budget: int) -> None:
        """Compute what the store lacks, this process's share of it; the caller synchronises and calls `refresh`.

        `budget`: padded tokens in one forward of the target.
        """
        if self.store is None:
            return
        self.store.refresh()
        missing = [chat for chat in chats[rank::size] if chat not in self.store]  # shares first: others may be writing already
        missing.sort(key=lambda chat: chat.useful_length)
        if not missing:
            return
        with progress_bar("features", sum(chat.useful_length for chat in missing)) as advance:
            while missing:
                group = [missing.pop()]
                while missing and len(group) < 64 and (len(group) + 1) * group[0].useful_length <= budget:
                    group.append(missing.pop())
                for chat, features in zip(group, compute_features(self.target, group)):
                    self.store.put(chat, features)
                    advance(chat.useful_length, "tokens")
        self.store.flush()

    def get(self, chats: list[Encoded]) -> list[Features]:
        if self.store is None:
            return compute_features(self.target, chats)
        return [self.store.get(chat) for chat in chats]
