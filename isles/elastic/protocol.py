"""One island: a state machine that joins a run, takes part in its rounds, and decides nothing alone.

It has no threads, no clock and no store in it. A driver tells it what the training loop has reached and what the store
has answered, starts the store operations that it asks for, and hands its decisions to the engine. The simulator is one
such driver; a world with threads and a store client is another.

The life of round K, seen from one island:

    send     The loop reaches the round's place in the schedule. The payload is put under a name that only this island
             writes: rounds/K/N.
    look     Beside the loop: is there a seal of K? Which payloads of K are there? Has anybody new joined? Payloads that
             are found are read at once; they will be needed.
    seal     All islands that are expected are there: create seals/K with them. Some are missing: only when the loop is
             about to need the round, and `patience` has passed since this island sent; then with those that are there,
             if they are `quorum`. Whoever is first decides for all. Nobody seals K before having read seal K - 1.
    read     Seal K joins the log, its payloads are fetched, and the engine takes the decision (`reader`).

Being in a seal is the only sign of life. Who is missing is waited for once, and looked for in the next rounds; after
that it is gone, and takes a new number when it comes back (`log`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from isles.elastic import snapshots
from isles.elastic.clock import jump
from isles.elastic.decisions import Apply, Decision, Settings
from isles.elastic.joining import claim
from isles.elastic.numbering import Numbering
from isles.elastic.objects import Announcement, Contribution, Run, Seal, left_name, payload_name, seal_name
from isles.elastic.reader import Reader
from isles.elastic.requests import Answer, Then
from isles.elastic.rounds import Sent

NOBODY = -1


class Member(Reader):
    """One island's part in the protocol.

    `token` is unlike that of any other process, ever. Who observes reads the log to its end, and takes no number. How
    to drive it, and the other arguments, are those of a `Reader`.
    """

    def __init__(
        self,
        own: Run,
        start: dict[str, Any],
        numbering: Numbering,
        settings: Settings,
        token: str,
        now: float,
        *,
        observe: bool = False,
    ) -> None:
        super().__init__(own, start, numbering, settings, token, now)
        self.left = self._saving = False
        self.clock = 0
        self.patience = settings.patience
        """Seconds; may be changed at any time."""
        self._numbering, self._token, self._observe = numbering, token, observe
        self._loop_time = 0.0
        """When the training loop last began a step."""

    # ---- what a driver calls

    def reach(self, clock: int, now: float) -> int:
        """The training loop has taken a step. Returns the clock to go on with: this one, or where it has to jump.

        The engine passes through all clocks in between and does what is due at each, without taking steps.
        """
        step_seconds, self._loop_time = now - self._loop_time, now
        self.clock = jump(clock, self.log, self._rounds, self.number, self.patience, step_seconds, now)
        return self.clock

    def wants(self, number: int) -> bool:
        """Whether a payload for this round may still count: do not encode it otherwise."""
        return number > self.log.tail and not self.left

    def begin(self, number: int, now: float) -> None:
        """The loop sends a round that it `wants`. The payload is still being made: `send` follows."""
        self._rounds[number].sending = True
        if self.number not in self.log.wanted:
            self._looks.soon(now)  # which finds that it needs a new number

    def send(self, number: int, contribution: Contribution, body: Any, now: float) -> None:
        """The payload of a round that the loop sends. The contribution's island is filled in here."""
        if number <= self.taken:
            return  # a snapshot has taken its place meanwhile
        self.begin(number, now)
        self._rounds[number].sent = Sent(replace(contribution, island=NOBODY), body, now)
        self._upload(number, now)

    def take(self, number: int, now: float) -> list[Decision]:
        """As a reader does. A step begins when the loop has what it waits for."""
        decisions = super().take(number, now)
        if self.taken >= self._awaited:
            self._loop_time = now
        return decisions

    def finish(self, last: int, now: float) -> None:
        """No more steps: rounds up to `last` were sent before their time, and are waited for from now on."""
        self.clock = max(self.clock, self._numbering.place(last).apply_clock if last else 0)
        self._looks.soon(now)

    def save(self, after: Apply, parts: snapshots.Parts, now: float) -> None:
        """Writes a snapshot of the state after a round. One at a time: each holds the whole state in memory."""
        if not self._saving:
            self._saving = True
            snapshots.save(self._requests, after, parts, now, self._saved)

    def _saved(self) -> None:
        self._saving = False

    def leave(self, now: float) -> None:
        """Nothing more will be sent. `left` is true when the store knows."""
        if self.number is None:
            self.left = True
            return
        stored = [number for number, sent in self._rounds.sent().items() if sent.stored]
        note = Announcement(self._token, max([*stored, self.log.tail]) + 1)
        self._requests.start(now, "put", left_name(self.number), self._on_left, note.pack())

    def _on_left(self, answer: Answer, now: float) -> None:
        self.left = True

    # ---- joining and sending

    def _join(self, island: int, now: float) -> None:
        self.number, self.log.known = island, max(self.log.known, island + 1)
        if not self.joined:
            self.joined, self.clock, self._loop_time = True, self._numbering.clock_after(self.log.tail), now
        for number in [number for number in self._rounds.sent() if number > self.log.tail]:
            self._upload(number, now)

    def _upload(self, number: int, now: float) -> None:
        """Puts the payload of a round, once this island has a number under which others look for it."""
        sent = self._rounds[number].sent
        if self.number is None or self.number not in self.log.wanted:
            return  # `_join` follows
        assert sent is not None
        sent.contribution, sent.stored = replace(sent.contribution, island=self.number), False
        then = partial(self._on_stored, sent, self.number)
        self._requests.start(now, "put", payload_name(number, self.number), then, sent.body)

    def _on_stored(self, sent: Sent, island: int, answer: Answer, now: float) -> None:
        if island == self.number:  # else it has a new number, and the payload is on its way once more
            sent.stored = True
            self._looks.soon(now)

    # ---- after a look

    def _go_on(self, now: float) -> None:
        if self._observe:
            super()._go_on(now)
        elif self._is_lost():
            self.number = None
            claim(self._looks, self.log.known, Announcement(self._token, self.log.tail + 1), now, self._join)
        elif not self._seal(now):
            sent = self._rounds[self.log.tail + 1].sent
            self._looks.later(sent.time + self.patience if sent else math.inf, now)

    def _is_lost(self) -> bool:
        """Whether this island needs a number: nobody looks for the one it has, and it has something to send.

        Others wait for whoever takes one. So an island in a long step takes none before the step is over.
        """
        if self.number in self.log.wanted:
            return False
        if not self.joined:
            return self.taken == self.log.tail
        return self._rounds.last_sending > self.log.tail

    def _seal(self, now: float) -> bool:
        """Seals the next round, if that may be done."""
        number, log = self.log.tail + 1, self.log
        found = self._rounds[number]
        if found.sent is None or not found.sent.stored or found.sent.contribution.island != self.number:
            return False
        there = {**found.seen, self.number: found.sent.contribution}
        contributions = tuple(there[island] for island in log.wanted if island in there)
        absent = [island for island in log.expected if island not in there]
        missing = tuple(island for island in absent if self._looks.left_at.get(island, math.inf) > number)
        if len(contributions) < self._settings.quorum or (missing and not self._is_overdue(number, found.sent, now)):
            return False
        if not found.swept:
            found.swept = True
            if self._looks.ask_for_payloads(number, log.wanted, self.number, now):
                return True
        fragment, _, clock, _ = self._numbering.place(number)
        data = Seal(number, fragment, clock, contributions, missing, log.known, log.digest(number - 1)).pack()

        def created(answer: Answer, later: float) -> None:
            self._looks.found_seal(number, answer.value or data)
            if answer.status == "ok":
                self.sealed.add(number)

        self._create_seal(number, data, created, now)
        return True

    def _create_seal(self, number: int, data: bytes, then: Then, now: float) -> None:
        self._looks.ask(now, seal_name(number), then, "create", data)

    def _is_overdue(self, number: int, sent: Sent, now: float) -> bool:
        """Whether those who are missing have had their time, and the training loop is about to need the round."""
        due = self.clock + 1 >= self._numbering.place(number).apply_clock
        return due and now >= sent.time + self.patience
