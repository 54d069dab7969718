"""How late an island's payloads come, where rounds are completed without them.

A round is open until its seal is created, at a moment that only the store knows. An island looks for the seal again and
again, so it knows a moment at which the round was still open: its last look that found neither this seal nor an earlier
one. From then until its payload was stored is the lateness of the payload. With so much more patience the others would
have had it in time. It is too much by the time between two looks at most, unless the island stood still in between.

A payload that is left out is often still on its way when its round is applied. Then the lateness of the last one before
it is told, as soon as there is one. Nothing is asked of the store for this, and no decision depends on it.
"""

from __future__ import annotations

from isles.elastic.objects import ROUNDS, SEALS, round_of
from isles.elastic.requests import Answer, Operation

MOST_LEFT_OUT = 64
"""Rounds whose payloads are on their way. Older ones are given up."""


class Lateness:
    """Told of every operation that has ended. Not for several threads at once."""

    def __init__(self) -> None:
        self._open: dict[int, float] = {}
        """When a look began that did not find the seal of a round: it and all later ones were open then."""
        self._stored: dict[int, float] = {}
        """When the island's payload of a round was stored."""
        self._left_out: list[int] = []
        """Rounds without this island whose lateness is not known yet."""
        self._last: float | None = None

    def note(self, operation: Operation, answer: Answer, begin: float, end: float) -> None:
        """An operation has taken from `begin` until `end`."""
        name = operation.name
        if operation.kind == "get" and answer.status == "missing" and name.startswith(SEALS):
            number = int(name[len(SEALS) :].partition(".")[0])
            self._open[number] = max(begin, self._open.get(number, begin))
        elif operation.kind == "put" and answer.status == "ok" and name.startswith(ROUNDS):
            self._stored[round_of(name) or 0] = end

    def left_out(self, number: int) -> float | None:
        """Round `number` was completed without what the island has sent. Seconds, or None if nothing is known yet.

        >>> from isles.elastic.objects import payload_name, seal_name
        >>> lateness = Lateness()
        >>> for time in (1.0, 2.0):
        ...     lateness.note(Operation("get", seal_name(7)), Answer("missing"), time, time + 0.1)
        >>> lateness.left_out(7)  # the payload is on its way
        >>> lateness.note(Operation("put", payload_name(7, 1)), Answer("ok"), 0.5, 5.0)
        >>> lateness.left_out(8)
        3.0
        """
        self._left_out.append(number)
        for each in [each for each in self._left_out if each in self._stored]:
            looks = [began for round, began in self._open.items() if round <= each]
            if looks:
                self._last = max(0.0, self._stored[each] - max(looks))
            self._left_out.remove(each)
        return self._last

    def forget(self, number: int) -> None:
        """Rounds up to this one have been applied: only those are kept whose payloads are on their way."""
        del self._left_out[:-MOST_LEFT_OUT]
        oldest = min(self._left_out, default=number + 1)
        last = max((each for each in self._open if each < oldest), default=0)
        self._open = {each: began for each, began in self._open.items() if each >= last}
        self._stored = {each: stored for each, stored in self._stored.items() if each >= oldest}
