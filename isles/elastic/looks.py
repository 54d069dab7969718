"""Looks: what an island asks the store again and again, beside the training loop.

A look is a batch of requests: the next seal; the announcement of the next newcomer; payloads, of those who are
expected, in the rounds that have begun and in the one after them; and, where the training loop waits, whether somebody
who is missing has left. It is over when all of them are answered. What is not there yet is asked for in the next look,
after a pause that grows with the time since the last find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from isles.elastic.decisions import Settings
from isles.elastic.documents import MAX_DOCUMENT_BYTES
from isles.elastic.log import Log
from isles.elastic.objects import Announcement, Seal, digest, island_name, left_name, payload_name, seal_name
from isles.elastic.requests import Answer, Kind, Requests, Then
from isles.elastic.rounds import OpenRounds

MOST_SEALS = 16
"""That a look asks for at once, while an island catches up."""


class Looks:
    """The looks of one island. `then` is called at the end of each, with whether there may be more to find at once."""

    def __init__(
        self,
        requests: Requests,
        log: Log,
        rounds: OpenRounds,
        settings: Settings,
        now: float,
        then: Callable[[bool, float], None],
    ) -> None:
        self.at = math.inf
        """When the next one begins."""
        self.left_at: dict[int, int] = {}
        """The first round without them, of islands that have left."""
        self._requests, self._log, self._rounds, self._settings, self._then = requests, log, rounds, settings, then
        self._time = now
        self.found_time = now
        """When something was last found."""
        self._unanswered = 0
        self._numbers: list[int] = []
        """The rounds whose payloads are looked for."""
        self._seals: dict[int, tuple[Seal, str]] = {}
        """Found, with their digests."""
        self._num_seals = 1
        """How many are asked for."""
        self._newcomers = False

    def soon(self, now: float) -> None:
        self.at = min(self.at, now)

    def later(self, deadline: float, now: float) -> None:
        """After a pause, or at the deadline if that is earlier and still to come."""
        pause = max(self._settings.poll, (now - self.found_time) / 4)
        self.at = min(now + min(pause, self._settings.longest_poll), deadline if deadline > now else math.inf)

    def begin(self, own: int | None, now: float, *, for_leavers: bool) -> None:
        """Asks for all that could be there. `own` is this island's number: without one it reads the log alone."""
        self.at = math.inf
        if self._unanswered:
            return
        self._time = now
        following = self._log.tail + 1
        for number in range(following, following + self._num_seals):
            self.ask(now, seal_name(number), partial(self._on_seal, number))
        if own is None:
            return
        self.ask(now, island_name(self._log.known), self._on_announcement)
        self._numbers, islands = self._rounds.begun_and_next(), self._log.expected
        for number in self._numbers:
            self.ask_for_payloads(number, islands, own, now)
            islands = tuple(each for each in islands if each in self._rounds[number].seen)  # who sends, sends in order
        if for_leavers and now - self.found_time > 4 * self._settings.poll:
            there = {own, *self._rounds[following].seen, *self.left_at}
            for island in [each for each in self._log.expected if each not in there]:
                self.ask(now, left_name(island), partial(self._on_leave, island))

    def ask(
        self, now: float, name: str, then: Then, kind: Kind = "get", body: Any = None, limit: int = MAX_DOCUMENT_BYTES
    ) -> None:
        """Starts an operation as a part of the present look."""
        self._unanswered += 1

        def answered(answer: Answer, later: float) -> str | None:
            useless = then(answer, later)
            if not useless:
                self._unanswered -= 1
                if not self._unanswered:
                    self._end(later)
            return useless

        self._requests.start(now, kind, name, answered, body, limit)

    def ask_for_payloads(self, number: int, islands: Iterable[int], own: int, now: float) -> bool:
        """Those that have not been seen; returns whether there are any."""
        wanted = [island for island in islands if island not in self._rounds[number].seen and island != own]
        for island in wanted:
            then, limit = partial(self._on_payload, number), self._settings.max_payload_bytes
            self.ask(now, payload_name(number, island), then, limit=limit)
        return bool(wanted)

    def found_seal(self, number: int, data: bytes) -> None:
        self._seals[number] = Seal.parse(data, seal_name(number)), digest(data)

    def _on_seal(self, number: int, answer: Answer, now: float) -> None:
        if answer.status == "ok":
            self.found_seal(number, answer.value)

    def _on_announcement(self, answer: Answer, now: float) -> None:
        if answer.status == "ok":
            self._log.known += 1
            self._newcomers = True

    def _on_leave(self, island: int, answer: Answer, now: float) -> None:
        if answer.status == "ok":
            self.left_at[island] = Announcement.parse(answer.value, left_name(island)).round

    def _on_payload(self, number: int, answer: Answer, now: float) -> None:
        """A payload that is damaged counts as not there."""
        if answer.status == "ok":
            self._rounds.see(number, answer.value)
            self.found_time = now

    def _end(self, now: float) -> None:
        """All answers are here: seals join the log."""
        tail, found, more = self._log.tail, self._seals, self._newcomers
        while (following := self._log.tail + 1) in found:
            self._log.append(*found[following])
        self._num_seals = min(MOST_SEALS, 2 * self._num_seals) if self._log.tail > tail else 1
        for number in self._numbers:
            if self._rounds[number].began == math.inf:
                self._rounds[number].absent_at = self._time
        self._numbers, self._seals, self._newcomers = [], {}, False
        if more := more or self._log.tail > tail:
            self.found_time = now
        self._then(more, now)
