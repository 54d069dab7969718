"""Sources and the validation split."""

import gzip
import json
import lzma
import random
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from isles.train.text import Document, documents, fingerprint, split


def texts(source):
    return [document.text for document in documents(str(source))]


def some_documents(count, seed=0):
    draw = random.Random(seed)
    return [
        Document(f"{n}", "\n".join(str(draw.random()) for _ in range(1 + int(20 * draw.random()))))
        for n in range(count)
    ]


def sides(chosen, given):
    """(training texts, validation texts)."""
    found = list(chosen.sides(given))
    return [document.text for out, document in found if not out], [document.text for out, document in found if out]


# ---- the split


@pytest.mark.parametrize("count", [20, 100, 1000])
@pytest.mark.parametrize("fraction", [0.05, 0.2])
def test_split_is_a_partition_by_whole_documents(count, fraction):
    given = some_documents(count, seed=count)
    train, held_out = sides(split(given, fraction), given)
    assert train
    assert held_out
    assert sorted(train + held_out) == sorted(document.text for document in given)
    if count == 1000:
        assert 0.5 * fraction < len(held_out) / count < 1.5 * fraction


def test_a_document_keeps_its_side_when_others_come_go_and_are_renamed():
    given = some_documents(500)
    _, held_out = sides(split(given, 0.1), given)
    changed = [Document(f"moved/{document.name}", document.text) for document in given[100:] + some_documents(200, 7)]
    _, held_out_then = sides(split(changed, 0.1), changed)
    remaining = {document.text for document in given[100:]}
    assert {text for text in held_out if text in remaining} == {text for text in held_out_then if text in remaining}


def test_copies_of_a_document_are_on_one_side():
    given = some_documents(300)
    train, held_out = sides(split(given * 3, 0.1), given * 3)
    assert not set(train) & set(held_out)
    assert len(held_out) % 3 == 0


def test_one_document_is_split_at_a_line_near_its_end():
    given = [Document("one", "".join(f"line {n}\n" for n in range(1000)))]
    train, held_out = sides(split(given, 0.1), given)
    assert train[0] + held_out[0] == given[0].text
    assert held_out[0].startswith("line ")
    assert 0.08 < len(held_out[0]) / len(given[0].text) <= 0.1


def test_few_documents_lose_no_more_than_the_fraction():
    for seed in range(20):
        given = [Document(str(n), f"{seed} {n}\n" * 1000) for n in range(3)]
        train, held_out = sides(split(given, 0.05), given)
        whole = sum(len(document.text) for document in given)
        assert sum(map(len, train + held_out)) == whole
        assert 0 < sum(map(len, held_out)) <= 0.4 * whole  # a whole document only where its own score says so


def test_identical_documents_can_still_be_split():
    given = [Document(str(n), "the same\n" * 100) for n in range(5)]
    train, held_out = sides(split(given, 0.1), given)
    assert train
    assert held_out


def test_split_digest_is_of_the_content_in_order():
    given = some_documents(10)
    again = [Document("other", document.text) for document in given]
    assert split(given, 0.1).digest == split(again, 0.3).digest
    assert split(given, 0.1).digest != split(given[::-1], 0.1).digest
    assert split(given, 0.0).limit == 0
    with pytest.raises(ValueError, match=r"fraction=1\.0 .* from 0 to below 1"):
        split(given, 1.0)


# ---- sources


def test_standard_library_is_real_text_without_tests():
    found = list(documents("stdlib"))
    names = [document.name for document in found]
    assert names == sorted(names)
    assert "asyncio/events.py" in names
    assert not [name for name in names if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))]
    assert not [name for name in names if "_sysconfigdata" in name]
    assert sum(len(document.text) for document in found) > 5e6
    root = Path(sysconfig.get_path("stdlib"))
    assert dict(found)["asyncio/events.py"] == (root / "asyncio/events.py").read_text("utf-8")


def test_plain_text_is_cut_at_separator_lines(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("first\nstill first\n<|endoftext|>\n\n<|endoftext|>\r\nsecond <|endoftext|> inside é".encode())
    assert texts(file) == ["first\nstill first\n", "second <|endoftext|> inside é"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert texts(tmp_path / "a.txt") == ["hello"]


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_files_compressed_or_not(tmp_path, suffix, compress):
    rows = [{"text": "un"}, {"text": "", "n": 1}, {"text": "deux \ud800"}]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    (tmp_path / f"b.jsonl{suffix}").write_bytes(compress(lines.encode()))
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(b"plain\n<|endoftext|>\ntext"))
    assert texts(tmp_path / f"b.jsonl{suffix}") == ["un", "deux ?"]
    assert texts(tmp_path / f"a.txt{suffix}") == ["plain\n", "text"]
    assert texts(tmp_path) == ["plain\n", "text", "un", "deux ?"]


def test_folders_globs_and_lists_are_read_in_order(tmp_path):
    for name in ("c.txt", "a.txt", "sub/b.md", "image.png", ".hidden/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.txt", "c.txt", "sub/b.md"]
    assert texts(tmp_path / "*.txt") == ["a.txt", "c.txt"]
    assert texts(tmp_path / "**" / "*.md") == ["sub/b.md"]
    assert texts(f"{tmp_path}/c.txt, {tmp_path}/a.txt") == ["c.txt", "a.txt"]
    (tmp_path / "with,comma.txt").write_text("comma")
    assert texts(tmp_path / "with,comma.txt") == ["comma"]


def test_synthetic_text_is_deterministic_and_of_the_size_asked_for():
    once, again = list(documents("synthetic:0.2")), list(documents("synthetic:0.2"))
    assert once == again
    assert sum(len(document.text.encode()) for document in once) == 200_000
    assert len({document.text for document in once}) == len(once) > 10
    longer = list(documents("synthetic:0.3"))
    assert longer[: len(once) - 1] == once[:-1]


def test_parquet_is_read_by_column(tmp_path, monkeypatch):
    class Table:
        schema_arrow = types.SimpleNamespace(names=["id", "text"])

        def __init__(self, file):
            assert file.read() == b"PAR1"

        def iter_batches(self, columns):
            assert columns == ["text"]
            for part in (["a", None], ["b"]):
                yield types.SimpleNamespace(column=lambda n, part=part: types.SimpleNamespace(to_pylist=lambda: part))

    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", types.SimpleNamespace(ParquetFile=Table))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert texts(tmp_path / "a.parquet") == ["a", "b"]
    (tmp_path / "b.parquet.xz").write_bytes(lzma.compress(b"PAR1"))
    assert texts(tmp_path / "b.parquet.xz") == ["a", "b"]
    Table.schema_arrow.names = ["body"]
    with pytest.raises(ValueError, match=r'has no column "text" \(columns: body\)'):
        texts(tmp_path / "a.parquet")


class FakeStream(list):
    def take(self, count):
        return self[:count]


@pytest.mark.parametrize(
    ("source", "asked", "found"),
    [
        ("hf:me/data", ("me/data", None, "train"), ["a", "b", "c"]),
        ("hf:me/data@en:validation", ("me/data", "en", "validation"), ["a", "b", "c"]),
        ("hf:data:train[:2]:body", ("data", None, "train"), ["A", "B"]),
    ],
)
def test_hugging_face_datasets_are_streamed(monkeypatch, source, asked, found):
    calls = []

    def load_dataset(name, config, *, split, streaming):
        calls.append((name, config, split))
        assert streaming
        return FakeStream({"text": letter, "body": letter.upper()} for letter in "abc")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert texts(source) == found
    assert calls == [asked]


def test_fingerprint_follows_names_sizes_and_times(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before
    (tmp_path / "a.txt").write_text("three")
    assert fingerprint(str(tmp_path)) != before
    assert fingerprint("synthetic:1") != fingerprint("synthetic:2")
    assert fingerprint("stdlib") == fingerprint("stdlib")


# ---- bad input


def write_bad_files(folder):
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text("\n<|endoftext|>\n  \n")
    (folder / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    (folder / "cut.xz").write_bytes(lzma.compress(b"x" * 1000)[:-20])
    (folder / "cut.gz").write_bytes(gzip.compress(random.Random(0).randbytes(1000))[:-20])
    (folder / "not.gz").write_bytes(b"plain")
    (folder / "not.xz").write_bytes(b"plain")
    (folder / "bad.jsonl").write_text('{"text": "x"}\n{oops\n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "field.jsonl").write_text('{"body": "x", "id": 1}\n')
    (folder / "some.parquet").write_bytes(b"PAR1")
    (folder / "folder").mkdir()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}/missing.txt", "missing.txt' not found: give an existing file"),
        ("{}/missing/*.txt", "not found"),
        ("{}/folder", "holds no file ending in .txt"),
        ("{}/empty.txt", "holds no text"),
        ("{}/blank.txt", "holds no text"),
        ("{}/latin.txt", "latin.txt is not UTF-8 text"),
        ("{}/cut.xz", "cannot read .*cut.xz: damaged or cut off"),
        ("{}/cut.gz", "cannot read .*cut.gz: damaged or cut off"),
        ("{}/not.gz", "cannot read .*not.gz: Not a gzipped file"),
        ("{}/not.xz", "cannot read .*not.xz: damaged or cut off"),
        ("{}/bad.jsonl", "bad.jsonl, line 2: not JSON"),
        ("{}/list.jsonl", "list.jsonl, line 1: must be a JSON object"),
        ("{}/field.jsonl", r'field.jsonl, line 1: no field "text" .*fields: body, id'),
        ("{}/some.parquet", "some.parquet needs pyarrow: pip install pyarrow"),
        ("stdlib,,synthetic", "names an empty source"),
        ("", "names an empty source"),
        ("synthetic:many", "must read synthetic:MEGABYTES"),
        ("synthetic:0", "must read synthetic:MEGABYTES"),
        ("synthetic:-1", "must read synthetic:MEGABYTES"),
        ("hf:", "must read hf:DATASET"),
        ("hf:a:b:c:d", "must read hf:DATASET"),
        ("hf:me/data", "needs Hugging Face datasets: pip install datasets"),
        ("hf:me/data:broken", "cannot read hf:me/data:broken: no such split"),
        ("hf:me/data:train:body", r"cannot read .*: row 1 has no text in field 'body' \(fields: text\)"),
    ],
)
def test_bad_sources_are_one_clear_line(tmp_path, monkeypatch, source, message):
    def load_dataset(name, config, *, split, streaming):
        if split == "broken":
            raise RuntimeError("no such split\nand a long story")
        return FakeStream([{"text": "a"}])

    write_bad_files(tmp_path)
    missing = source == "hf:me/data"
    monkeypatch.setitem(sys.modules, "datasets", None if missing else types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=message) as raised:
        texts(source.format(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_python_without_source_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="this Python has no source of its standard library"):
        texts("stdlib")
