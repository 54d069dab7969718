"""A queue of events, and a link that is shared evenly: what `isles.plan.store` simulates on."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from isles.plan.exchange import FRAMING

Action = Callable[..., Any]


class Events:
    """What will happen, in the order of time.

    >>> events, seen = Events(), []
    >>> for seconds in (3.0, 1.0):
    ...     events.at(seconds, seen.append, seconds)
    >>> events.go_on()
    >>> events.now, seen
    (1.0, [1.0])
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Calls it then."""
        heapq.heappush(self._queue, (time, next(self._order), action, arguments))

    def go_on(self) -> None:
        """To the next event."""
        self.now, _, action, arguments = heapq.heappop(self._queue)
        action(*arguments)


class SharedLink:
    """One direction of a link. Those who are on it get equal shares: if `work` is what each of them has got since the
    start, one who comes at `work` w with n bytes is through at w + n.

    >>> events = Events()
    >>> link = SharedLink(events, 8 * FRAMING * 100)  # 100 bytes of payload a second
    >>> for num_bytes in (100, 300):
    ...     link.carry(num_bytes, lambda num_bytes: print(num_bytes, events.now), num_bytes)
    >>> for _ in range(3):
    ...     events.go_on()
    100 2.0
    300 4.0
    """

    def __init__(self, events: Events, bits_per_second: float) -> None:
        self._events, self._rate = events, bits_per_second / 8 / FRAMING
        self._work = self._time = 0.0
        self._on_it: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._version = 0

    def carry(self, num_bytes: int, then: Action, *arguments: Any) -> None:
        """Calls back when so many bytes are through; at once for none."""
        if not num_bytes:
            then(*arguments)
            return
        self._go_on()
        heapq.heappush(self._on_it, (self._work + num_bytes, next(self._order), then, arguments))
        self._expect()

    def _go_on(self) -> None:
        if self._on_it:
            self._work += (self._events.now - self._time) * self._rate / len(self._on_it)
        self._time = self._events.now

    def _expect(self) -> None:
        self._version += 1
        if self._on_it:
            seconds = max(0.0, self._on_it[0][0] - self._work) * len(self._on_it) / self._rate
            self._events.at(self._time + seconds, self._arrive, self._version)

    def _arrive(self, version: int) -> None:
        if version == self._version:  # else others have come since
            self._go_on()
            self._work, _, then, arguments = heapq.heappop(self._on_it)
            self._expect()
            then(*arguments)
