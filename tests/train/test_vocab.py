import random
from collections import Counter

import pytest
import torch

from train.masks import Encoded
from train.vocab import build_vocab, count_supervised, special_token_ids


@pytest.mark.parametrize("seed", range(20))
def test_vocab_is_the_commonest_tokens_and_the_pinned(seed):
    rng = random.Random(seed)
    total, size = rng.randint(10, 60), 0
    pinned = set(rng.sample(range(total), 3))
    size = rng.randint(len(pinned), total)
    chats = [Encoded([rng.randrange(total // 2) for _ in range(30)], [(5, 12), (20, 30)]) for _ in range(4)]
    counted = Counter(token for chat in chats for a, b in chat.spans for token in chat.ids[a:b])
    vocab = build_vocab(count_supervised(chats, total), size, pinned)
    others = sorted(set(range(total)) - pinned, key=lambda token: (-counted[token], token))
    chosen = sorted(pinned | set(others[: size - len(pinned)]))
    assert vocab.ids_Vd.tolist() == chosen
    assert (vocab.d2t_Vd + torch.arange(size)).tolist() == chosen and vocab.d2t_Vd.dtype == torch.int64
    assert vocab.t2d_V.nonzero()[:, 0].tolist() == chosen and vocab.t2d_V.dtype == torch.bool
    assert vocab.coverage == pytest.approx(sum(counted[token] for token in chosen) / sum(counted.values()))


def test_fewer_distinct_tokens_than_asked_are_filled_with_the_lowest_unused_ids():
    vocab = build_vocab(count_supervised([Encoded([9, 9, 7], [(0, 3)])], 12), 6, {11})
    assert vocab.ids_Vd.tolist() == [0, 1, 2, 7, 9, 11]


@pytest.mark.parametrize("size", [0, 1, 13])
def test_impossible_size_names_the_range(size):
    with pytest.raises(ValueError, match=f"draft_vocab_size is {size}; choose a value from 2 "):
        build_vocab(torch.zeros(12, dtype=torch.long), size, {3, 4})


def test_specials_and_bytes_are_pinned(target_dir):
    """A vocabulary counted on English still reaches every other text, byte by byte."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    pinned = special_token_ids(tokenizer)
    assert {0, 1, 2} <= pinned
    alphabet = {token for token, index in tokenizer.get_vocab().items() if len(token) == 1 and index in pinned}
    assert len(alphabet) > 200  # bytes that no UTF-8 text holds have no token
    for text in ("mañana será otro día", "🦉 ночь 夜"):
        for piece in tokenizer.tokenize(text):
            assert all(character in alphabet for character in piece)
