"""Reading a run: from its log of seals to decisions that the engine takes, in order.

A reader opens the run, takes the newest snapshot and replays the seals after it. A look brings the seals that are new
(`looks`). The payloads that a seal lists, and that have not been seen before, are fetched a few rounds ahead of the
engine; their digests must be those of the seal. At a round's apply step the engine takes the decision: who is in, in
which order, and whether this island is in itself. If not, it moves along with the global model, and its contribution
stays its own.

A payload that is missing is never skipped. It was deleted because a snapshot contains its round, so the reader takes
that snapshot, as a newcomer does, and keeps what it has learned. The seals tell it which of its payloads were counted
meanwhile.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from isles.elastic import snapshots
from isles.elastic.decisions import Apply, Decision, Load, Settings
from isles.elastic.joining import open_run
from isles.elastic.log import Log
from isles.elastic.looks import Looks
from isles.elastic.numbering import Numbering
from isles.elastic.objects import Contribution, Manifest, Run, payload_name, seal_name
from isles.elastic.requests import Answer, Operation, Requests
from isles.elastic.rounds import OpenRounds
from isles.wire.world import LostPeerError, MismatchError

ROUNDS_AHEAD = 4
"""Rounds whose payloads are read before the engine needs them, if not more are in flight: bounds memory."""


class Reader:
    """What an island does that only reads; `isles.elastic.protocol.Member` takes part as well.

    `own` says what this process would make if there were no run yet; `start` are the parts of `own.start`, by name.
    Call `wake` whenever `wake_at` is reached. After every call, and at the start, start what `operations()` gives.
    Errors are raised by whatever call meets them, and are final.
    """

    def __init__(
        self, own: Run, start: dict[str, Any], numbering: Numbering, settings: Settings, seed: str, now: float
    ) -> None:
        self.number: int | None = None
        """This island's number; another one when it comes back after a long absence."""
        self.joined = False
        self.taken = -1
        """The last round whose decision the engine has taken; -1 before it has loaded anything."""
        self.sealed: set[int] = set()
        """Rounds that this island has sealed and not taken yet."""
        self.log = Log(numbering)
        self._settings = settings
        self._requests = Requests(settings, seed)
        self._rounds = OpenRounds(self.log, max(ROUNDS_AHEAD, numbering.most_in_flight + 1))
        self._looks = Looks(self._requests, self.log, self._rounds, settings, now, self._looked)
        self._awaited = 0
        """The round at whose apply step the training loop is, or was."""
        self._first_state: Manifest | None = None
        self._search: snapshots.Search | None = None
        self._loaded: Manifest | None = None
        """A snapshot whose parts are there, for the engine to take."""
        open_run(self._requests, own, start, now, self._on_run)

    # ---- what a driver calls

    def operations(self) -> list[Operation]:
        """Store operations to start now."""
        ready, self._requests.ready = self._requests.ready, []
        return ready

    def answer(self, operation: Operation, answer: Answer, now: float) -> None:
        """The store has answered."""
        self._requests.answer(operation, answer, now)

    @property
    def wake_at(self) -> float:
        """When to call `wake`, if nothing else happens before."""
        return min(self._looks.at, self._requests.wake_at)

    def wake(self, now: float) -> None:
        """Time has passed."""
        self._requests.wake(now)
        if now >= self._looks.at:
            self._look(now)

    def wait(self, number: int, now: float) -> None:
        """The loop is at the apply step of a round, and will `take` until it has it."""
        if number > max(self.taken, self._awaited):
            self._awaited = number
            self._looks.soon(now)

    def take(self, number: int, now: float) -> list[Decision]:
        """Decisions up to round `number`, in order, as far as they are ready: all of them when `taken` says so."""
        decisions: list[Decision] = []
        while self.taken < number:
            if self._loaded is not None and self.log.tail >= self._loaded.round:
                decisions.append(self._load(self._loaded))
            elif self._loaded is None and self._rounds.is_fetched(self.taken + 1):
                decisions.append(self._apply(self.taken + 1))
            else:
                break
        if decisions:
            self._fetch(now)
            if not self.joined:
                self._looks.soon(now)
        return decisions

    def ready(self, number: int) -> tuple[Contribution, ...] | None:
        """The contributions of a round, in order, if it is sealed and all of them are here; else None."""
        return self.log[number].contributions if number > self.taken and self._rounds.is_fetched(number) else None

    # ---- snapshots

    def _on_run(self, run: Run, run_digest: str, now: float) -> None:
        self.log.begin(run_digest, run.gone_after)
        self._first_state = run.start
        self._find_snapshot(0, now)

    def _find_snapshot(self, least: int, now: float) -> None:
        """At the start, or because the payloads of round `least` have been deleted."""
        if self._search is None and self._first_state is not None:
            self._search = snapshots.Search(self._requests, self._first_state, least, self._on_snapshot)
            self._search.begin(now)

    def _on_snapshot(self, manifest: Manifest | None, now: float) -> None:
        self._search = None
        if manifest is None or manifest.round <= self.taken:
            return  # nothing newer, for now: the payload is asked for again, and so is this
        if self.taken < 0 and self._loaded is None:
            self.log.skip_to(manifest.round - self.log.gone_after)
        self._loaded, self._looks.found_time = manifest, now
        self._looks.soon(now)

    # ---- looking

    def _look(self, now: float) -> None:
        self._looks.begin(self.number, now, for_leavers=self.taken < self._awaited)

    def _looked(self, more: bool, now: float) -> None:
        """A look is over: go on with what was found, or look again later."""
        self._fetch(now)
        if more:
            self._look(now)
            return
        ahead = self._loaded.round if self._loaded is not None else 0
        if ahead > self.log.tail and now - self._looks.found_time > self._settings.timeout:
            there = f"and there is a snapshot of round {ahead}: seals must never be deleted"
            raise LostPeerError(f"{seal_name(self.log.tail + 1)} is missing, {there}")
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """There is nothing new in the store. Who only reads has joined when it has applied all there is."""
        if self.taken == self.log.tail:
            self.joined = True
        else:
            self._looks.later(math.inf, now)

    # ---- fetching and deciding

    def _fetch(self, now: float) -> None:
        """Gets the payloads of the next rounds that are sealed, so far as they have not been seen."""
        done = self.taken if self._loaded is None else self._loaded.round
        if done < 0:
            return
        for number in range(done + 1, min(self.log.tail, done + self._rounds.ahead) + 1):
            if self._rounds[number].fetching:
                continue
            self._rounds[number].fetching = True
            for listed in self._rounds.not_seen(number):
                then, limit = partial(self._on_fetched, number, listed), self._settings.max_payload_bytes
                self._requests.start(now, "get", payload_name(number, listed.island), then, limit=limit)

    def _on_fetched(self, number: int, listed: Contribution, answer: Answer, now: float) -> str | None:
        if number <= self.taken:
            return None
        if answer.status == "missing":
            return self._on_deleted(number, listed, now)
        if answer.value != listed:
            return f"seal {number} lists {listed}, and the payload is {answer.value or answer.status}"
        self._rounds[number].seen[listed.island] = listed
        return None

    def _on_deleted(self, number: int, listed: Contribution, now: float) -> str | None:
        """A payload is missing. A snapshot may have its round; until one does, there is nothing to go on with."""
        self._find_snapshot(number, now)
        return f"seal {number} lists island {listed.island}, its payload is missing, and no snapshot has the round"

    def _is_in(self, number: int) -> bool:
        sent = self._rounds[number].sent
        return sent is not None and sent.contribution.island in self.log[number].islands

    def _apply(self, number: int) -> Apply:
        seal, every = self.log[number], self._settings.snapshot_every
        turn = number % every == 0 and seal.islands[number // every % len(seal.islands)] == self.number
        here = (self._is_in(number), turn, seal.closing, number in self.sealed)
        decision = Apply(number, seal.contributions, self.log.digest(number), *here)
        self._forget(number)
        return decision

    def _load(self, manifest: Manifest) -> Load:
        number = manifest.round
        if number and manifest.seal != self.log.digest(number):
            raise MismatchError(
                f"the snapshot of round {number} belongs to another log: the digest of the seal differs"
            )
        decision = Load(manifest, tuple(k for k in sorted(self._rounds.sent()) if k <= number and self._is_in(k)))
        self._loaded = None
        self._forget(number)
        return decision

    def _forget(self, number: int) -> None:
        self.taken = number
        self.sealed = {k for k in self.sealed if k > number}
        self._rounds.forget(number)
        self.log.forget(number)
