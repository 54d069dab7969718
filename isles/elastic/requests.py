"""Store operations in flight: what the protocol asks of a store, and how it bears a bad one.

A driver takes operations from `ready`, performs them in any order and at the same time, and brings every answer back,
late if need be. An operation that could not be performed, or whose answer was lost, is started again after a pause that
doubles each time. So an operation may be performed twice.

Put-if-absent ("create") needs more care. That a name is taken (409, 412) can mean three things: somebody else was
first; our own first attempt was, and its answer was lost; or the store has refused and has nothing. So whoever is told
"exists" is told what is there, and a create of a name that nothing has is tried again.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from isles.elastic.decisions import Settings
from isles.elastic.documents import MAX_DOCUMENT_BYTES, DamagedError
from isles.elastic.objects import ROUNDS
from isles.wire.world import LostPeerError, MismatchError

LEAST_ATTEMPTS = 5
"""Before an operation is given up, however long it took: the process may have slept."""

MOST_DOUBLINGS = 30
"""Of a pause: beyond that the number would be too large for a float one day."""

Kind = Literal["get", "put", "create", "list", "delete"]
Status = Literal["ok", "exists", "missing", "again", "damaged", "failed"]


class Answer(NamedTuple):
    """How an operation ended.

    ok        done. Value of a get: the bytes of a document; a `Contribution` for a payload and a `Blob` for a part of a
              snapshot, whose bytes the driver keeps. Of a list: the names, in any order.
    exists    a create found the name taken (409, 412). The protocol gets what is there as the value
    missing   nothing has this name
    again     nobody knows whether it was done: time-out, lost answer, 429, 500, 503
    damaged   what was read is not what was written: a wrong checksum, or a wrong key. A payload counts as not there,
              anything else is read again a few times, and is an error then
    failed    no use to try again: no such bucket, no rights, larger than `limit`
    """

    status: Status
    value: Any = None


@dataclass(eq=False, slots=True)
class Operation:
    """One request to the store."""

    kind: Kind
    name: str
    """Of the object; of a list, the prefix."""
    body: Any = None
    """What to put or create: bytes, or whatever the driver handed in."""
    limit: int = MAX_DOCUMENT_BYTES
    """The most bytes that a get may answer with. Compare with the size that the store states, before reading."""


def perform(store: dict[str, Any], operation: Operation) -> Answer:
    """What the operations mean, on a store that is a dictionary.

    >>> store = {"a/1": b"one"}
    >>> [perform(store, Operation(kind, "a/1", b"two")).status for kind in ("create", "put", "delete", "get")], store
    (['exists', 'ok', 'ok', 'missing'], {})
    """
    kind, name = operation.kind, operation.name
    if kind == "list":
        return Answer("ok", [each for each in store if each.startswith(name)])
    if kind == "get":
        return Answer("ok", store[name]) if name in store else Answer("missing")
    if kind == "create" and name in store:
        return Answer("exists")
    if kind == "delete":
        store.pop(name, None)
    else:
        store[name] = operation.body
    return Answer("ok")


Then = Callable[[Answer, float], str | None]
"""Called with the answer and the time. Returns None, or why the answer is of no use: the operation starts again."""


@dataclass(slots=True)
class _Pending:
    then: Then
    since: float
    attempts: int = 0


class Requests:
    """Starts operations, starts them again, and calls back when they have ended.

    The callback sees "ok", "exists", "missing" and, of payloads, "damaged"; the rest is dealt with here, and so is a
    callback that raises `DamagedError`. An operation that has been of no use for `timeout` seconds is an error.
    """

    def __init__(self, settings: Settings, seed: str) -> None:
        self.ready: list[Operation] = []
        self._settings = settings
        self._pending: dict[Operation, _Pending] = {}
        self._later: list[tuple[float, int, Operation]] = []
        self._order, self._random = itertools.count(), random.Random(seed)

    def start(
        self, now: float, kind: Kind, name: str, then: Then, body: Any = None, limit: int = MAX_DOCUMENT_BYTES
    ) -> None:
        operation = Operation(kind, name, body, limit)
        self._pending[operation] = _Pending(then, now)
        self.ready.append(operation)

    def answer(self, operation: Operation, answer: Answer, now: float) -> None:
        """Takes in an answer. The second one to an operation that a store answers twice is dropped."""
        pending = self._pending.get(operation)
        if pending is None:
            return
        if answer.status == "failed":
            raise LostPeerError(f"the store refuses to {operation.kind} {operation.name}: {answer.value}")
        damaged = answer.status == "damaged" and not operation.name.startswith(ROUNDS)
        if damaged and pending.attempts + 1 >= LEAST_ATTEMPTS:
            raise MismatchError(str(answer.value))
        del self._pending[operation]
        if answer.status == "exists":
            self.start(now, "get", operation.name, partial(self._on_there, operation, pending))
            return
        try:
            again = damaged or answer.status == "again"
            useless = (answer.value or "no answer") if again else pending.then(answer, now)
        except DamagedError as error:
            useless = str(error)
        if useless:
            self._start_again(operation, pending, useless, now)

    def _on_there(self, create: Operation, pending: _Pending, answer: Answer, now: float) -> str | None:
        """What has the name that a create found taken."""
        if answer.status == "ok":
            return pending.then(Answer("exists", answer.value), now)
        self._start_again(create, pending, "the store says that it exists, and has nothing of this name", now)
        return None

    def wake(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            operation = heapq.heappop(self._later)[2]
            if operation in self._pending:
                self.ready.append(operation)

    @property
    def wake_at(self) -> float:
        return self._later[0][0] if self._later else math.inf

    def _start_again(self, operation: Operation, pending: _Pending, why: str, now: float) -> None:
        pending.attempts += 1
        seconds, settings = now - pending.since, self._settings
        if seconds > settings.timeout and pending.attempts >= LEAST_ATTEMPTS:
            tried = f"{operation.kind} {operation.name} has failed {pending.attempts} times in {seconds:.0f} s"
            raise LostPeerError(f"{tried}: {why}")
        self._pending[operation] = pending
        pause = min(settings.longest_backoff, settings.backoff * 2 ** min(pending.attempts - 1, MOST_DOUBLINGS))
        heapq.heappush(self._later, (now + pause * self._random.uniform(0.5, 1.0), next(self._order), operation))
