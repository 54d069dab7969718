"""Text becomes token files: tokenised once, kept under a hash of the input, memory-mapped from then on.

Every document is written between two end-of-text tokens:

    <end> first document <end> <end> second document <end> ...

The first is what a document's first token is predicted from, so every token of the text can be predicted without a
look at the document before; the second is what a model learns to stop at. Two in a row are a boundary, which can be
seen from the tokens alone (`isles.train.batches` does).

A cached set is a folder: train.bin, validation.bin (16 or 32 bits a token, little-endian), tokenizer.json, and set.json
with sizes and checksums, written last. Nothing in it is ever executed. Its name is the hash of all texts, the tokenizer
and FORMAT. So that a second start is instant, the names, sizes and times of the source's files stand for their content
when they have been seen before (folder `known`).

The folder is made under another name and renamed, so it is there complete or not at all; a damaged one is made again.
Islands that start together wait for the first one (a file lock, which the system frees when a process dies). The lock
only saves work: without it all islands would do it, and the first rename would win.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isles.train import text
from isles.train.text import Document, Split
from isles.train.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

try:
    import fcntl
except ImportError:  # not on Windows: see above
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
TRAINING_BYTES = 64_000_000
"""A vocabulary is trained on about this much text at most, chosen by the documents' scores."""
PIECE, GROUP = 100_000, 1_000_000
"""Characters that are tokenised as one text, and in one call: bounds for the memory that the tokenizer takes."""
BLOCK, BLOCKS = 1 << 20, 256

Say = Callable[[str], None]


@dataclass(frozen=True)
class TokenSet:
    """Training and validation tokens of a source, and the tokenizer that made them."""

    train: NDArray[Any]
    validation: NDArray[Any]
    vocabulary: int
    """Number of token ids: what the embedding of a model has to hold."""
    end_of_text: int
    train_bytes: int
    """UTF-8 bytes of the training text."""
    validation_bytes: int
    """UTF-8 bytes of the validation text, for bits per byte."""
    train_documents: int
    validation_documents: int
    tokenizer_file: Path
    """Can be given to `prepare` again, so that several sources share one tokenizer."""
    tokenizer_digest: str
    digest: str
    """Of all that matters: two islands with the same digest have the same tokens."""
    tokenizer: Tokenizer = field(repr=False)

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode_batch([text])[0]]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(token) for token in ids])


def default_cache() -> Path:
    """$ISLES_CACHE, or ~/.cache/isles."""
    return Path(os.environ.get("ISLES_CACHE") or "~/.cache/isles").expanduser()


def prepare(
    source: str,
    *,
    tokenizer: str | None = None,
    vocabulary: int = 4096,
    validation: str | None = None,
    cache: Path | None = None,
    fraction: float = 0.05,
    say: Say = lambda line: None,
) -> TokenSet:
    """The tokens of a source (see `isles.train.text`), from the cache or made now.

    `tokenizer` is a file, "bytes", or None: then `vocabulary` tokens are trained on the training text. Validation text
    is the source `validation`, or about `fraction` of `source`. `say` is called with progress messages.

    Islands with a source each share a tokenizer: prepare all sources together (A,B,C) first, then each one with
    `tokenizer=str(together.tokenizer_file)`.
    """
    if tokenizer is None and (isinstance(vocabulary, bool) or not 257 <= vocabulary <= 2**24):
        raise ValueError(f"vocabulary={vocabulary!r} must be from 257 (256 bytes and end-of-text) to {2**24}")
    if validation is None and not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction!r} must be between 0 and 1, or give a validation source")
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    cache = _folders(cache or default_cache())
    source = _local(source, cache, say)
    validation = None if validation is None else _local(validation, cache, say)

    recipe = [FORMAT, _hash(given.json) if given else vocabulary, fraction if validation is None else None]
    seen = [text.fingerprint(source), validation and text.fingerprint(validation)]
    known = cache / "known" / _hash(recipe, seen)
    with contextlib.suppress(OSError, ValueError):
        return _load(cache / "tokens" / known.read_text("ascii"))

    say(f"reading {source}")
    main = text.split(text.documents(source), 0.0 if validation else fraction)
    apart = text.split(text.documents(validation), 0.0) if validation else None
    key = _hash(recipe, [main.digest, apart and apart.digest])
    folder = cache / "tokens" / key
    with _locked(cache / "locks" / key):
        try:
            tokens = _load(folder)
        except (OSError, ValueError):
            tokens = _make(folder, source, validation, main, given, vocabulary, say)
    _write(known, key)
    return tokens


# Making a set.


def _make(
    folder: Path,
    source: str,
    validation: str | None,
    main: Split,
    given: Tokenizer | None,
    vocabulary: int,
    say: Say,
) -> TokenSet:
    def sides() -> Iterator[tuple[bool, Document]]:
        yield from main.sides(text.documents(source))
        if validation:
            yield from ((True, document) for document in text.documents(validation))

    _remove_stale(folder.parent)
    scratch = _partial(folder)
    scratch.mkdir()
    try:
        tokenizer = given
        if tokenizer is None:
            say(f"training a vocabulary of {vocabulary} tokens")
            limit = int(2**64 * min(1.0, TRAINING_BYTES / max(1, main.text_bytes)))
            # Counted from the highest score down: the lowest ones are held out.
            chosen = (p.text for p in _pieces(sides()) if not p.held_out and 2**64 - 1 - text.score(p.text) < limit)
            tokenizer = train_tokenizer(chosen, vocabulary)
        say(f"tokenising {main.text_bytes / 1e6:.1f} MB")
        about = _tokenise(sides(), tokenizer, scratch)
        if not about["train_documents"] or not about["validation_documents"]:
            raise ValueError(f"data {source!r} is too small to hold out text for validation: give more, or --val-data")
        _write(scratch / "tokenizer.json", tokenizer.json)
        about["files"] = {file.name: [file.stat().st_size, _checksum(file)] for file in sorted(scratch.iterdir())}
        _write(scratch / "set.json", json.dumps({"about": about, "checksum": _hash(about)}))
        return _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Piece(NamedTuple):
    held_out: bool
    text: str
    first: bool
    last: bool


def _tokenise(sides: Iterable[tuple[bool, Document]], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    dtype, end = _dtype(tokenizer.vocabulary), tokenizer.end_of_text
    counts = {name: 0 for side in ("train", "validation") for name in (f"{side}_documents", f"{side}_bytes")}
    marker = np.array([end], dtype).tobytes()
    with open(folder / "train.bin", "wb") as train, open(folder / "validation.bin", "wb") as held_out:
        for group in _groups(_pieces(sides)):
            for piece, ids in zip(group, tokenizer.encode_batch([piece.text for piece in group]), strict=True):
                side, file = ("validation", held_out) if piece.held_out else ("train", train)
                file.write(marker * piece.first + ids.astype(dtype).tobytes() + marker * piece.last)
                counts[f"{side}_documents"] += piece.last
                counts[f"{side}_bytes"] += len(piece.text.encode())
        for file in (train, held_out):
            file.flush()
            os.fsync(file.fileno())
    return {"format": FORMAT, "vocabulary": tokenizer.vocabulary, "end_of_text": end, **counts}


def _pieces(sides: Iterable[tuple[bool, Document]]) -> Iterator[_Piece]:
    """Documents cut between lines, so that the tokenizer never holds a large one at once."""
    for held_out, (_, whole) in sides:
        start = 0
        while start < len(whole):
            cut = len(whole)
            if cut - start > 2 * PIECE:
                line = whole.find("\n", start + PIECE, start + 2 * PIECE)
                cut = line + 1 if line >= 0 else start + PIECE
            yield _Piece(held_out, whole[start:cut], start == 0, cut == len(whole))
            start = cut


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    yield group


def _local(source: str, cache: Path, say: Say) -> str:
    """The source with its remote parts replaced by copies in the cache: text is read several times."""
    local = []
    for part in text.parts(source):
        copy = cache / "downloads" / f"{_hash(part)}.jsonl"
        if not part.startswith("hf:"):
            local.append(part)
            continue
        with _locked(cache / "locks" / copy.name):
            if not copy.exists():
                say(f"downloading {part}")
                _write(copy, (json.dumps({"text": document.text}) + "\n" for document in text.documents(part)))
        local.append(str(copy))
    return ",".join(local)


# The cache.


def _load(folder: Path) -> TokenSet:
    """The set in a folder; ValueError or OSError if it is not there, or not as it was written."""
    saved = json.loads((folder / "set.json").read_text("utf-8"))
    about = saved["about"] if isinstance(saved, dict) and saved.keys() == {"about", "checksum"} else None
    if not isinstance(about, dict) or about.get("format") != FORMAT or saved["checksum"] != _hash(about):
        raise ValueError(f"{folder} is damaged")
    for name, (size, checksum) in about["files"].items():
        if (folder / name).stat().st_size != size or _checksum(folder / name) != checksum:
            raise ValueError(f"{folder / name} is damaged")
    dtype = _dtype(about["vocabulary"])
    return TokenSet(
        train=np.memmap(folder / "train.bin", dtype, "r"),
        validation=np.memmap(folder / "validation.bin", dtype, "r"),
        vocabulary=about["vocabulary"],
        end_of_text=about["end_of_text"],
        train_bytes=about["train_bytes"],
        validation_bytes=about["validation_bytes"],
        train_documents=about["train_documents"],
        validation_documents=about["validation_documents"],
        tokenizer_file=folder / "tokenizer.json",
        tokenizer_digest=about["files"]["tokenizer.json"][1],
        digest=saved["checksum"],
        tokenizer=load_tokenizer(str(folder / "tokenizer.json")),
    )


def _publish(scratch: Path, folder: Path) -> TokenSet:
    """Gives the finished folder its name, unless another process was faster; a damaged one is replaced."""
    _sync(scratch)
    for _ in range(10):
        try:
            os.rename(scratch, folder)
        except OSError:
            if not folder.exists():
                raise
        else:
            _sync(folder.parent)
        try:
            return _load(folder)
        except (OSError, ValueError):
            with contextlib.suppress(OSError):  # renamed first: the others see all of it or nothing
                os.rename(folder, scratch.with_name(scratch.name + "-damaged"))
            shutil.rmtree(scratch.with_name(scratch.name + "-damaged"), ignore_errors=True)
    raise ValueError(f"cannot keep token files in {folder.parent}: they are damaged as soon as they are written")


def _folders(cache: Path) -> Path:
    try:
        for name in ("tokens", "known", "locks", "downloads"):
            (cache / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot use {cache} as cache ({error.strerror}): set ISLES_CACHE to a folder") from error
    return cache


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock; where the file system has none, goes on without."""
    with open(path, "a") as file:
        with contextlib.suppress(OSError):
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, content: str | Iterable[str]) -> None:
    """Writes a whole file or nothing."""
    partial = _partial(path)
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.writelines([content] if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """A unique temporary name next to a path. (The `tempfile` module would hide the result from other users.)"""
    return path.with_name(f"{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_stale(folder: Path) -> None:
    """Removes what killed processes left behind more than a day ago."""
    for left in folder.glob("*.partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)


def _checksum(path: Path) -> str:
    """Of all of a file up to 256 MiB, of 256 blocks spread evenly over a larger one: a start stays fast."""
    size, checksum = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        for block in range(min(BLOCKS, -(-size // BLOCK))):
            file.seek(block * BLOCK if size <= BLOCKS * BLOCK else block * (size - BLOCK) // (BLOCKS - 1))
            checksum.update(file.read(BLOCK))
    return checksum.hexdigest()


def _hash(*values: object) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _dtype(vocabulary: int) -> str:
    return "<u2" if vocabulary <= 2**16 else "<u4"
