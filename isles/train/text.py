"""Where text comes from: one line names a source, and every source is a stream of documents.

    stdlib                                  the source of this Python's own standard library; a file is a document
    PATH, GLOB or FOLDER                    plain text, .jsonl (field "text") or .parquet (column "text"), each also
                                            as .gz or .xz; plain text: a line holding only <|endoftext|> ends a document
    hf:DATASET[@CONFIG][:SPLIT[:FIELD]]     a Hugging Face dataset, streamed; the split may be cut: train[:10000]
    synthetic[:MEGABYTES]                   pseudo-text from a seeded generator, for benchmarks
    A,B                                     one after the other

The same line gives the same documents in the same order, so it can be read as often as needed and nothing is held in
memory. Validation text is split off by whole documents: a document's side is decided by a hash of its text alone. It
keeps that side when other documents come and go and when files are moved, and two copies of one document are never on
different sides.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import lzma
import os
import random
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

SEPARATOR = "<|endoftext|>"
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".jsonl", ".parquet")
"""What is taken from a folder (each also with .gz or .xz); a file that is named itself may end in anything."""
NO_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SYNTHETIC_MEGABYTES = 8.0


class Document(NamedTuple):
    """A text that stands by itself, and where it came from."""

    name: str
    text: str


def documents(source: str) -> Iterator[Document]:
    """The documents of a source; those without any text are left out.

    >>> next(documents("synthetic:0.01")).name
    'synthetic/0'
    """
    empty = True
    for part in parts(source):
        for document in _documents(part):
            if document.text and not document.text.isspace():
                empty = False
                yield document
    if empty:
        raise ValueError(f"data {source!r} holds no text: give a source with at least one document that is not empty")


def parts(source: str) -> list[str]:
    """The sources of a comma-separated line; a comma in the name of an existing file is part of the name."""
    found = [source] if os.path.exists(source) else [part.strip() for part in source.split(",")]
    if not all(found):
        raise ValueError(f"data {source!r} names an empty source: write stdlib, a path, hf:DATASET or synthetic")
    return found


def fingerprint(source: str) -> str:
    """What can be known of a source without reading it: names, sizes and times of its files.

    As long as it stays the same, the text is taken to be the same.
    """
    known: list[object] = []
    for part in parts(source):
        if _is_synthetic(part) or part.startswith("hf:"):
            known.append(part)
        else:
            files = _standard_library() if part == "stdlib" else _files(part)
            stats = [(str(path.absolute()), path.stat()) for path in files]
            known.append([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
    return hashlib.blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Split:
    """What one pass over a source found: how much there is, and which documents are held out."""

    documents: int
    text_bytes: int
    digest: str
    """Of all texts in order: the content of the source."""
    limit: int
    """Documents with a score below it are held out."""
    tail_bytes: int | None = None
    """Not whole documents, but about this much of their end is held out; for sources of very few documents."""

    def sides(self, documents: Iterable[Document]) -> Iterator[tuple[bool, Document]]:
        """Each document with whether it is held out for validation."""
        for document in documents:
            if score(document.text) >= self.limit:
                yield False, document
            elif self.tail_bytes is None:
                yield True, document
            else:
                cut = _line_near(document.text, len(document.text) - self.tail_bytes)
                if cut > 0:
                    yield False, Document(document.name, document.text[:cut])
                yield True, Document(document.name, document.text[cut:])


def split(documents: Iterable[Document], fraction: float) -> Split:
    """Reads the documents once and holds out about `fraction` of them; 0 holds out none.

    When chance takes none of them (or all), because there are only a few, the one with the lowest score is held out,
    or, where that would be more than `fraction` of all text, the last lines of it.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction={fraction!r} of the text for validation must be from 0 to below 1")
    content, limit = hashlib.blake2b(digest_size=16), int(fraction * 2**64)
    count = held_out = text_bytes = 0
    lowest = 2**64
    for document in documents:
        value = score(document.text)
        content.update(value.to_bytes(8, "little"))
        text_bytes += len(document.text.encode())
        count, held_out, lowest = count + 1, held_out + (value < limit), min(lowest, value)
    tail = None
    if fraction > 0 and held_out in (0, count):
        limit, tail = lowest + 1, max(1, int(fraction * text_bytes))
    return Split(count, text_bytes, content.hexdigest(), limit, tail)


def score(text: str) -> int:
    """A number from 0 to 2**64 - 1 that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _line_near(text: str, position: int) -> int:
    """The start of the first line at or after a position; the position itself if no further line starts there."""
    if position <= 0:
        return 0
    end = text.find("\n", position - 1, len(text) - 1)
    return position if end < 0 else end + 1


def _documents(part: str) -> Iterator[Document]:
    if part == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return (Document(path.relative_to(root).as_posix(), _python_source(path)) for path in _standard_library())
    if part.startswith("hf:"):
        return _hugging_face(part)
    if _is_synthetic(part):
        return _synthetic(_megabytes(part))
    return itertools.chain.from_iterable(map(_read, _files(part)))


# The standard library.


def _standard_library() -> list[Path]:
    root, found = Path(sysconfig.get_path("stdlib")), []
    for folder, inside, names in os.walk(root):
        # config-* and _sysconfigdata* say how this Python was built: they would differ between two machines.
        inside[:] = [name for name in inside if name not in NO_SOURCE and not name.startswith("config-")]
        found += [Path(folder, name) for name in names if name.endswith(".py") and name[:15] != "_sysconfigdata_"]
    if not found:
        raise ValueError(f"this Python has no source of its standard library in {root}: give --data a file or a folder")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _python_source(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # honours the encoding that a source file declares
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


# Files.


def _files(part: str) -> list[Path]:
    path = Path(part).expanduser()
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file() and _plain_name(file).endswith(SUFFIXES))
        shown = [file for file in inside if not any(name[0] == "." for name in file.relative_to(path).parts)]
        if not shown:
            raise ValueError(
                f"data folder {part!r} holds no file ending in {', '.join(SUFFIXES)} (or those with .gz, .xz)"
            )
        return sorted(shown)
    if path.exists():
        return [path]
    found = sorted(filter(os.path.isfile, glob.glob(str(path), recursive=True)))
    if not found:
        raise ValueError(
            f"data {part!r} not found: give an existing file, folder or glob, or stdlib, synthetic, hf:DATASET"
        )
    return [Path(name) for name in found]


def _plain_name(path: Path) -> str:
    return path.with_suffix("").name if path.suffix in (".gz", ".xz") else path.name


def _read(path: Path) -> Iterator[Document]:
    name = _plain_name(path)
    if name.endswith(".jsonl"):
        for number, row in json_lines(path):
            if not isinstance(row.get("text"), str):
                raise ValueError(f'{path}, line {number}: no field "text" with a string (fields: {", ".join(row)})')
            # JSON can write half a surrogate pair, which no UTF-8 text can hold.
            yield Document(f"{path}#{number}", row["text"].encode("utf-8", "replace").decode())
    elif name.endswith(".parquet"):
        yield from _parquet(path)
    else:
        yield from _plain_text(path)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file (also .gz, .xz), each with the number of its line."""
    with _reading(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f'{path}, line {number}: must be a JSON object, such as {{"text": ...}}')
            yield number, row


def _plain_text(path: Path) -> Iterator[Document]:
    separator, numbers = SEPARATOR.encode(), itertools.count(1)
    lines: list[bytes] = []

    def document() -> Document:
        text = b"".join(lines)
        lines.clear()
        try:
            return Document(f"{path}#{next(numbers)}", text.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it first") from error

    with _reading(path) as file:
        for line in file:
            if line.startswith(separator) and line.strip() == separator:
                yield document()
            else:
                lines.append(line)
    yield document()


def _parquet(path: Path) -> Iterator[Document]:
    parquet = _optional("pyarrow.parquet", f"reading {path} needs pyarrow: pip install pyarrow")
    with _reading(path) as file:
        plain = path.suffix not in (".gz", ".xz")
        try:
            table = parquet.ParquetFile(file if plain else io.BytesIO(file.read()))
            columns = table.schema_arrow.names
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} is not a parquet file ({error})") from error
        if "text" not in columns:
            raise ValueError(f'{path} has no column "text" (columns: {", ".join(columns)})')
        texts = (text for rows in table.iter_batches(columns=["text"]) for text in rows.column(0).to_pylist())
        for number, text in enumerate(texts, 1):
            yield Document(f"{path}#{number}", text or "")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, uncompressed; whatever goes wrong while reading is one sentence with the file's name."""
    try:
        opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
        with opened(path, "rb") as file:
            yield file
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: damaged or cut off ({error})") from error


# Hugging Face datasets.


def _hugging_face(part: str) -> Iterator[Document]:
    form = r"hf:([^:@]+)(?:@([^:]+))?(?::([^:\[]+)(?:\[:(\d+)\])?)?(?::([^:]+))?"
    match = re.fullmatch(form, part)
    if not match:
        raise ValueError(
            f"data {part!r} must read hf:DATASET[@CONFIG][:SPLIT[:FIELD]], such as hf:roneneldan/TinyStories"
        )
    name, config, part_of, rows, field = match.groups()
    datasets = _optional("datasets", f"data {part!r} needs Hugging Face datasets: pip install datasets")
    field = field or "text"
    try:
        stream = datasets.load_dataset(name, config, split=part_of or "train", streaming=True)
        for number, row in enumerate(stream.take(int(rows)) if rows else stream, 1):
            if not isinstance(row.get(field), str):
                raise ValueError(f"row {number} has no text in field {field!r} (fields: {', '.join(row)})")
            yield Document(f"{name}#{number}", row[field])
    except Exception as error:  # the library raises what its many parts raise; the user needs one sentence
        raise ValueError(f"cannot read {part}: {(str(error) or repr(error)).splitlines()[0]}") from error


def _optional(module: str, message: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(message) from error


# Synthetic text.


def _is_synthetic(part: str) -> bool:
    return part.partition(":")[0] == "synthetic"


def _megabytes(part: str) -> float:
    match = re.fullmatch(r"synthetic(?::(\d+\.?\d*))?", part)
    megabytes = float(match[1] or SYNTHETIC_MEGABYTES) if match else 0.0
    if not 0 < megabytes < 1e6:
        raise ValueError(f"data {part!r} must read synthetic:MEGABYTES, with a number above 0, such as synthetic:8")
    return megabytes


def _synthetic(megabytes: float) -> Iterator[Document]:
    """Pseudo-words that mostly follow one of eight successors of the word before, in sentences and paragraphs.

    There is something to learn (spelling, successors, sentences), and about as much repetition as in real text. Only
    Random.random is used: it is the one method whose values Python promises to keep.
    """
    syllables = [
        first + vowel + last for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in ("", "n", "r", "s")
    ]
    spell = random.Random("isles: words").random
    words = [
        "".join(syllables[int(len(syllables) * spell())] for _ in range(1 + int(3 * spell()))) for _ in range(2048)
    ]
    remaining = int(megabytes * 1e6)
    for number in itertools.count():
        if remaining <= 0:
            return
        draw, pieces, word = random.Random(f"isles: text {number}").random, [], number % len(words)
        for _ in range(20 + int(60 * draw())):
            sentence = []
            for _ in range(4 + int(12 * draw())):
                choice = draw()
                word = int(2048 * choice**3) if draw() < 0.1 else (word * 613 + int(8 * choice**2) * 389 + 7) % 2048
                sentence.append(words[word])
            pieces.append(" ".join(sentence).capitalize() + (".\n\n" if draw() < 0.2 else ". "))
        text = "".join(pieces)[:remaining]
        remaining -= len(text)
        yield Document(f"synthetic/{number}", text)
