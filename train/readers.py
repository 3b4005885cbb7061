"""A file or data set -> rows, one at a time. A row that cannot be parsed comes out with a reason and reading goes on behind it.

Known: JSONL, one JSON array, pretty-printed JSON (an array, or object after object), .txt (a prompt per line), parquet, each of the JSON
forms also as .gz or .zst, and `owner/name` or `owner/name:split` of the Hugging Face hub. What a file is, is told by its first bytes, so a
wrong suffix does no harm. UTF-8 with or without BOM, UTF-16 with BOM; LF, CRLF or CR; U+2028 is an ordinary character. Memory holds one row
and a read buffer, except that a damaged row in a JSON array may need the rest of the file.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20  # characters
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
FILE_SUFFIXES = (".json", ".jsonl", ".txt", ".parquet", ".gz", ".zst")


class SourceError(ValueError):
    """One sentence: which file or data set cannot be opened, and what to do."""


@dataclass(frozen=True)
class RawRow:
    """`number` is the line of a JSONL or text file, else the row's place, from 1. `fault` (a code of train/reasons.py) means no value."""

    number: int
    value: object = None
    fault: str = ""


def read_rows(source: str | Path) -> Iterator[RawRow]:
    """The rows of a file or hub data set. Raises SourceError when it cannot be opened at all."""
    path, name = Path(source), str(source)
    if path.is_file():
        yield from _read_file(path)
    elif path.is_dir():
        raise SourceError(f"{path} is a folder; name one file in it.")
    elif HUB_NAME.fullmatch(name) and not name.endswith(FILE_SUFFIXES):
        yield from _read_hub(name)
    else:
        raise SourceError(f"{path} does not exist; pass a JSON, JSONL, text or parquet file, or a hub name such as owner/name:split.")


def _read_file(path: Path) -> Iterator[RawRow]:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic == b"PAR1":
                yield from _read_parquet(path)
                return
            stream = _decompressed(file, magic, path)
            window = Window(_decoded(stream, path))
            if ".txt" in path.suffixes:
                yield from ((RawRow(row.number, {"prompt": row.value.strip()}) if not row.fault else row) for row in _lines(window))
            elif _is_line_per_row(window):
                yield from _read_jsonl(window)
            else:
                yield from _read_values(window)
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error.strerror or error}); check the path and its permissions.") from None


def _decompressed(file, magic: bytes, path: Path):
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file)
    if magic == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError:
            raise SourceError(f"{path} is compressed with zstd; run pip install zstandard, or unpack it.") from None
        return io.BufferedReader(ZstdFrames(file, zstandard.ZstdDecompressor()))
    return file


class ZstdFrames(io.RawIOBase):
    """One zstd frame after the other. Unlike the library's own reader it raises EOFError when the last one is incomplete."""

    def __init__(self, file, decompressor):
        self.file, self.decompressor = file, decompressor
        self.frame, self.packed, self.ready = None, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.ready:
            self.packed = self.packed or self.file.read(1 << 16)
            if not self.packed and self.frame is None:
                return 0
            if not self.packed:
                raise EOFError("the last frame is incomplete")
            self.frame = self.frame or self.decompressor.decompressobj()
            self.ready = memoryview(self.frame.decompress(self.packed))
            self.packed = self.frame.unused_data if self.frame.eof else b""
            self.frame = None if self.frame.eof else self.frame
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


def _decoded(stream, path: Path) -> io.TextIOWrapper:
    """Text in which a byte that is not UTF-8 stays visible as a lone surrogate, so that it costs its own row only."""
    buffered = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
    try:
        encoding = "utf-16" if buffered.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    except DAMAGE:
        raise SourceError(f"{path} is damaged from its beginning; fetch it again.") from None
    return io.TextIOWrapper(buffered, encoding=encoding, errors="surrogateescape" if encoding == "utf-8-sig" else "surrogatepass")


def _damage() -> tuple:
    try:
        from zstandard import ZstdError
    except ImportError:
        return (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError)
    return (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, ZstdError)


DAMAGE = _damage()


class Window:
    """A sliding piece of a text: `text[pos:]` is what has been read and not used."""

    def __init__(self, stream):
        self.stream, self.text, self.pos = stream, "", 0
        self.ended = self.damaged = False
        self.grow()

    def grow(self) -> None:
        """Read more, at least as much as is held, so that repeated attempts on one long row stay linear."""
        held = self.text[self.pos :]
        try:
            more = self.stream.read(max(CHUNK, len(held)))
        except DAMAGE:
            more, self.damaged = "", True
        self.ended = not more
        self.text, self.pos = held + more, 0

    def line(self) -> str | None:
        """The next line with its line end, None at the end."""
        end = self.text.find("\n", self.pos)
        while end < 0 and not self.ended:
            searched = len(self.text) - self.pos
            self.grow()
            end = self.text.find("\n", searched)
        end = end + 1 if end >= 0 else len(self.text)
        line, self.pos = self.text[self.pos : end], end
        return line or None


def _is_line_per_row(window: Window) -> bool:
    """Looks at the first lines only; nothing is consumed."""
    while not window.text[window.pos :].strip() and not window.ended:
        window.grow()
    start = window.text[window.pos :].lstrip()
    first, _, rest = start.partition("\n")
    rest = rest.lstrip()
    if _is_value(first):
        return first[:1] != "[" or bool(rest)  # an array on one line is the file; several are rows
    if first[:1] == "[":
        return _is_value(rest.partition("\n")[0])  # a damaged first row; elements of an array have commas behind them
    if first.rstrip() == "{":
        return rest[:1] == "{"
    try:  # an object whose first line also holds its first field, or several objects on a line
        _, end = DECODER.raw_decode(start)
        return "\n" not in start[:end] and start[end:].lstrip(" \t")[:1] != "{"
    except (ValueError, RecursionError):
        return True


def _is_value(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


DECODER = json.JSONDecoder(strict=False)  # a raw tab inside a string does no harm


def _lines(window: Window) -> Iterator[RawRow]:
    """Lines that are not blank; `value` is the text with its line end."""
    number = 0
    while (line := window.line()) is not None:
        number += 1
        if line.strip():
            yield RawRow(number, line) if _is_utf8(line) else RawRow(number, fault="bad-utf8")
    if window.damaged:
        yield RawRow(number + 1, fault="damaged-stream")


def _read_jsonl(window: Window) -> Iterator[RawRow]:
    for row in _lines(window):
        if row.fault:
            yield row
            continue
        try:
            yield RawRow(row.number, DECODER.decode(row.value.strip()))
        except (ValueError, RecursionError) as error:
            cut = not row.value.endswith("\n") and _is_incomplete(error, len(row.value))
            yield RawRow(row.number, fault="cut-off" if cut else "bad-json")


def _read_values(window: Window) -> Iterator[RawRow]:
    """The elements of one array, or values one after the other."""
    number, in_array, prefix = 0, False, None
    while True:
        _skip(window, " \t\r\n" + ("," if number else ""))
        if window.pos == len(window.text):
            break
        if number == 0 and not in_array and window.text[window.pos] == "[":
            in_array = True
            window.pos += 1
            continue
        if in_array and window.text[window.pos] == "]":
            window.pos += 1
            _skip(window, " \t\r\n")
            if window.pos < len(window.text):
                yield RawRow(number + 1, fault="bad-json")
            return
        number += 1
        row, failed = _read_value(window, number, prefix)
        prefix = prefix or failed
        yield row
    if window.damaged:
        yield RawRow(number + 1, fault="damaged-stream")


def _skip(window: Window, characters: str) -> None:
    while True:
        rest = window.text[window.pos : window.pos + 64]
        window.pos += len(rest) - len(rest.lstrip(characters))
        if rest.strip(characters) or (not rest and window.ended):
            return
        if window.pos == len(window.text):
            window.grow()


def _read_value(window: Window, number: int, prefix: str | None) -> tuple[RawRow, str]:
    """One value from the window, which moves behind it -> (row, how this row begins). `prefix` is how the first row began."""
    while True:
        try:
            value, end = DECODER.raw_decode(window.text, window.pos)
        except (ValueError, RecursionError) as error:
            incomplete = _is_incomplete(error, len(window.text))
            if incomplete and not window.ended:
                window.grow()
                continue
            begins = prefix or _beginning(window.text, window.pos)
            found = _next_row(window, begins)
            return RawRow(number, fault="cut-off" if incomplete and not found else "bad-json"), begins
        if end == len(window.text) and not window.ended:
            window.grow()
            continue
        source, begins = window.text[window.pos : end], prefix or _beginning(window.text, window.pos)
        window.pos = end
        return (RawRow(number, value) if _is_utf8(source) else RawRow(number, fault="bad-utf8")), begins


def _beginning(text: str, start: int) -> str:
    """What a later row can be found by: the line end, indentation and brace, or in a one-line array the brace and first key."""
    line = text.rfind("\n", 0, start)
    if line >= 0 and not text[line:start].strip():
        return text[line : start + 1]
    return text[start : text.find(":", start) + 1] or text[start : start + 1]


def _next_row(window: Window, begins: str) -> bool:
    """Move behind a row that cannot be parsed: to the next that begins as rows of this file do, else to the end."""
    while (found := window.text.find(begins, window.pos + 1)) < 0:
        if window.ended:
            window.pos = len(window.text)
            return False
        window.grow()
    window.pos = found + len(begins) - len(begins.lstrip())
    return True


def _is_incomplete(error: Exception, length: int) -> bool:
    """Could more text have helped? Unterminated strings are reported at their beginning, the rest where the text ends."""
    return isinstance(error, json.JSONDecodeError) and (error.msg.startswith("Unterminated string") or error.pos >= length - 8)


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(path: Path) -> Iterator[RawRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SourceError(f"{path} is a parquet file; run pip install pyarrow, or convert it to JSONL.") from None
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{path} is not a readable parquet file ({' '.join(str(error).split())[:120]}); fetch it again.") from None
    try:
        for batch in file.iter_batches(batch_size=256):
            for index in range(batch.num_rows):
                number += 1
                try:
                    yield RawRow(number, batch.slice(index, 1).to_pylist()[0])
                except UnicodeDecodeError:
                    yield RawRow(number, fault="bad-utf8")
    except (pyarrow.ArrowException, OSError):
        yield RawRow(number + 1, fault="damaged-stream")


def _read_hub(name: str) -> Iterator[RawRow]:
    repository, _, split = name.partition(":")
    try:
        import datasets
    except ImportError:
        raise SourceError(f"{name} is no file; to read it from the hub run pip install datasets, or download a file of it.") from None
    try:
        rows = datasets.load_dataset(repository, split=split or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield RawRow(number, row)
    except Exception as error:  # the library raises its own, the hub client's and the network's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:160]
        raise SourceError(f"{name} is no file and cannot be read from the hub ({reason}); check the name, or pass a file.") from None
