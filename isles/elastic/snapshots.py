"""Snapshots: how they are written, found and loaded, and what may be deleted because of them.

The parts of a snapshot are put first, the manifest last: a manifest that can be read names parts that are complete. The
state before the first round is the same, with run.json in the place of the manifest.

Whoever has written a snapshot collects garbage. Payloads of rounds that the last snapshot but one contains go, and so
do older snapshots. One more than necessary is kept, for those who are reading it. An old listing does no harm, because
"the last but one" only moves forward. Deleting may fail: the next collector lists again, and finds what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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


def save(requests: Requests, number: int, seal: str, parts: Mapping[str, tuple[Blob, Any]], now: float) -> None:
    """Writes a snapshot, then deletes what nobody will need again. `parts`: by label, what each is, and its body."""
    names = {label: part_name(number, label, blob.sha256) for label, (blob, _) in parts.items()}
    manifest = Manifest(number, seal, tuple(Part(names[label], *blob) for label, (blob, _) in parts.items()))

    def create(later: float) -> None:
        requests.start(later, "create", manifest_name(number), collect, manifest.pack())

    def collect(_: Answer, later: float) -> None:
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

    What is missing was deleted while it was being read: then there is a newer one.
    """

    requests: Requests
    start: Manifest
    """The state before the first round, from run.json."""
    least: int
    then: Callable[[Manifest | None, float], None]
    _incomplete: int = -1
    _waiting: dict[str, Part] = field(default_factory=dict)

    def begin(self, now: float) -> None:
        self.requests.start(now, "list", SNAPSHOTS, self._on_names)

    def _on_names(self, answer: Answer, now: float) -> str | None:
        newest = max(_complete(answer.value), default=0)
        if newest < self.least:
            self.then(None, now)
        elif newest == self._incomplete:
            self._incomplete = -1
            return f"snapshot {newest} is not complete, and there is no newer one"
        elif newest == 0:
            self._get_parts(self.start, now)
        else:
            self.requests.start(now, "get", manifest_name(newest), partial(self._on_manifest, newest))
        return None

    def _on_manifest(self, number: int, answer: Answer, now: float) -> None:
        if answer.status == "missing":
            self._again(number, now)
            return
        manifest = Manifest.parse(answer.value, manifest_name(number))
        if manifest.round != number:
            raise MismatchError(f"{manifest_name(number)} is the manifest of snapshot {manifest.round}")
        self._get_parts(manifest, now)

    def _get_parts(self, manifest: Manifest, now: float) -> None:
        self._waiting = {part.name: part for part in manifest.parts}
        for part in manifest.parts:
            self.requests.start(now, "get", part.name, partial(self._on_part, manifest, part), limit=part.num_bytes)

    def _on_part(self, manifest: Manifest, part: Part, answer: Answer, now: float) -> str | None:
        if self._waiting.get(part.name) is not part:
            return None  # of an attempt that was given up
        if answer.status == "missing":
            self._waiting = {}
            self._again(manifest.round, now)
        elif answer.value != (part.num_bytes, part.sha256):
            return f"it is {answer.value or answer.status}, and the manifest of snapshot {manifest.round} says {part}"
        else:
            del self._waiting[part.name]
            if not self._waiting:
                self.then(manifest, now)
        return None

    def _again(self, incomplete: int, now: float) -> None:
        self._incomplete = incomplete
        self.begin(now)


def _complete(names: Iterable[str]) -> list[int]:
    """The rounds of snapshots whose manifest is there."""
    return [number for name in names if (number := round_of(name)) is not None and name == manifest_name(number)]
