"""Snapshots: how they are written, found and loaded, and what may be deleted because of them.

The parts of a snapshot are put first, the manifest last: a manifest that can be read names parts that are complete. The
state before the first round is the same, with run.json in the place of the manifest.

Whoever has written a snapshot collects garbage. Payloads of rounds that the last snapshot but one contains go, and so
do older snapshots. One more than necessary is kept, for those who are reading it. An old listing does no harm, because
"the last but one" only moves forward. Deleting may fail: the next collector lists again, and finds what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from isles.elastic.decisions import Apply
from isles.elastic.objects import ROUNDS, SNAPSHOTS, Blob, Manifest, Part, manifest_name, part_name, round_of
from isles.elastic.requests import Answer, Requests
from isles.wire.world import MismatchError

# ---- writing


def put_all(requests: Requests, parts: Mapping[str, Any], now: float, then: Callable[[float], None]) -> None:
    """Puts objects by name, and calls back when all are stored."""
    waiting = set(parts)
    assert waiting

    def stored(name: str, answer: Answer, later: float) -> None:
        waiting.discard(name)
        if not waiting:
            then(later)

    for name, body in parts.items():
        requests.start(now, "put", name, partial(stored, name), body)


Parts = Mapping[str, tuple[Blob, Any]]
"""Of a snapshot, by label: what each is, and its body."""


def save(requests: Requests, after: Apply, parts: Parts, now: float, then: Callable[[], None]) -> None:
    """Writes a snapshot, calls back, and deletes what nobody will need again."""
    number = after.number
    names = {label: part_name(number, label, blob.sha256) for label, (blob, _) in parts.items()}
    manifest = Manifest(number, after.seal, tuple(Part(names[label], *blob) for label, (blob, _) in parts.items()))

    def create(later: float) -> None:
        requests.start(later, "create", manifest_name(number), collect, manifest.pack())

    def collect(_: Answer, later: float) -> None:
        then()
        requests.start(later, "list", SNAPSHOTS, delete_snapshots)

    def delete_snapshots(answer: Answer, later: float) -> None:
        complete = sorted(_complete(answer.value))
        if len(complete) >= 2:
            keep = complete[-2]
            delete(answer.value, keep - 1, later)
            requests.start(later, "list", ROUNDS, lambda found, last: delete(found.value, keep, last))

    def delete(names: Iterable[str], last: int, later: float) -> None:
        for name in names:
            if (number := round_of(name)) is not None and number <= last:
                requests.start(later, "delete", name, lambda answer, later: None)

    put_all(requests, {names[label]: body for label, (_, body) in parts.items()}, now, create)


# ---- loading


@dataclass
class Search:
    """Gets the newest snapshot; calls `then` with its manifest, or None if there is none of round `least` or later.

    What is missing was deleted while it was being read: then there is a newer one, which is read instead. Until that
    is found, what is missing is asked for again.
    """

    requests: Requests
    start: Manifest
    """The state before the first round, from run.json."""
    least: int
    then: Callable[[Manifest | None, float], None]
    _number: float = -1
    """The snapshot that is being read; infinite when that is done."""
    _listing: bool = False
    _waiting: set[str] = field(default_factory=set)

    def begin(self, now: float) -> None:
        if not self._listing:
            self._listing = True
            self.requests.start(now, "list", SNAPSHOTS, self._on_names)

    def _on_names(self, answer: Answer, now: float) -> None:
        self._listing = False
        newest = max(_complete(answer.value), default=0)
        if self._number < 0 and newest < self.least:
            self.then(None, now)
        elif newest > self._number:
            self._number = newest
            if newest:
                self.requests.start(now, "get", manifest_name(newest), partial(self._on_manifest, newest))
            else:
                self._get_parts(self.start, now)

    def _on_manifest(self, number: int, answer: Answer, now: float) -> str | None:
        if number != self._number:
            return None
        if answer.status == "missing":
            return self._on_missing(now)
        manifest = Manifest.parse(answer.value, manifest_name(number))
        if manifest.round != number:
            raise MismatchError(f"{manifest_name(number)} is the manifest of snapshot {manifest.round}")
        self._get_parts(manifest, now)
        return None

    def _get_parts(self, manifest: Manifest, now: float) -> None:
        self._waiting = {part.name for part in manifest.parts}
        for part in manifest.parts:
            self.requests.start(now, "get", part.name, partial(self._on_part, manifest, part), limit=part.num_bytes)

    def _on_part(self, manifest: Manifest, part: Part, answer: Answer, now: float) -> str | None:
        if manifest.round != self._number:
            return None
        if answer.status == "missing":
            return self._on_missing(now)
        if answer.value != (part.num_bytes, part.sha256):
            return f"it is {answer.value or answer.status}, and the manifest of snapshot {manifest.round} says {part}"
        self._waiting.discard(part.name)
        if not self._waiting:
            self._number = math.inf
            self.then(manifest, now)
        return None

    def _on_missing(self, now: float) -> str:
        self.begin(now)
        return "it is missing, and there is no newer snapshot"


def _complete(names: Iterable[str]) -> list[int]:
    """The rounds of snapshots whose manifest is there."""
    return [number for name in names if (number := round_of(name)) is not None and name == manifest_name(number)]
