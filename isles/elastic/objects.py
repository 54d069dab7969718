"""What is in the store: names that can be computed, small JSON documents, payloads with a header.

    run.json                     what the run is, and the state that it started from     put-if-absent
    islands/NNNN.json            island N has joined                                     put-if-absent, own number
    islands/NNNN.left.json       from some round on nobody needs to wait for island N    put by island N
    rounds/KKKKKKKK/NNNN         the payload of island N in round K                      put by island N, once
    seals/KKKKKKKK.json          who is in round K                                       put-if-absent, never deleted
    snapshots/KKKKKKKK/...       parts named by content, then manifest.json              put-if-absent, last

Documents are read strictly: bounded size, exactly the expected fields, numbers in range, nothing evaluated. What does
not fit is a `MismatchError` that names the object. Two kinds of digests (sha256, hex) tie them together: a seal has the
digest of the seal before it (the first one: of run.json), and those of the payloads that it lists.

A shared secret (HMAC) belongs between these bytes and the store client: sign what is put, verify and strip what is got.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from isles.wire.message import HEADER_BYTES, Header
from isles.wire.world import MismatchError

FORMAT = 1
MAX_DOCUMENT_BYTES = 1 << 20
MAX_NUMBER = 1 << 53
RUN, ISLANDS, ROUNDS, SEALS, SNAPSHOTS = "run.json", "islands/", "rounds/", "seals/", "snapshots/"
FORM, CLOSING_FORM = "store", "store-closing"
"""What the header of a payload says."""


def island_name(island: int) -> str:
    """Where an island announces itself.

    >>> island_name(3), left_name(3), payload_name(17, 3), seal_name(17), manifest_name(16)
    ('islands/0003.json', 'islands/0003.left.json', 'rounds/00000017/0003', 'seals/00000017.json', \
'snapshots/00000016/manifest.json')
    """
    return f"{ISLANDS}{island:04d}.json"


def left_name(island: int) -> str:
    """Where it says that it has left."""
    return f"{ISLANDS}{island:04d}.left.json"


def payload_name(number: int, island: int) -> str:
    """Its payload in round `number`."""
    return f"{ROUNDS}{number:08d}/{island:04d}"


def seal_name(number: int) -> str:
    """The seal of a round."""
    return f"{SEALS}{number:08d}.json"


def manifest_name(number: int) -> str:
    """The manifest of the snapshot after a round."""
    return f"{SNAPSHOTS}{number:08d}/manifest.json"


def part_name(number: int, label: str, sha256: str) -> str:
    """A part of a snapshot. The content is in the name: writers of different contents cannot mix their parts."""
    return f"{SNAPSHOTS}{number:08d}/{sha256[:16]}-{label}"


def round_of(name: str) -> int | None:
    """The round to which the name of a payload, or of a part of a snapshot, belongs; None for other names.

    >>> round_of("rounds/00000017/0003"), round_of("snapshots/00000016/manifest.json"), round_of("rounds/x/0003")
    (17, 16, None)
    """
    match = re.fullmatch(r"(?:rounds|snapshots)/(\d{8,15})/[\w.-]+", name, re.ASCII)
    return int(match[1]) if match else None


def digest(data: bytes) -> str:
    """sha256, as it is written in seals and manifests."""
    return hashlib.sha256(data).hexdigest()


class DamagedError(MismatchError):
    """What was read cannot be what was written. Reading it again may help."""


class Blob(NamedTuple):
    """What a driver says about a large object that it has read, and keeps."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Contribution:
    """One island's part in a round, as a seal lists it."""

    island: int
    weight: float
    steps: int
    """Inner steps that no seal has counted before."""
    num_bytes: int
    sha256: str
    """Of the whole object, header included."""
    closing: bool = False
    """The island ends here: these are the steps since its last send, sent before their time."""


@dataclass(frozen=True)
class Seal:
    """Who is in a round, in the order in which payloads are averaged."""

    round: int
    fragment: int
    clock: int
    """At which the schedule sends this round."""
    contributions: tuple[Contribution, ...]
    missing: tuple[int, ...]
    """Islands that were waited for in vain."""
    known: int
    """How many islands had ever joined, as far as the writer knew."""
    previous: str
    """Digest of the seal before it, of run.json for the first."""

    @functools.cached_property
    def islands(self) -> tuple[int, ...]:
        return tuple(each.island for each in self.contributions)

    @property
    def closing(self) -> bool:
        """Whether everybody who is in it ends with it."""
        return all(each.closing for each in self.contributions)

    def pack(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def parse(cls, data: bytes, name: str) -> Seal:
        read = _Reader.of(data, name, cls)
        rows = read.list("contributions")
        contributions = tuple([_contribution(_Reader(row, name, _names(Contribution))) for row in rows])
        numbers = (read.integer("round", 1), read.integer("fragment"), read.integer("clock", 1))
        missing, known = read.integers("missing"), read.integer("known", 1)
        seal = cls(*numbers, contributions, missing, known, read.sha256("previous"))
        rising = all(list(each) == sorted(set(each)) for each in (seal.islands, missing))
        read.must(
            "contributions", bool(rows) and rising and not set(seal.islands) & set(missing), "in order, each once"
        )
        read.must("known", known > max(*seal.islands, *missing, 0), "more than every island that is named")
        return seal


@dataclass(frozen=True)
class Part:
    """One object of a snapshot."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A snapshot: anchors and velocities after a round."""

    round: int
    seal: str
    """Digest of the seal of that round; empty for the state before the first."""
    parts: tuple[Part, ...]

    def pack(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def parse(cls, data: bytes, name: str) -> Manifest:
        return cls._read(_Reader.of(data, name, cls))

    @classmethod
    def _read(cls, read: _Reader) -> Manifest:
        number = read.integer("round")
        rows = [_Reader(row, read.name, _names(Part)) for row in read.list("parts")]
        parts = tuple([Part(row.text("name"), row.integer("num_bytes"), row.sha256("sha256")) for row in rows])
        read.must("parts", all(round_of(part.name) == number for part in parts), f"names of the snapshot {number}")
        return cls(number, read.sha256("seal") if number else read.text("seal", 0), parts)


@dataclass(frozen=True)
class Run:
    """What a run is. Whoever joins compares `method` and `model`."""

    run: str
    """Its name: the token of the process that made it."""
    method: str
    """The settings that all islands share, as text."""
    model: str
    """Digest of fragment names and shapes."""
    gone_after: int
    """Rounds for which an island that was missing is still looked for. Islands must agree on whom they look for."""
    start: Manifest
    """The state before the first round. It is complete when run.json exists."""
    format: int = FORMAT

    def pack(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def parse(cls, data: bytes, name: str = RUN) -> Run:
        read = _Reader.of(data, name, cls)
        read.must("format", read.integer("format") == FORMAT, f"{FORMAT}: run the same isles everywhere")
        start = Manifest._read(_Reader(read.fields["start"], name, _names(Manifest)))
        return cls(
            read.text("run"), read.text("method", 0), read.text("model", 0), read.integer("gone_after", 1), start
        )

    def check(self, own: Run) -> None:
        """Raises unless an island with these settings may join."""
        for what in ("method", "model"):
            there, here = getattr(self, what), getattr(own, what)
            if there != here:
                advice = "join with the same model and method, or give this run a store of its own"
                raise MismatchError(f"{RUN}: this run has another {what} ({_differences(there, here)}): {advice}")


@dataclass(frozen=True)
class Announcement:
    """islands/NNNN.json: who has the number. Or NNNN.left.json: who gave it up."""

    token: str
    """Made by the process, unlike any other: it knows its own announcement by it."""
    round: int
    """The first round that it could be in; the first one that it will not be in."""

    def pack(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def parse(cls, data: bytes, name: str) -> Announcement:
        read = _Reader.of(data, name, cls)
        return cls(read.text("token"), read.integer("round", 1))


# ---- payloads


def pack_payload(header: Header, body: bytes) -> bytes:
    """The object of a payload. `header.step` are the steps that it contains, `header.checksum` is crc32 of the body."""
    return header.pack() + body


def open_payload(name: str, data: bytes) -> tuple[Contribution, Header]:
    """What a payload says about itself; `DamagedError` unless its body, `data[HEADER_BYTES:]`, is whole."""
    island = int(name.rpartition("/")[2])
    try:
        header = Header.unpack(data[:HEADER_BYTES], island)
    except MismatchError as error:
        raise DamagedError(f"{name}: {error}") from None
    body = memoryview(data)[HEADER_BYTES:]
    if len(body) != header.num_bytes or zlib.crc32(body) != header.checksum:
        raise DamagedError(f"{name}: the payload of island {island} is damaged or cut short")
    closing = header.form == CLOSING_FORM
    return Contribution(island, header.weight, header.step, len(data), digest(data), closing), header


# ---- strict reading


def _pack(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _contribution(read: _Reader) -> Contribution:
    weight = read.fields["weight"]
    finite = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight < math.inf
    read.must("weight", finite, "a finite number, not negative")
    numbers = (read.integer("steps"), read.integer("num_bytes", HEADER_BYTES))
    return Contribution(read.integer("island"), float(weight), *numbers, read.sha256("sha256"), read.boolean("closing"))


def _differences(there: str, here: str) -> str:
    """What two texts of settings have not in common.

    >>> _differences('{"a": 1, "b": 2}', '{"a": 1, "b": 3}')
    'b=2 there, 3 here'
    """
    try:
        theirs, ours = json.loads(there), json.loads(here)
        pairs = [(name, theirs.get(name), ours.get(name)) for name in {**theirs, **ours}]
    except (ValueError, AttributeError):
        pairs = [("it", there, here)]
    text = "; ".join(f"{name}={one!r} there, {other!r} here" for name, one, other in pairs if one != other)
    return text[:500]


@functools.cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind))


class _Reader:
    """The fields of one JSON object, each checked when it is read."""

    def __init__(self, document: Any, name: str, expected: frozenset[str]) -> None:
        self.name, self.fields = name, document
        if not isinstance(document, dict) or document.keys() != expected:
            found = sorted(document) if isinstance(document, dict) else type(document).__name__
            raise MismatchError(f"{name}: expected the fields {', '.join(sorted(expected))}, found {str(found)[:200]}")

    @classmethod
    def of(cls, data: bytes, name: str, kind: type) -> _Reader:
        if len(data) > MAX_DOCUMENT_BYTES:
            raise MismatchError(f"{name} has {len(data)} bytes: the most is {MAX_DOCUMENT_BYTES}")
        try:
            document = json.loads(data.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{name} is damaged, or not an object of isles: {str(error)[:200]}") from None
        return cls(document, name, _names(kind))

    def must(self, field: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise MismatchError(f"{self.name}: {field} is {str(self.fields[field])[:200]}, and must be {wanted}")

    def integer(self, field: str, least: int = 0) -> int:
        value = self.fields[field]
        self.must(field, type(value) is int and least <= value <= MAX_NUMBER, f"an integer from {least} on")
        return value

    def text(self, field: str, least: int = 1) -> str:
        value = self.fields[field]
        self.must(
            field, type(value) is str and least <= len(value) <= 1 << 16, f"a text of {least} to 65536 characters"
        )
        return value

    def boolean(self, field: str) -> bool:
        value = self.fields[field]
        self.must(field, type(value) is bool, "true or false")
        return value

    def sha256(self, field: str) -> str:
        value = self.text(field)
        self.must(field, re.fullmatch(r"[0-9a-f]{64}", value) is not None, "a sha256 in hex")
        return value

    def list(self, field: str) -> list[Any]:
        self.must(field, type(self.fields[field]) is list, "a list")
        return self.fields[field]

    def integers(self, field: str) -> tuple[int, ...]:
        values: Sequence[Any] = self.list(field)
        self.must(field, all(type(value) is int and 0 <= value <= MAX_NUMBER for value in values), "a list of integers")
        return tuple(values)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a field is there twice")
    return document


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not a number")
