"""What is in the store: names that can be computed, small JSON documents, payloads with a header.

    run.json                     what the run is, and the state that it started from     put-if-absent
    islands/NNNN.json            island N has joined                                     put-if-absent, own number
    islands/NNNN.left.json       from some round on nobody needs to wait for island N    put by island N
    rounds/KKKKKKKK/NNNN         the payload of island N in round K                      put by island N, once
    seals/KKKKKKKK.json          who is in round K                                       put-if-absent, never deleted
    snapshots/KKKKKKKK/...       parts named by content, then manifest.json              put-if-absent, last

Digests (sha256, hex) tie them together. A seal has the digest of the seal before it (the first one: of run.json), and
those of the payloads that it lists. A manifest has the digest of its seal, and those of its parts.

A shared secret (HMAC) belongs between these bytes and the store client: sign what is put, verify and strip what is got.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from isles.elastic.documents import (
    MAX_NUMBER,
    SHA256,
    Count,
    DamagedError,
    Document,
    Flag,
    Name,
    Positive,
    Rule,
    Sha256,
    Text,
    Weight,
    at_least,
)
from isles.wire.message import HEADER_BYTES, Header
from isles.wire.world import MismatchError

FORMAT = 1
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


def is_part(name: str) -> bool:
    """Whether this names a part of a snapshot."""
    return name.startswith(SNAPSHOTS) and "-" in name


def digest(data: bytes) -> str:
    """sha256, as it is written in seals and manifests."""
    return hashlib.sha256(data).hexdigest()


class Blob(NamedTuple):
    """What a driver says about a large object that it has read, and keeps."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Contribution(Document):
    """One island's part in a round, as a seal lists it."""

    island: Count
    weight: Weight
    steps: Count
    """Inner steps that no seal has counted before."""
    num_bytes: Annotated[int, at_least(HEADER_BYTES)]
    sha256: Sha256
    """Of the whole object, header included."""
    closing: Flag = False
    """The island ends here: these are the steps since its last send, sent before their time."""


@dataclass(frozen=True)
class Seal(Document):
    """Who is in a round, in the order in which payloads are averaged."""

    round: Positive
    fragment: Count
    clock: Positive
    """At which the schedule sends this round."""
    contributions: tuple[Contribution, ...]
    missing: tuple[Count, ...]
    """Islands that were waited for in vain."""
    known: Positive
    """How many islands had ever joined, as far as the writer knew."""
    previous: Sha256
    """Digest of the seal before it, of run.json for the first."""

    @functools.cached_property
    def islands(self) -> tuple[int, ...]:
        return tuple(each.island for each in self.contributions)

    @property
    def closing(self) -> bool:
        """Whether everybody who is in it ends with it."""
        return all(each.closing for each in self.contributions)

    def rules(self) -> dict[str, Rule]:
        islands, missing = self.islands, self.missing
        rising = all(list(each) == sorted(set(each)) for each in (islands, missing))
        listed = bool(islands) and rising and not set(islands) & set(missing)
        largest = max((*islands, *missing, 0))
        return {
            "contributions": Rule(lambda _: listed, "in order, each once"),
            "known": Rule(lambda known: known > largest, "more than every island that is named"),
        }


@dataclass(frozen=True)
class Part(Document):
    """One object of a snapshot."""

    name: Name
    num_bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class Manifest(Document):
    """A snapshot: anchors and velocities after a round."""

    round: Count
    seal: Text
    """Digest of the seal of that round; empty for the state before the first."""
    parts: tuple[Part, ...]

    def rules(self) -> dict[str, Rule]:
        of_round = lambda parts: bool(parts) and all(round_of(part.name) == self.round for part in parts)
        of_seal = lambda seal: not self.round or SHA256.fullmatch(seal) is not None
        return {
            "parts": Rule(of_round, f"names of the snapshot {self.round}"),
            "seal": Rule(of_seal, "a sha256 in hex"),
        }


@dataclass(frozen=True)
class Run(Document):
    """What a run is. Whoever joins compares `method` and `model`."""

    run: Name
    """Its name: the token of the process that made it."""
    method: Text
    """The settings that all islands share, as text."""
    model: Text
    """Digest of fragment names and shapes."""
    gone_after: Positive
    """Rounds for which an island that was missing is still looked for. Islands must agree on whom they look for."""
    start: Manifest
    """The state before the first round. It is complete when run.json exists."""
    format: Count = FORMAT

    def rules(self) -> dict[str, Rule]:
        return {"format": Rule(lambda format: format == FORMAT, f"{FORMAT}: run the same isles everywhere")}

    def check(self, own: Run) -> None:
        """Raises unless an island with these settings may join."""
        for what in ("method", "model"):
            there, here = getattr(self, what), getattr(own, what)
            if there != here:
                advice = "join with the same model and method, or give this run a store of its own"
                raise MismatchError(f"{RUN}: this run has another {what} ({_differences(there, here)}): {advice}")


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


@dataclass(frozen=True)
class Announcement(Document):
    """islands/NNNN.json: who has the number. Or NNNN.left.json: who gave it up."""

    token: Name
    """Made by the process, unlike any other: it knows its own announcement by it."""
    round: Positive
    """The first round that it could be in; the first one that it will not be in."""


def open_payload(name: str, data: bytes) -> tuple[Contribution, Header]:
    """What a payload says about itself. `DamagedError` unless its body, `data[HEADER_BYTES:]`, is whole."""
    island = int(name.rpartition("/")[2])
    try:
        header = Header.unpack(data[:HEADER_BYTES], island)
    except MismatchError as error:
        raise DamagedError(f"{name}: {error}") from None
    body = memoryview(data)[HEADER_BYTES:]
    if len(body) != header.num_bytes or zlib.crc32(body) != header.checksum:
        raise DamagedError(f"{name}: the payload of island {island} is damaged or cut short")
    if header.step > MAX_NUMBER:
        raise DamagedError(f"{name}: island {island} says that it has taken {header.step} steps")
    closing = header.form == CLOSING_FORM
    return Contribution(island, header.weight, header.step, len(data), digest(data), closing), header


Check = Callable[[int, Header], None]
"""Raises `DamagedError` if a payload of this round cannot have this header."""


def told_of(name: str, data: bytes, check: Check = lambda number, header: None) -> Contribution | Blob | bytes:
    """What the protocol is told of an object that was read. The bytes of large ones stay with the driver."""
    if name.startswith(ROUNDS):
        contribution, header = open_payload(name, data)
        check(round_of(name) or 0, header)
        return contribution
    return Blob(len(data), digest(data)) if is_part(name) else data
