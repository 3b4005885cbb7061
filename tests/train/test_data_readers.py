"""Files as they come: every form of JSON, damaged in every way, compressed, in odd encodings, parquet, the hub."""

import gzip
import json
import random
import sys
import types

import pytest

from train.readers import SourceError, read_rows

ROWS = [
    {"id": i, "messages": [{"role": "user", "content": f'q{i} {{["\\ é🦉\u2028'}, {"role": "assistant", "content": "a\n"}]}
    for i in range(5)
]


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


FORMS = {
    "jsonl": jsonl(ROWS),
    "jsonl without last newline": jsonl(ROWS)[:-1],
    "jsonl with blank lines": jsonl(ROWS).replace("\n", "\n\n  \n"),
    "array": json.dumps(ROWS),
    "array without escapes": json.dumps(ROWS, ensure_ascii=False),
    "pretty array": json.dumps(ROWS, indent=2, ensure_ascii=False),
    "pretty objects": "\n".join(json.dumps(row, indent=1) for row in ROWS),
    "objects whose first line holds a field": "\n".join(json.dumps(row, indent=1).replace("{\n", "{", 1) for row in ROWS),
    "objects on one line": " ".join(json.dumps(row) for row in ROWS),
    "array of one": json.dumps(ROWS[:1]),
    "jsonl of one": jsonl(ROWS[:1]),
}
ENCODINGS = {
    "utf-8": lambda text: text.encode(),
    "BOM": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "utf-16": lambda text: text.encode("utf-16"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "zstd": lambda text: pytest.importorskip("zstandard").compress(text.encode()),
}


def read(tmp_path, data: bytes, name="file"):
    path = tmp_path / name
    path.write_bytes(data)
    return list(read_rows(path))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_encoding_gives_the_rows(tmp_path, form, encoding):
    rows = read(tmp_path, ENCODINGS[encoding](FORMS[form]))
    expected = ROWS[:1] if form.endswith("of one") else ROWS
    assert [row.value for row in rows] == expected and not any(row.fault for row in rows)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("form", FORMS)
def test_rows_longer_than_the_read_buffer(tmp_path, monkeypatch, form, chunk):
    monkeypatch.setattr("train.readers.CHUNK", chunk)
    rows = read(tmp_path, FORMS[form].encode())
    if form not in ("objects whose first line holds a field", "objects on one line"):  # told apart by what the first buffer shows
        assert [row.value for row in rows] == (ROWS[:1] if form.endswith("of one") else ROWS)


@pytest.mark.parametrize("form", ["jsonl", "array", "pretty array", "pretty objects"])
@pytest.mark.parametrize("cut", range(1, 400, 23))
def test_a_file_cut_anywhere_keeps_what_is_whole_and_names_the_rest(tmp_path, form, cut):
    data = FORMS[form].encode()
    rows = read(tmp_path, data[:-cut])
    whole = [row.value for row in rows if not row.fault]
    assert whole == ROWS[: len(whole)]
    assert [row.fault for row in rows if row.fault] in ([], ["cut-off"], ["bad-utf8"])
    assert len(rows) == len(ROWS) or len(whole) < len(ROWS)


@pytest.mark.parametrize("form", ["jsonl", "array", "pretty array", "pretty objects"])
@pytest.mark.parametrize("damage", ['"id": 2', '"role": "user", "content": "q2'])
def test_a_damaged_row_costs_itself_only(tmp_path, form, damage):
    """A missing quote or a stray word: the rows behind it are read."""
    text = FORMS[form]
    at = text.index("q2") if "q2" in damage else text.index('"id": 2')
    broken = text[:at] + ("oops " if "q2" not in damage else "") + text[at:].replace('"', "", 1)
    rows = read(tmp_path, broken.encode())
    good = [row.value for row in rows if not row.fault]
    assert [row for row in ROWS if row["id"] != 2] == [row for row in good if row in ROWS and row["id"] != 2]
    assert {row.fault for row in rows} >= {"bad-json"} or good[2] != ROWS[2]


def test_bytes_that_are_not_utf8_cost_one_row(tmp_path):
    for form in ("jsonl", "pretty array", "array without escapes"):
        rows = read(tmp_path, FORMS[form].encode().replace(b"q2 {[", b"q2 \xff{["))
        assert [row.fault for row in rows] == ["", "", "bad-utf8", "", ""]


def test_text_files_and_their_names(tmp_path):
    assert [row.value for row in read(tmp_path, "first\n\n second \u2028x\r\n".encode(), "p.txt")] == [
        {"prompt": "first"},
        {"prompt": "second \u2028x"},
    ]
    assert [row.value for row in read(tmp_path, gzip.compress(b"one\ntwo"), "p.txt.gz")] == [{"prompt": "one"}, {"prompt": "two"}]
    assert read(tmp_path, b"") == [] and read(tmp_path, b"\n \n") == [] and read(tmp_path, b"[]") == []


def test_a_compressed_file_cut_short_gives_its_whole_rows_and_a_reason(tmp_path):
    rng = random.Random(0)
    rows = [{"id": i, "text": "".join(rng.choices("abcdefgh ", k=300))} for i in range(1500)]
    for name, data in (
        ("gzip", gzip.compress(jsonl(rows).encode())),
        ("zstd", pytest.importorskip("zstandard").compress(jsonl(rows).encode())),
    ):
        found = read(tmp_path, data[: len(data) // 2])
        good = [row.value for row in found if not row.fault]
        assert good == rows[: len(good)] and {row.fault for row in found if row.fault} <= {"bad-json", "cut-off", "damaged-stream"}, name
        assert len(found) > len(good), name


def test_parquet_with_nulls_and_mixed_keys(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = [
        {"id": "1", "conversations": [{"from": "human", "value": "Hi", "role": None}, {"from": "gpt", "value": "Hello.", "role": None}]},
        {"id": "2", "conversations": [{"from": None, "value": "Hi", "role": "user"}]},
        {"id": "3", "conversations": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert [row.value for row in read_rows(tmp_path / "x.parquet")] == rows
    damaged = (tmp_path / "x.parquet").read_bytes()
    with pytest.raises(SourceError, match="not a readable parquet file"):
        read(tmp_path, damaged[: len(damaged) // 2])


def test_missing_files_folders_and_names_are_one_sentence(tmp_path):
    for source, text in ((tmp_path / "no.jsonl", "does not exist"), (tmp_path, "is a folder"), ("nosuch/file.json", "does not exist")):
        with pytest.raises(SourceError, match=text) as error:
            list(read_rows(source))
        assert "\n" not in str(error.value)


def test_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        if name == "no/net":
            raise ConnectionError("Couldn't reach the hub\nwith a long story")
        return iter([{"a": 1}, {"a": 2}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert [(row.number, row.value) for row in read_rows("own-er/na.me:train_sft")] == [(1, {"a": 1}), (2, {"a": 2})]
    assert [row.value for row in read_rows("owner/name")] == [{"a": 1}, {"a": 2}]
    assert asked == [("own-er/na.me", "train_sft", True), ("owner/name", "train", True)]
    with pytest.raises(SourceError, match=r"^no/net is no file and cannot be read from the hub \(Couldn't reach the hub\); check the name"):
        list(read_rows("no/net"))


def test_the_hub_without_its_library_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match="pip install datasets"):
        list(read_rows("owner/name"))


@pytest.mark.parametrize("seed", range(60))
def test_no_damage_raises_or_hangs(tmp_path, seed):
    """Random bytes changed, removed or doubled anywhere: every row that comes out is a value or has a known reason."""
    rng = random.Random(seed)
    data = bytearray(rng.choice([FORMS[form].encode() for form in FORMS] + [gzip.compress(FORMS["jsonl"].encode())]))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(data))
        change = rng.choice(["set", "delete", "double", "cut"])
        if change == "set":
            data[place] = rng.randrange(256)
        elif change == "delete":
            del data[place : place + rng.randint(1, 20)]
        elif change == "double":
            data[place:place] = data[place : place + rng.randint(1, 40)]
        else:
            data = data[: max(place, 20)]
        data = data or bytearray(b"{")
    try:
        rows = read(tmp_path, bytes(data))
    except SourceError:
        return  # a compressed file without a beginning
    assert {row.fault for row in rows if row.fault} <= {"bad-json", "cut-off", "bad-utf8", "damaged-stream"}
    assert [row.number for row in rows] == sorted({row.number for row in rows})


def test_a_number_at_the_end_of_the_read_buffer_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("train.readers.CHUNK", 1)
    assert [row.value for row in read(tmp_path, b"[12345,\n 678]")] == [12345, 678]
