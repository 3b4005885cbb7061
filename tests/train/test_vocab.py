import random
from collections import Counter

import pytest
import torch

from tests.train.chat_templates import tokenizer_for
from train.masks import Encoded
from train.vocab import MOST_SOURCES, SourceCounts, build_vocab, cached_vocab, count_supervised, special_token_ids, vocab_from_d2t


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
    assert vocab.filled == sum(counted[token] == 0 and token not in pinned for token in chosen)


def test_fewer_distinct_tokens_than_asked_are_filled_with_the_lowest_unused_ids():
    vocab = build_vocab(count_supervised([Encoded([9, 9, 7], [(0, 3)])], 12), 6, {11})
    assert vocab.ids_Vd.tolist() == [0, 1, 2, 7, 9, 11] and vocab.filled == 3 and vocab.coverage == 1


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


@pytest.mark.parametrize("name", ["qwen3", "gemma", "mistral", "phi", "deepseek-r1"])
def test_end_of_turn_and_thinking_marks_are_pinned_reserved_places_are_not(name):
    import copy

    from tests.train.chat_templates import FAMILIES

    tokenizer = copy.deepcopy(tokenizer_for(name))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<unused17>", "<|reserved_special_token_3|>", "<image>"], special_tokens=True)
    pinned, ids = special_token_ids(tokenizer), tokenizer.get_vocab()
    family = FAMILIES[name]
    for text in (family.eos, family.end, *family.extra, "<tool_call>", "</tool_call>"):
        assert ids[text] in pinned, text
    assert pinned.isdisjoint(ids[text] for text in ("<unused17>", "<|reserved_special_token_3|>", "<image>"))
    if family.sentencepiece:
        assert {ids[f"<0x{value:02X}>"] for value in range(256)} <= pinned


def chats_of(rng: random.Random, count: int) -> list[Encoded]:
    return [Encoded([rng.randrange(300) for _ in range(20)], [(3, 11), (12, 20)]) for _ in range(count)]


def test_counts_by_source_add_up_and_many_sources_share_a_place():
    rng = random.Random(0)
    chats = chats_of(rng, 200)
    sources = [rng.choice(["a", "b"]) for _ in chats[:100]] + [f"https://example.org/{i}" for i in range(100)]
    counts = SourceCounts(300)
    for source, chat in zip(sources, chats):
        counts.add(source, chat)
    found = counts.finish()
    assert torch.equal(sum(found.values()), count_supervised(chats, 300)) and len(found) == MOST_SOURCES + 1
    for name in ("a", "b"):
        own = [chat for source, chat in zip(sources, chats) if source == name]
        assert torch.equal(found[name], count_supervised(own, 300))
    vocab = build_vocab(sum(found.values()), 50, set())
    covered = {name: vocab.share_of(counts_V) * counts_V.sum().item() for name, counts_V in found.items()}
    assert sum(covered.values()) == pytest.approx(vocab.coverage * sum(found.values()).sum().item())


def test_the_cache_is_kept_for_its_key_and_for_nothing_else(tmp_path):
    import copy

    tokenizer = tokenizer_for("chatml")
    total = len(tokenizer)
    chats = chats_of(random.Random(1), 30)
    counts_V = count_supervised(chats, total)

    def derive(chats=chats, tokenizer=tokenizer, size=300):
        return cached_vocab(tmp_path, chats, tokenizer, count_supervised(chats, total), size)

    first = derive()
    (file,) = tmp_path.iterdir()
    assert torch.equal(first.ids_Vd, build_vocab(counts_V, 300, special_token_ids(tokenizer)).ids_Vd)
    # A run that is resumed reads what the first one wrote: what is in the file wins over what would be derived today.
    from safetensors.torch import load_file, save_file

    kept = load_file(file)
    other = torch.arange(5, 305) - torch.arange(300)
    save_file({"d2t": other}, file, metadata={"filled": "0"})
    again = derive()
    assert again.ids_Vd.tolist() == list(range(5, 305)) and again.coverage == pytest.approx(again.share_of(counts_V))
    save_file(kept, file, metadata={"filled": str(first.filled)})
    assert torch.equal(derive().ids_Vd, first.ids_Vd) and derive().filled == first.filled

    changed = copy.deepcopy(tokenizer)
    changed.chat_template += " "
    derive(chats=chats[1:]), derive(tokenizer=changed), derive(size=310)
    assert len(list(tmp_path.iterdir())) == 4
    file.write_bytes(b"damaged")
    assert torch.equal(derive().ids_Vd, first.ids_Vd)


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_cache(tmp_path):
    (tmp_path / "file").write_text("")
    tokenizer, chats = tokenizer_for("chatml"), chats_of(random.Random(1), 5)
    vocab = cached_vocab(tmp_path / "file" / "vocab", chats, tokenizer, count_supervised(chats, len(tokenizer)), 300)
    assert len(vocab.ids_Vd) == 300


def test_a_warm_start_keeps_the_vocabulary_of_its_head():
    counts_V = count_supervised([Encoded([9, 9, 7, 3], [(0, 4)])], 12)
    vocab = vocab_from_d2t(build_vocab(counts_V, 6, {11}).d2t_Vd, 12, counts_V * 0 + torch.eye(12, dtype=torch.long)[3])
    assert vocab.ids_Vd.tolist() == build_vocab(counts_V, 6, {11}).ids_Vd.tolist() and vocab.coverage == 1
    for wrong in ([0, 0, -2], [5, 0, 0], [-1, 0, 0], [0, 0, 9], []):  # twice, descending, negative, beyond, none
        with pytest.raises(ValueError, match="does not hold ascending offsets into the target's 11 tokens"):
            vocab_from_d2t(torch.tensor(wrong, dtype=torch.long), 11, counts_V[:11])
