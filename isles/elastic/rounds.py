"""Rounds that an island has not applied yet: what it has sent to them, and what it has seen of the others.

Payloads are known here by what they are (`Contribution`). A driver keeps their bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from isles.elastic.log import Log
from isles.elastic.objects import Contribution


@dataclass
class Sent:
    """The island's own payload of a round."""

    contribution: Contribution
    body: Any
    time: float
    stored: bool = False


@dataclass(slots=True)
class Round:
    """What an island knows of one round."""

    seen: dict[int, Contribution] = field(default_factory=dict)
    """Payloads that have been read, by island."""
    began: float = math.inf
    """When others began to send it, or earlier: the last look that found nothing."""
    absent_at: float = -math.inf
    sending: bool = False
    """The training loop has sent it; `sent` follows when the payload is made."""
    sent: Sent | None = None
    swept: bool = False
    """Those who are looked for and not waited for have been asked for."""
    fetching: bool = False


class OpenRounds:
    """The rounds after the last one that was applied, by number. One that is asked for is made."""

    def __init__(self, log: Log, ahead: int) -> None:
        self.ahead = ahead
        """Rounds whose payloads are read before the engine needs them: bounds memory."""
        self._log = log
        self._rounds: dict[int, Round] = {}

    def __getitem__(self, number: int) -> Round:
        found = self._rounds.get(number)
        if found is None:
            found = self._rounds[number] = Round()
        return found

    def __len__(self) -> int:
        return len(self._rounds)

    def sent(self) -> dict[int, Sent]:
        """This island's payloads, by round."""
        return {number: each.sent for number, each in self._rounds.items() if each.sent is not None}

    @property
    def last_sending(self) -> int:
        """The last round that the training loop has sent, made or not."""
        return max((number for number, each in self._rounds.items() if each.sending), default=0)

    def begun_and_next(self) -> list[int]:
        """The rounds that are not sealed and that somebody has sent, and the one after them."""
        numbers = []
        for number in range(self._log.tail + 1, self._log.tail + 1 + self.ahead):
            numbers.append(number)
            if not self[number].sending and self[number].began == math.inf:
                break
        return numbers

    def see(self, number: int, payload: Contribution) -> None:
        """A payload of another island is there."""
        found = self[number]
        found.seen[payload.island] = payload
        if not payload.closing:  # an island that ends sends before its time: nobody has to hurry for that
            before = self._rounds.get(number - 1, found).began  # who sends, sends in order
            found.began = min(found.began, max(found.absent_at, before if before < math.inf else -math.inf))

    def not_seen(self, number: int) -> list[Contribution]:
        """Payloads that a seal lists and that are not here."""
        found = self[number]
        own = found.sent and found.sent.contribution
        return [each for each in self._log[number].contributions if each not in (found.seen.get(each.island), own)]

    def is_fetched(self, number: int) -> bool:
        """Whether a round is sealed, and all its payloads are here."""
        return 0 < number <= self._log.tail and not self.not_seen(number)

    def forget(self, number: int) -> None:
        """Rounds up to this one have been applied."""
        self._rounds = {k: each for k, each in self._rounds.items() if k > number}
