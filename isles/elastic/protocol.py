"""One island: a state machine that joins a run, takes part in its rounds, and decides nothing alone.

It has no threads, no clock and no store in it. A driver tells it what the training loop has reached and what the store
has answered, starts the store operations that it asks for, and hands its decisions to the engine. The simulator is one
such driver; a world with threads and a store client is another.

The life of round K, seen from one island:

    send     The loop reaches the round's place in the schedule. The payload is put under a name that only this island
             writes: rounds/K/N.
    look     Beside the loop, every `poll` seconds: is there a seal of K? Which payloads of K are there? Has anybody new
             joined? Payloads that are found are read at once; they will be needed.
    seal     All islands that are expected are there: create seals/K with them. Some are missing: only when the loop is
             about to need the round, and `patience` has passed since this island sent; then with those that are there,
             if they are `quorum`. Whoever is first decides for all. Nobody seals K before having read seal K - 1.
    read     Seal K joins the log, after it has been checked against the digest of the seal before it.
    fetch    Payloads that the seal lists and this island has not read yet. Their digests must be those of the seal.
    take     At the round's apply step the engine takes the decision: who is in, in which order, and whether it is in
             itself. If not, it moves along with the global model and its contribution stays its own.

Who is *expected* in round K follows from the log: the islands in seal K - 1, and those who have joined since. An island
that was waited for in vain is still looked for in the next `gone_after` rounds, but not waited for; after that it is
gone, and takes a new number when it comes back. Being in a seal is the only sign of life.

The clock counts inner steps. It jumps forward in three cases only. An island that reads the seal of a round that it has
not even sent goes to where the log is. One that sees that others have sent a round, and would come too late with one
more step, goes to the send of that round at once, with the steps that it has. One that nobody waits for any more goes
to the first round that nobody has sent, so that its payload is there when the others look: then it is back. With
unlimited patience and a quorum of all islands none of this happens, and all is as in a world of a fixed size.

A newcomer takes the newest snapshot, replays the seals after it, and only then takes a number: from its announcement on
it can send. An island that was away until payloads were deleted does the same, but keeps what it has learned. The
seals tell it which of its payloads were counted meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from isles.elastic import snapshots
from isles.elastic.decisions import Apply, Decision, Load, Settings
from isles.elastic.documents import MAX_DOCUMENT_BYTES
from isles.elastic.log import Log
from isles.elastic.numbering import Numbering
from isles.elastic.objects import (
    RUN,
    Announcement,
    Blob,
    Contribution,
    Manifest,
    Part,
    Run,
    Seal,
    digest,
    island_name,
    left_name,
    part_name,
    payload_name,
    seal_name,
)
from isles.elastic.requests import Answer, Kind, Operation, Requests, Then
from isles.wire.world import MismatchError

NOBODY = -1
MOST_SEALS = 16
"""That a look asks for at once, while an island catches up."""


@dataclass
class _Sent:
    """The island's own payload of a round."""

    contribution: Contribution
    body: Any
    time: float
    stored: bool = False


@dataclass
class _Round:
    """What an island knows of a round that its engine has not applied."""

    seen: dict[int, Contribution] = field(default_factory=dict)
    """Payloads that have been read, by island."""
    began: float = math.inf
    """When others began to send it, or earlier: the last look that found nothing."""
    absent_at: float = -math.inf
    sent: _Sent | None = None
    swept: bool = False
    """Those who are looked for and not waited for have been asked for."""
    fetching: bool = False


class Member:
    """One island's part in the protocol; see the module's docstring.

    `own` says what this process would make if there were no run yet; `start` are the parts of `own.start`, by name.
    `token` is unlike that of any other process, ever. Who observes reads the log to its end, and takes no number. Call
    `wake` whenever `wake_at` is reached. After every call, and at the start, start what `operations()` gives. Errors
    are raised by whatever call meets them, and are final.
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
        self._observe = observe
        self.number: int | None = None
        """This island's number; another one when it comes back after a long absence."""
        self.joined = self.left = False
        self.clock = 0
        self.patience = settings.patience
        """Seconds; may be changed at any time."""
        self.sealed: set[int] = set()
        """Rounds that this island has sealed and not taken yet."""
        self.taken = -1
        """The last round whose decision the engine has taken; -1 before it has loaded anything."""
        self.log = Log(numbering)
        self._own, self._start, self._numbering, self._settings, self._token = own, start, numbering, settings, token
        self._requests = Requests(settings.backoff, settings.longest_backoff, settings.timeout, token)
        self._run: Run | None = None
        self._run_digest = ""
        self._search: snapshots.Search | None = None
        self._loaded: Manifest | None = None
        """A snapshot whose parts are there, for the engine to take."""
        self._rounds: dict[int, _Round] = {}
        self._left_at: dict[int, int] = {}
        """The first round without them, of islands that have left."""
        self._ahead = max(settings.rounds_ahead, numbering.most_in_flight + 1)
        self._look_at, self._look_time, self._found_time = math.inf, now, now
        self._looked_for: list[int] = []
        """The rounds of the present look."""
        self._unanswered = 0
        """Answers that the present look still waits for."""
        self._found: dict[int, tuple[Seal, str]] = {}
        """Seals that it has found, with their digests."""
        self._newcomers = False
        """It has found an announcement."""
        self._stride = 1
        """How many seals it asks for."""
        self._loop_time = 0.0
        """When the training loop last began a step."""
        self._awaited = 0
        """The round at whose apply step the training loop is, or was."""
        self._requests.start(now, "get", RUN, self._on_run)

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
        return min(self._look_at, self._requests.wake_at)

    def wake(self, now: float) -> None:
        """Time has passed."""
        self._requests.wake(now)
        if now >= self._look_at:
            self._look(now)

    def reach(self, clock: int, now: float) -> int:
        """The training loop has taken a step. Returns the clock to go on with: this one, or where it has to jump.

        The engine passes through all clocks in between and does what is due at each, without taking steps.
        """
        step_seconds, self._loop_time = now - self._loop_time, now
        self.clock = self._jump(clock, step_seconds, now)
        return self.clock

    def wants(self, number: int) -> bool:
        """Whether a payload for this round may still count: do not encode it otherwise."""
        return number > self.log.tail and not self.left

    def send(self, number: int, contribution: Contribution, body: Any, now: float) -> None:
        """The loop sends a round that it `wants`. The contribution's island is filled in here."""
        self._round(number).sent = _Sent(replace(contribution, island=NOBODY), body, now)
        self._upload(number, now)

    def wait(self, number: int, now: float) -> None:
        """The loop is at the apply step of a round, and will `take` until it has it."""
        if number > max(self.taken, self._awaited):
            self._awaited = number
            self._look_soon(now)

    def take(self, number: int, now: float) -> list[Decision]:
        """Decisions up to round `number`, in order, as far as they are ready: all of them when `taken` says so."""
        decisions: list[Decision] = []
        while self.taken < number:
            if self._loaded is not None and self.log.tail >= self._loaded.round:
                decisions.append(self._load(self._loaded))
            elif self._loaded is None and self._is_fetched(self.taken + 1):
                decisions.append(self._apply(self.taken + 1))
            else:
                break
        if decisions:
            self._fetch(now)
        if decisions and not self.joined:
            self._look_soon(now)
        if self.taken >= self._awaited:
            self._loop_time = now
        return decisions

    def ready(self, number: int) -> tuple[Contribution, ...] | None:
        """The contributions of a round, in order, if it is sealed and all of them are here; else None."""
        return self.log[number].contributions if number > self.taken and self._is_fetched(number) else None

    def finish(self, last: int, now: float) -> None:
        """No more steps: rounds up to `last` were sent before their time, and are waited for from now on."""
        self.clock = max(self.clock, self._numbering.place(last).apply_clock if last else 0)
        self._look_soon(now)

    def save(self, after: Apply, parts: dict[str, tuple[Blob, Any]], now: float) -> None:
        """Writes a snapshot of the state after a round: for each part its label, what it is, and its body."""
        names = {label: part_name(after.number, label, blob.sha256) for label, (blob, _) in parts.items()}
        manifest = Manifest(after.number, after.seal, tuple(Part(names[x], *blob) for x, (blob, _) in parts.items()))
        snapshots.save(self._requests, manifest, {names[x]: body for x, (_, body) in parts.items()}, now)

    def leave(self, now: float) -> None:
        """Nothing more will be sent. `left` is true when the store knows."""
        if self.number is None:
            self.left = True
            return
        stored = [number for number, each in self._rounds.items() if each.sent and each.sent.stored]
        note = Announcement(self._token, max([*stored, self.log.tail]) + 1)
        self._requests.start(now, "put", left_name(self.number), self._on_left, note.pack())

    def _on_left(self, answer: Answer, now: float) -> None:
        self.left = True

    # ---- joining

    def _on_run(self, answer: Answer, now: float) -> None:
        if answer.status == "missing":
            snapshots.put_all(self._requests, self._start, now, self._make_run)
            return
        run = Run.parse(answer.value, RUN)
        run.check(self._own)
        self._run, self._run_digest, self.log.gone_after = run, digest(answer.value), run.gone_after
        self._find_snapshot(0, now)

    def _make_run(self, now: float) -> None:
        """The first state is stored, so the run may exist. Whoever is first has made it: everybody reads it again."""
        read: Then = lambda answer, later: self._requests.start(later, "get", RUN, self._on_run)
        self._requests.start(now, "create", RUN, read, self._own.pack())

    def _find_snapshot(self, least: int, now: float) -> None:
        """At the start, or because the payloads of round `least` have been deleted."""
        if self._search is None and self._run is not None:
            self._search = snapshots.Search(self._requests, self._run.start, least, self._on_snapshot)
            self._search.begin(now)

    def _on_snapshot(self, manifest: Manifest | None, now: float) -> None:
        self._search = None
        if manifest is None or manifest.round <= self.taken:
            return  # nothing newer, for now: the payload is asked for again, and so is this
        if self.taken < 0 and self._loaded is None:
            after = max(0, manifest.round - self.log.gone_after)
            self.log.begin(after, None if after else self._run_digest)
        self._loaded = manifest
        self._look_soon(now)

    def _claim(self, island: int, now: float) -> None:
        """Takes the number `island`, or the next one that is free."""
        own, name = Announcement(self._token, self.log.tail + 1).pack(), island_name(island)

        def created(answer: Answer, later: float) -> None:
            if answer.status == "exists":
                self._ask(later, name, compare)
            else:
                self._join(island, later)

        def compare(answer: Answer, later: float) -> None:
            if answer.status == "missing":  # a store that refused without having it: try again
                self._claim(island, later)
            elif Announcement.parse(answer.value, name).token == self._token:  # an attempt whose answer was lost
                self._join(island, later)
            else:
                self._claim(island + 1, later)

        self._ask(now, name, created, "create", own)

    def _join(self, island: int, now: float) -> None:
        self.number, self.log.known = island, max(self.log.known, island + 1)
        if not self.joined:
            self.joined, self.clock, self._loop_time = True, self._numbering.clock_after(self.log.tail), now
        for number in [number for number in self._rounds if number > self.log.tail]:
            self._upload(number, now)

    # ---- sending

    def _upload(self, number: int, now: float) -> None:
        """Puts the payload of a round, once this island has a number under which others look for it."""
        sent = self._round(number).sent
        if sent is None or self.number is None or self.number not in self.log.wanted:
            return
        sent.contribution, sent.stored = replace(sent.contribution, island=self.number), False
        then = partial(self._on_stored, sent, self.number)
        self._requests.start(now, "put", payload_name(number, self.number), then, sent.body)

    def _on_stored(self, sent: _Sent, island: int, answer: Answer, now: float) -> None:
        if island == self.number:  # else it has a new number, and the payload is on its way once more
            sent.stored = True
            self._look_soon(now)

    # ---- looking

    def _look_soon(self, now: float) -> None:
        self._look_at = min(self._look_at, now)

    def _ask(
        self, now: float, name: str, then: Then, kind: Kind = "get", body: Any = None, limit: int = MAX_DOCUMENT_BYTES
    ) -> None:
        """Starts an operation as a part of the present look, which is over when all of them have ended."""
        self._unanswered += 1

        def answered(answer: Answer, later: float) -> str | None:
            useless = then(answer, later)
            if not useless:
                self._unanswered -= 1
                if not self._unanswered:
                    self._looked(later)
            return useless

        self._requests.start(now, kind, name, answered, body, limit)

    def _look(self, now: float) -> None:
        """Asks for all that could be there."""
        self._look_at = math.inf
        if self._unanswered:
            return
        self._look_time = now
        following = self.log.tail + 1
        for number in range(following, following + self._stride):
            self._ask(now, seal_name(number), partial(self._on_seal, number))
        if self.number is None:
            return
        self._ask(now, island_name(self.log.known), self._on_announcement)
        self._looked_for = self._begun_and_next()
        islands: Sequence[int] = self.log.expected
        for number in self._looked_for:
            self._look_for_payloads(number, islands, now)
            islands = [island for island in islands if island in self._round(number).seen]  # who sends, sends in order
        if self.taken < self._awaited and now - self._found_time > 4 * self._settings.poll:
            self._look_for_leavers(now)

    def _begun_and_next(self) -> list[int]:
        """The rounds that are not sealed and that somebody has sent, and the one after them."""
        numbers = []
        for number in range(self.log.tail + 1, self.log.tail + 1 + self._ahead):
            numbers.append(number)
            if self._round(number).sent is None and self._round(number).began == math.inf:
                break
        return numbers

    def _look_for_payloads(self, number: int, islands: Sequence[int], now: float) -> None:
        there = self._round(number).seen
        for island in islands:
            if island not in there and island != self.number:
                then, limit = partial(self._on_payload, number), self._settings.max_payload_bytes
                self._ask(now, payload_name(number, island), then, limit=limit)

    def _look_for_leavers(self, now: float) -> None:
        there = self._round(self.log.tail + 1).seen
        for island in self.log.expected:
            if island not in there and island != self.number and island not in self._left_at:
                self._ask(now, left_name(island), partial(self._on_leave, island))

    def _on_seal(self, number: int, answer: Answer, now: float) -> None:
        if answer.status == "ok":
            self._found[number] = Seal.parse(answer.value, seal_name(number)), digest(answer.value)

    def _on_announcement(self, answer: Answer, now: float) -> None:
        if answer.status == "ok":
            self.log.known += 1
            self._newcomers = True

    def _on_leave(self, island: int, answer: Answer, now: float) -> None:
        if answer.status == "ok":
            self._left_at[island] = Announcement.parse(answer.value, left_name(island)).round

    def _on_payload(self, number: int, answer: Answer, now: float) -> None:
        """A payload that is damaged counts as not there."""
        if answer.status == "ok" and number > self.taken:
            found = self._round(number)
            found.seen[answer.value.island] = answer.value
            if not answer.value.closing:  # an island that ends sends before its time: nobody has to hurry for that
                before = self._rounds.get(number - 1, found).began  # who sends, sends in order
                found.began = min(found.began, max(found.absent_at, before if before < math.inf else -math.inf))
            self._found_time = now

    def _looked(self, now: float) -> None:
        """All answers are here: go on with what was found, or look again later."""
        stride, found, newcomers = 1, self._found, self._newcomers
        self._found, self._newcomers = {}, False
        while (following := self.log.tail + 1) in found:
            self.log.append(*found[following])
            stride = min(MOST_SEALS, 2 * self._stride)
        self._stride = stride
        for number in self._looked_for:
            if number > self.taken and self._round(number).began == math.inf:
                self._round(number).absent_at = self._look_time
        self._looked_for = []
        self._fetch(now)
        if stride > 1 or newcomers:
            self._found_time = now
            self._look(now)
        elif self._is_lost() and self._observe:
            self.joined = True
        elif self._is_lost():
            self.number = None
            self._claim(self.log.known, now)
        elif not self._seal(now):
            pause = max(self._settings.poll, (now - self._found_time) / 4)
            sent = self._round(self.log.tail + 1).sent
            deadline = sent.time + self.patience if sent else math.inf
            self._look_at = min(now + min(pause, self._settings.longest_poll), deadline if deadline > now else math.inf)

    def _is_lost(self) -> bool:
        """Whether this island needs a number: it is ready to send, and nobody looks for the one it has."""
        return self.number not in self.log.wanted and (self.joined or self.taken == self.log.tail)

    # ---- sealing

    def _seal(self, now: float) -> bool:
        """Seals the next round, if that may be done."""
        number = self.log.tail + 1
        found = self._round(number)
        if found.sent is None or not found.sent.stored or found.sent.contribution.island != self.number:
            return False
        there = {**found.seen, found.sent.contribution.island: found.sent.contribution}
        contributions = tuple(there[island] for island in self.log.wanted if island in there)
        absent = [island for island in self.log.expected if island not in there]
        missing = tuple(island for island in absent if self._left_at.get(island, math.inf) > number)
        if len(contributions) < self._settings.quorum or (missing and not self._is_overdue(number, found.sent, now)):
            return False
        if not found.swept:
            found.swept = True
            self._look_for_payloads(number, self.log.wanted, now)
            if self._unanswered:
                return True
        place = self._numbering.place(number)
        where = (number, place.fragment, place.send_clock)
        seal = Seal(*where, contributions, missing, self.log.known, self.log.digest(number - 1))
        data = seal.pack()

        def created(answer: Answer, later: float) -> None:
            if answer.status == "ok":
                self._found[number] = seal, digest(data)
                self.sealed.add(number)
            else:
                self._ask(later, seal_name(number), partial(self._on_seal, number))

        self._create_seal(number, data, created, now)
        return True

    def _create_seal(self, number: int, data: bytes, then: Then, now: float) -> None:
        self._ask(now, seal_name(number), then, "create", data)

    def _is_overdue(self, number: int, sent: _Sent, now: float) -> bool:
        """Whether those who are missing have had their time, and the training loop is about to need the round."""
        due = self.clock + 1 >= self._numbering.place(number).apply_clock
        return due and now >= sent.time + self.patience

    # ---- fetching and deciding

    def _round(self, number: int) -> _Round:
        if number not in self._rounds:
            self._rounds[number] = _Round()
        return self._rounds[number]

    def _has(self, number: int, contribution: Contribution) -> bool:
        found = self._round(number)
        return contribution in (found.seen.get(contribution.island), found.sent and found.sent.contribution)

    def _is_fetched(self, number: int) -> bool:
        return 0 < number <= self.log.tail and all(self._has(number, each) for each in self.log[number].contributions)

    def _fetch(self, now: float) -> None:
        """Gets the payloads of the next rounds that are sealed, so far as they have not been seen."""
        done = self.taken if self._loaded is None else self._loaded.round
        for number in range(done + 1, min(self.log.tail, done + self._ahead) + 1):
            found = self._round(number)
            if done < 0 or found.fetching:
                continue
            found.fetching = True
            for listed in self.log[number].contributions:
                if not self._has(number, listed):
                    then = partial(self._on_fetched, number, listed)
                    self._requests.start(now, "get", payload_name(number, listed.island), then, limit=listed.num_bytes)

    def _on_fetched(self, number: int, listed: Contribution, answer: Answer, now: float) -> str | None:
        if number <= self.taken or self._has(number, listed):
            return None
        if answer.status == "missing":
            return self._on_deleted(number, listed, now)
        if answer.value != listed:
            return f"seal {number} lists {listed}, and the payload is {answer.value or answer.status}"
        self._round(number).seen[listed.island] = listed
        return None

    def _on_deleted(self, number: int, listed: Contribution, now: float) -> str | None:
        """A payload is missing. A snapshot may have its round; until one does, there is nothing to go on with."""
        self._find_snapshot(number, now)
        return f"seal {number} lists island {listed.island}, its payload is missing, and no snapshot has the round"

    def _is_in(self, number: int) -> bool:
        sent = self._round(number).sent
        return sent is not None and sent.contribution.island in self.log[number].islands

    def _apply(self, number: int) -> Apply:
        contributions, every = self.log[number].contributions, self._settings.snapshot_every
        writer = contributions[number // every % len(contributions)].island
        turn = number % every == 0 and writer == self.number
        closing, sealed = self.log[number].closing, number in self.sealed
        decision = Apply(number, contributions, self.log.digest(number), self._is_in(number), turn, closing, sealed)
        self._forget(number)
        return decision

    def _load(self, manifest: Manifest) -> Load:
        number = manifest.round
        if number and manifest.seal != self.log.digest(number):
            raise MismatchError(
                f"the snapshot of round {number} belongs to another log: the digest of the seal differs"
            )
        sent = sorted(k for k, each in self._rounds.items() if each.sent is not None and k <= number)
        decision = Load(manifest, tuple(k for k in sent if self._is_in(k)))
        self._loaded = None
        self._forget(number)
        return decision

    def _forget(self, number: int) -> None:
        self.taken = number
        self._rounds = {k: each for k, each in self._rounds.items() if k > number}
        self.sealed = {k for k in self.sealed if k > number}
        self.log.forget(number)

    # ---- the clock

    def _jump(self, clock: int, step_seconds: float, now: float) -> int:
        """Where the clock has to be: forward to where the log is, and to rounds that would otherwise be missed.

        Whoever has sent a round has applied all that come before it in the schedule. So a jump to a round that somebody
        has sent waits for nothing. An island that nobody waits for must be early: it goes to a round that nobody has
        sent yet.
        """
        clock, begun = max(clock, self._numbering.clock_after(self.log.tail)), self._begun_and_next()
        for number in begun if self.patience < math.inf else ():
            if now + step_seconds > self._round(number).began + self.patience / 2:
                clock = max(clock, self._numbering.place(number).send_clock)
        if self.number not in self.log.expected and not any(self._round(number).sent for number in begun):
            clock = max(clock, self._numbering.place(begun[-1]).send_clock)
        return clock
