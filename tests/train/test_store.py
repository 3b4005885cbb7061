"""The feature store: nothing is lost, nothing stale is read, and damage costs what it touches."""

import json
import multiprocessing
import os
import re
import signal

import pytest
import torch

from tests.train.toy import VOCAB, toy_features, toy_target
from train.dataset import FeatureSource
from train.feature_size import bytes_per_token, feature_bytes
from train.features import Features, compute_features, pack, predicting, target_fingerprint, unpack
from train.masks import Encoded
from train.recipe import FeatureSettings
from train.store import INDEX, PREFIX, TEMPORARY, FeatureStore, StoreError
from train.target import FrozenTarget

SPANS = [(3, 7), (9, 15)]


def chats(count: int, length: int = 16) -> list[Encoded]:
    generator = torch.Generator().manual_seed(4)
    return [Encoded(torch.randint(3, VOCAB, (length + i,), generator=generator).tolist(), SPANS) for i in range(count)]


@pytest.fixture(scope="module")
def target():
    return toy_target(torch.float32)


def filled(folder, target, dtype="bf16", some=None) -> FeatureStore:
    """Three shards of two conversations each."""
    store = FeatureStore(folder, target_fingerprint(target), dtype)
    for number, chat in enumerate(some or chats(6)):
        store.put(chat, toy_features(target, chat))
        if number % 2:
            store.flush()
    return store


def shards(folder) -> list:
    return sorted(folder.glob(PREFIX + "*"))


def present(store) -> list[bool]:
    store.refresh()
    return [chat in store for chat in chats(6)]


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 0.0), ("bf16", 2**-8), ("fp8", 2**-4)])
def test_what_was_put_is_read_back(tmp_path, target, dtype, tolerance):
    filled(tmp_path, target, dtype)
    again = FeatureStore(tmp_path, target_fingerprint(target), dtype)
    for chat in chats(6):
        found, exact = again.get(chat), toy_features(target, chat)
        for name in ("aux_TF", "final_PH"):
            got, want = getattr(found, name).float(), getattr(exact, name)
            # a number is off by its own rounding, or by the smallest step of its vector
            largest = want.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
            assert ((got - want).abs() <= tolerance * want.abs() + (largest * 2**-17 if dtype == "fp8" else 0)).all(), name
        assert found.argmax_P.tolist() == exact.argmax_P.tolist()
        assert len(found.aux_TF) == chat.useful_length and len(found.final_PH) == len(predicting(chat)) == chat.predicted


def test_fp8_survives_single_huge_channels_zeros_and_extremes():
    x_TF = torch.randn(5, 48) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 1.0])[:, None]
    x_TF[4, 3] = 3000.0  # one channel two thousand times the rest
    packed = pack(Features(x_TF, x_TF[:, :16], torch.zeros(5)), "fp8")
    assert packed["aux"].dtype == torch.float8_e4m3fn and packed["aux_exponent"].shape == (5, 3)
    back = unpack(packed).aux_TF
    assert back.dtype == torch.bfloat16 and torch.equal(back[3], torch.zeros(48).bfloat16())
    assert ((back - x_TF).norm(dim=1) <= 0.04 * x_TF.norm(dim=1)).all()
    small = torch.tensor([channel for channel in range(16) if channel != 3])
    assert (back[4, small] - x_TF[4, small]).norm() < 0.05 * x_TF[4, small].norm()  # the huge channel does not drown its neighbours
    exact = x_TF.to(torch.float8_e4m3fn).float()[1]  # numbers that fp8 holds come back unchanged
    assert torch.equal(unpack(pack(Features(exact[None], exact[None, :16], torch.zeros(1)), "fp8")).aux_TF[0].float(), exact)


def test_features_that_are_not_finite_are_refused(target, tmp_path):
    features = toy_features(target, chats(1)[0])
    features.aux_TF[2, 5] = float("nan")
    with pytest.raises(ValueError, match="aux features hold infinite or undefined"):
        FeatureStore(tmp_path, "x").put(chats(1)[0], features)


@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp32"])
def test_the_size_is_known_beforehand(tmp_path, dtype):
    wide = toy_target(torch.float32, hidden=256)
    some = [Encoded(list(range(3, 40)) * 4, [(20, 60), (90, 120 + i)]) for i in range(6)]
    filled(tmp_path, wide, dtype, some)
    size = sum(path.stat().st_size for path in shards(tmp_path))
    counts = sum(chat.useful_length for chat in some), sum(chat.predicted for chat in some)
    expected = feature_bytes(256, *counts, 6, dtype)
    print(dtype, size, expected / size)
    assert expected == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("hidden", [576, 4096, 8192])
def test_fp8_takes_at_most_half_of_four_bf16_vectors(hidden):
    for share in (0.1, 0.5, 0.9):
        assert bytes_per_token(hidden, share, "fp8") < 0.5 * 8 * hidden


def damage_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_header(path):
    content = bytearray(path.read_bytes())
    content[4] ^= 1  # the header's length is now astronomical
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "harm, reason",
    [(damage_bit, "is damaged"), (damage_header, "is damaged"), (cut, r"has \d+ of \d+ bytes"), (os.unlink, "is missing")],
)
def test_a_damaged_shard_is_named_and_only_it_is_done_again(tmp_path, target, harm, reason, capsys):
    filled(tmp_path, target)
    victim = shards(tmp_path)[1]
    before = {path: path.stat().st_mtime_ns for path in shards(tmp_path) if path != victim}
    harm(victim)
    source = FeatureSource(target, FeatureSettings(folder=tmp_path, dtype="bf16"))
    source.check(0, 1)
    source.store.refresh()
    assert sum(chat in source.store for chat in chats(6)) == 4
    assert re.search(f"features: {victim.name} {reason}.*: its 2 conversations are computed again", capsys.readouterr().out)
    source.prepare(chats(6), 0, 1, 1000)
    assert all(present(source.store)) and {path: path.stat().st_mtime_ns for path in before} == before
    assert source.store.check() == []
    for chat in chats(6):
        torch.testing.assert_close(source.get([chat])[0].aux_TF.float(), toy_features(target, chat).aux_TF, rtol=0.01, atol=0.01)


def test_sizes_are_checked_even_without_checksums(tmp_path, target):
    filled(tmp_path, target)
    cut(shards(tmp_path)[0])
    source = FeatureSource(target, FeatureSettings(folder=tmp_path, dtype="bf16", check=False))
    source.check(0, 1)
    source.prepare(chats(6), 0, 1, 1000)
    assert all(present(source.store))


@pytest.mark.parametrize("harm", [lambda path: path.write_text("{"), lambda path: path.write_text('{"shards": 3}'), os.unlink])
def test_a_damaged_or_lost_index_is_rebuilt_from_whole_shards(tmp_path, target, harm):
    filled(tmp_path, target)
    damage_bit(shards(tmp_path)[2])
    harm(tmp_path / INDEX)
    store = FeatureStore(tmp_path, target_fingerprint(target), "bf16")
    store.check()
    assert sum(present(store)) == 4 and len(json.loads((tmp_path / INDEX).read_text())["shards"]) == 2


def test_other_targets_layers_dtypes_masks_and_tokens_are_not_mixed_up(tmp_path, target):
    store = filled(tmp_path, target)
    first = chats(6)[0]
    assert first in store
    assert Encoded(first.ids, [(3, 7), (8, 15)]) not in store
    assert Encoded([*first.ids[:5], 1, *first.ids[6:]], SPANS) not in store
    assert Encoded([*first.ids[:14], 1, *first.ids[15:]], SPANS) in store  # the last trained token is predicted, never read
    other = toy_target(torch.float32)
    with torch.no_grad():
        other.model.model.layers[3].mlp.up_proj.weight[0, 0] += 1.0
    for fingerprint, dtype in (
        (target_fingerprint(FrozenTarget(target.model, (1, 2, 3))), "bf16"),
        (target_fingerprint(other), "bf16"),
        (target_fingerprint(target), "fp8"),
    ):
        assert first not in FeatureStore(tmp_path, fingerprint, dtype)
    changed = filled(tmp_path, target, "fp8")
    count, size = changed.others()
    assert count == 3 and size == sum(path.stat().st_size for path in shards(tmp_path)) - changed.totals()["bytes"]
    changed.prune()
    changed.refresh()
    assert len(shards(tmp_path)) == 3 and all(chat in changed for chat in chats(6)) and changed.others() == (0, 0)


def write_until_killed(folder, at):
    """Ends as `kill -9` would, between two system calls of `flush`."""
    real = getattr(os, at)

    def die(*args, **kwargs):
        if at == "replace":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    target = toy_target(torch.float32)
    store = FeatureStore(folder, target_fingerprint(target), "bf16")
    store.put(chats(6)[0], toy_features(target, chats(6)[0]))
    setattr(os, at, die)
    store.flush()


@pytest.mark.parametrize("at, survives", [("fsync", False), ("replace", True)])
def test_a_process_killed_in_mid_write_leaves_nothing_that_is_read(tmp_path, target, at, survives):
    """Before the rename the shard does not exist; between rename and index it is whole, and taken in."""
    filled(tmp_path, target, some=chats(6)[2:])
    process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(tmp_path, at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    store = FeatureStore(tmp_path, target_fingerprint(target), "bf16")
    assert present(store) == [False] * 2 + [True] * 4
    faults = store.check()
    assert present(store) == [survives, False] + [True] * 4
    assert [bool(faults), any(tmp_path.glob(TEMPORARY + "*"))] == [not survives, False]
    assert survives or "killed while writing" in faults[0]


def write_some(folder, numbers):
    target = toy_target(torch.float32)
    store = FeatureStore(folder, target_fingerprint(target), "bf16")
    for number in numbers:
        store.put(chats(24)[number], toy_features(target, chats(24)[number]))
        store.flush()


def test_two_processes_write_into_one_folder(tmp_path, target):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_some, args=(tmp_path, range(start, 24, 2))) for start in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store = FeatureStore(tmp_path, target_fingerprint(target), "bf16")
    assert all(chat in store for chat in chats(24)) and store.totals()["shards"] == 24 and store.check() == []


def test_a_temporary_file_whose_writer_lives_is_left_alone(tmp_path, target):
    store = filled(tmp_path, target)
    with store._written(b"half a shard") as path:
        assert FeatureStore(tmp_path, target_fingerprint(target), "bf16").check() == [] and path.exists()
    assert not path.exists()


def test_a_full_disk_is_one_sentence_and_what_is_there_stays(tmp_path, target, monkeypatch):
    store = filled(tmp_path, target, some=chats(6)[:4])

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store.put(chats(6)[5], toy_features(target, chats(6)[5]))
    with pytest.raises(
        StoreError, match=r"`features.folder` .*: a shard of [\d.]+ kB cannot be written \(No space left on device\)"
    ) as caught:
        store.flush()
    assert "\n" not in str(caught.value) and not list(tmp_path.glob(TEMPORARY + "*"))
    assert present(store)[:4] == [True] * 4


def test_shares_of_two_processes_are_everything_once(tmp_path, target):
    sources = [FeatureSource(target, FeatureSettings(folder=tmp_path, dtype="bf16")) for _ in range(2)]
    todo = chats(7)
    for rank, source in enumerate(sources):
        source.check(rank, 2)
    taken = []
    for rank, source in enumerate(sources):
        source.store.put = lambda chat, features, keep=taken: keep.append(tuple(chat.ids))
        source.prepare(todo, rank, 2, 40)
    assert sorted(taken) == sorted(tuple(chat.ids) for chat in todo)


def test_a_batch_of_the_target_gives_each_conversation_its_own_features(target):
    mixed = [Encoded(chat.ids[: 10 + 2 * i], [(2, 9 + i)]) for i, chat in enumerate(chats(4))]
    for chat, together in zip(mixed, compute_features(target, mixed)):
        alone = compute_features(target, [chat])[0]
        torch.testing.assert_close(together.aux_TF, alone.aux_TF)
        torch.testing.assert_close(together.final_PH, alone.final_PH)
        assert together.argmax_P.tolist() == alone.argmax_P.tolist()
