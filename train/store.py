"""A folder of target features, so that every token passes through the target once and not once per epoch.

    index.json                       what each shard holds, its size and its sha256
    features-<sha256>.safetensors    a few hundred conversations; named after its own content, memory-mapped when read

A conversation is found by a hash of its token ids and trained spans, and only in shards of the same target, auxiliary layers and dtype, so
a stale entry is never read. Shards are written under a temporary name, synced and renamed; the index changes under a lock in the same
moment. Several processes may write to one folder. Whatever breaks costs the shards it touches and no others (`check`).
"""

import fcntl
import hashlib
import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save

from train.feature_size import describe_bytes
from train.features import Features, pack, unpack
from train.masks import Encoded

SHARD_BYTES = 128 * 2**20
OPEN_SHARDS = 512
INDEX, PREFIX, TEMPORARY = "index.json", "features-", "tmp-"


class StoreError(ValueError):
    """One sentence: which folder, what is wrong, what to do."""


class FeatureStore:
    """`put` collects conversations, and writes a shard for every `SHARD_BYTES` of them; `flush` writes the rest; `get` reads."""

    def __init__(self, folder: str | Path, fingerprint: str, dtype: str = "fp8"):
        self.folder, self.settings = Path(folder), {"target": fingerprint, "dtype": dtype}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pending: dict[str, dict] = {}  # key -> tensors
        self._pending_bytes = self._pending_tokens = 0
        self._keys: dict[str, list[str]] = {}  # shard -> its conversations
        self._shard_of: dict[str, str] = {}
        self._open: OrderedDict[str, object] = OrderedDict()
        self.refresh()

    def __contains__(self, chat: Encoded) -> bool:
        key = conversation_key(chat)
        return key in self._shard_of or key in self._pending

    def get(self, chat: Encoded) -> Features:
        """Raises KeyError when the conversation is not in a shard."""
        key = conversation_key(chat)
        shard = self._shard(self._shard_of[key])
        names = ["aux", "final", "argmax"] + (["aux_exponent", "final_exponent"] if self.settings["dtype"] == "fp8" else [])
        return unpack({name: shard.get_tensor(f"{key}/{name}") for name in names})

    def put(self, chat: Encoded, features: Features) -> None:
        """Raises ValueError when a feature is not finite, StoreError when the disk is full."""
        packed = pack(features, self.settings["dtype"])
        self._pending[conversation_key(chat)] = packed
        self._pending_bytes += sum(tensor.nbytes for tensor in packed.values())
        self._pending_tokens += len(packed["aux"])
        if self._pending_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what `put` has collected as one shard. Raises StoreError when it cannot be written."""
        if not self._pending:
            return
        tensors = {f"{key}/{name}": tensor for key, packed in self._pending.items() for name, tensor in packed.items()}
        about = {**self.settings, "conversations": len(self._pending), "tokens": self._pending_tokens}
        content = save(tensors, {"about": json.dumps(about)})  # one field: safetensors writes several in random order
        digest = hashlib.sha256(content).hexdigest()
        name = f"{PREFIX}{digest[:32]}.safetensors"
        with self._written(content) as temporary, self._locked():
            os.replace(temporary, self.folder / name)
            self._write_index(self._read_index() | {name: {**about, "bytes": len(content), "sha256": digest}})
        self._pending, self._pending_bytes, self._pending_tokens = {}, 0, 0
        self.refresh()

    def refresh(self) -> None:
        """Notice what other processes have written or found damaged."""
        try:
            index = self._read_index()
        except StoreError:
            index = self._rebuild_index()
        mine = [name for name, row in index.items() if self._is_mine(row) and self._size(name) == row["bytes"]]
        self._keys = {name: self._keys.get(name) or _keys_of(self.folder / name) for name in mine}
        self._shard_of = {key: name for name, keys in self._keys.items() for key in keys}
        for name in set(self._open) - set(mine):
            del self._open[name]

    def check(self, part: int = 0, parts: int = 1, advance=lambda count: None) -> list[str]:
        """Read this part of the shards and compare sizes and checksums; forget what is damaged. -> one sentence for each fault.

        Part 0 also clears away what killed processes left behind. Refresh afterwards, in all processes.
        """
        faults = []
        for name, row in sorted(self._read_index().items())[part::parts]:
            fault = self._fault(name, row)
            if fault:
                self._forget(name)
                faults.append(f"{name} {fault}: its {row['conversations']} conversations are computed again")
            advance(1)
        return faults + (self._tidy() if part == 0 else [])

    def others(self) -> tuple[int, int]:
        """-> number and bytes of shards of another target, choice of layers or dtype."""
        rows = [row for row in self._read_index().values() if not self._is_mine(row)]
        return len(rows), sum(row["bytes"] for row in rows)

    def prune(self) -> None:
        """Delete those."""
        for name, row in self._read_index().items():
            if not self._is_mine(row):
                self._forget(name)

    def totals(self) -> dict[str, int]:
        """Shards, conversations, tokens and bytes of these settings."""
        rows = [row for name, row in self._read_index().items() if name in self._keys]
        return {"shards": len(rows)} | {name: sum(row[name] for row in rows) for name in ("conversations", "tokens", "bytes")}

    def _is_mine(self, row: dict) -> bool:
        return all(row[name] == value for name, value in self.settings.items())

    def _size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return (self.folder / name).stat().st_size
        return None

    def _fault(self, name: str, row: dict) -> str | None:
        size = self._size(name)
        if size is None:
            return "is missing"
        if size != row["bytes"]:
            return f"has {size} of {row['bytes']} bytes"
        return None if _sha256(self.folder / name) == row["sha256"] else "is damaged (its checksum differs)"

    def _shard(self, name: str):
        """An opened shard. Mappings are few: a store of terabytes has more shards than a process may map."""
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, "pt")
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

    @contextmanager
    def _written(self, content: bytes) -> Iterator[Path]:
        """A temporary file with this content, on disk. It is locked as long as its writer lives."""
        path = self.folder / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with open(path, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                yield path
        except OSError as error:
            raise StoreError(
                f"`features.folder` {self.folder}: a shard of {describe_bytes(len(content))} cannot be written ({error.strerror}); "
                "make room or choose another folder, what is written already stays."
            ) from None
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read_index(self) -> dict[str, dict]:
        """Raises StoreError when it is there and damaged."""
        path = self.folder / INDEX
        try:
            return {name: row for name, row in json.loads(path.read_text())["shards"].items() if _complete(row)}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path} is damaged ({error}); start again and it is rebuilt from the shards.") from None

    def _write_index(self, shards: dict[str, dict]) -> None:
        """Only under the lock."""
        temporary = self.folder / f"{INDEX}.new"
        temporary.write_text(json.dumps({"format": 1, "shards": shards}, indent=1))
        os.replace(temporary, self.folder / INDEX)

    def _rebuild_index(self) -> dict[str, dict]:
        with self._locked():
            with suppress(StoreError):
                return self._read_index()  # another process was faster
            found = {path.name: _describe_shard(path) for path in self.folder.glob(PREFIX + "*")}
            index = {name: row for name, row in found.items() if row}
            self._write_index(index)
        print(f"features: {INDEX} was damaged and is rebuilt from {len(index)} shards", flush=True)
        return index

    def _forget(self, name: str) -> None:
        with self._locked():
            self._write_index({other: row for other, row in self._read_index().items() if other != name})
            (self.folder / name).unlink(missing_ok=True)

    def _tidy(self) -> list[str]:
        """Shards that are not in the index (a process was killed between the two) are taken in if whole; dead temporary files go."""
        faults = []
        with self._locked():
            index = self._read_index()
            strays = [path for path in self.folder.glob(PREFIX + "*") if path.name not in index]
            for path in strays:
                row = _describe_shard(path)
                if row:
                    index[path.name] = row
                else:
                    path.unlink()
                    faults.append(f"{path.name} is incomplete: removed, its conversations are computed again")
            if strays:
                self._write_index(index)
        for path in self.folder.glob(TEMPORARY + "*"):
            with suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer is alive: leave it
                path.unlink()
                faults.append(f"{path.name} was left by a process that was killed while writing: removed")
        return faults


def conversation_key(chat: Encoded) -> str:
    """Of what the features depend on: the tokens that the target reads, and the spans that decide where its final state is kept."""
    ids = chat.ids[: chat.useful_length]
    return hashlib.sha256(f"{','.join(map(str, ids))};{chat.spans}".encode()).hexdigest()[:32]


def _complete(row: dict) -> bool:
    return {"target", "dtype", "conversations", "tokens", "bytes", "sha256"} <= row.keys()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(path: Path) -> dict:
    """A safetensors header: its length in 8 bytes, then JSON."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(min(length, path.stat().st_size)))


def _keys_of(path: Path) -> list[str]:
    try:
        return [name.removesuffix("/argmax") for name in _header(path) if name.endswith("/argmax")]
    except (OSError, ValueError):
        return []  # not a shard any more; `check` says so


def _describe_shard(path: Path) -> dict | None:
    """Its row of the index, or None when its content is not what its name promises."""
    digest = _sha256(path)
    if path.name != f"{PREFIX}{digest[:32]}.safetensors":
        return None
    about = json.loads(_header(path)["__metadata__"]["about"])
    return about | {"bytes": path.stat().st_size, "sha256": digest}
