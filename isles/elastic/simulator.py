"""Many islands, a store and a clock in one process; one seed decides everything that happens.

A simulated island (`process`) is the real protocol around a toy model with exact arithmetic. Requests to the store take
time, and `Faults` decides what becomes of each. All events are in one queue, ordered by time: a seed that fails fails
again in the same way.

A simulation has two parts. First everything that the seed draws may go wrong. After three fifths of the rounds faults
stop: those who sleep wake up in their time, and at least a quorum is started. From then on rounds must be sealed, with
everybody in.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from isles.core.schedule import Schedule
from isles.elastic.decisions import Settings
from isles.elastic.faults import REQUEST_TIMEOUT, Faults, Path
from isles.elastic.invariants import Checker, Violation
from isles.elastic.numbering import Numbering
from isles.elastic.objects import ROUNDS, payload_name, round_of
from isles.elastic.process import Process
from isles.elastic.protocol import Member
from isles.elastic.requests import Answer, Operation, perform
from isles.wire.world import LostPeerError


class Simulation:
    """One seed. `run` raises `Violation` when an invariant does not hold."""

    def __init__(
        self,
        seed: int,
        islands: int,
        rounds: int,
        faults: Sequence[str],
        member: type[Member] = Member,
        trace: list[str] | None = None,
    ) -> None:
        self._random = draw = random.Random(f"isles {seed}")
        self.faults = Faults(draw, faults, rounds)
        self.member, self._trace = member, trace
        self.most_islands, self._rounds = 1 + int(islands * draw.random() ** 1.5), rounds
        self.count: Counter[str] = Counter()
        self.fragments = draw.randint(1, 3)
        self.numbering = Numbering(_schedule(draw, self.fragments))
        self.model, self.gone_after = f"{self.fragments} integers", self.numbering.most_in_flight + draw.randint(2, 6)
        self._slowest = draw.choice((3.0, 10.0)) if "slow" in self.faults.kinds else 1.0
        spacing = self.numbering.schedule.sync_every / self.fragments
        self._making = random.Random(f"making {seed}")
        self._longest_making = self._slowest * self._making.choice((0.0, 1.0, 2.0))
        self.settings = Settings(
            quorum=draw.randint(1, max(1, self.most_islands // 2)),
            patience=2.5 * self._slowest + 4 * draw.random() + 2 * spacing + 2 * self._longest_making,
            snapshot_every=draw.randint(3, 20),
            poll=spacing * (0.4 + 0.4 * draw.random()),
            longest_poll=2 * spacing,
            backoff=0.2,
            longest_backoff=5.0,
            timeout=300.0,
        )
        self.store: dict[str, bytes] = {}
        self.checker = Checker(self.numbering)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.processes: list[Process] = []
        """Those that are alive."""
        self._quiet_since: float | None = None
        self._quiet_after = 0
        self._hopeless_since = math.inf

    # ---- time

    def run(self) -> None:
        """Until all rounds are sealed, and everybody has applied them."""
        self.trace(self.numbering.schedule, self.settings, self.faults.kinds)
        for index in range(self.most_islands):
            late = index > 0 and self._random.random() < 0.4
            self.at(self._random.random() * (3 * self._rounds if late else 3), self.start)
        self._run_until(lambda: self.checker.tail >= self._rounds * 3 // 5 or self._hopeless_since < math.inf)
        self._stop_faults()
        done = self._run_until(lambda: self.checker.tail >= self._rounds and not self._late())
        self.count["seals"] += self.checker.tail
        if not done and self._hopeless_since < math.inf:
            self.count["unrecoverable"] += 1
        elif not done:
            behind = {each.token: each.member.taken for each in self._late()}
            raise Violation(
                f"I4: no progress after round {self.checker.tail}, at {self.now:.0f} s; behind are {behind}"
            )
        for process in self.processes if done else ():
            if self._is_undisturbed(process) and process.member.joined:
                after = max(process.joined_after, self._quiet_after) + 2 * self.gone_after
                self.checker.present(process.token, after)

    def _run_until(self, done: Callable[[], bool]) -> bool:
        """Whether it got there; if not, nothing has been sealed for a long time."""
        tail, deadline, checker, events = -1, math.inf, self.checker, self._events
        while not done():
            if tail < checker.tail <= self._rounds:
                tail, deadline = checker.tail, self.now + self._longest_wait
            if self.now > deadline or self.now > self._hopeless_since + 30:
                return False
            self.now, _, action, arguments = heapq.heappop(events)
            action(*arguments)
        return True

    def _late(self) -> list[Process]:
        return [each for each in self.processes if self._is_undisturbed(each) and each.member.taken < self._rounds]

    def at(self, time: float, action: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), action, arguments))

    def trace(self, *what: object) -> None:
        if self._trace is not None:
            self._trace.append(f"{self.now:9.3f} {' '.join(map(str, what))}")

    def _stop_faults(self) -> None:
        self.trace("faults stop")
        self.faults.stop()
        self._quiet_since, self._quiet_after = self.now, self.checker.tail
        for _ in range(self.settings.quorum - sum(self._is_undisturbed(each) for each in self.processes)):
            self.start(needed=True)

    def _is_undisturbed(self, process: Process) -> bool:
        disturbed_until = max(process.asleep_until, process.cut_off_until)
        return disturbed_until <= (self.now if self._quiet_since is None else self._quiet_since)

    @functools.cached_property
    def _longest_wait(self) -> float:
        """Seconds for a round of the slowest island, with somebody who is missing, and for a newcomer to join."""
        period = self.numbering.schedule.sync_every * self._slowest * 1.5
        return 2 * period + 3 * self.settings.patience + 60 + (self.settings.timeout if self._has("collector") else 0)

    def _has(self, *kinds: str) -> bool:
        return any(kind in self.faults.kinds for kind in kinds)

    def _check_hope(self) -> None:
        if self._hopeless_since == math.inf and self._has("collector") and self._is_hopeless():
            self._hopeless_since = self.now

    def _is_hopeless(self) -> bool:
        """Whether a stranger has deleted a payload that no snapshot has, and fewer than a quorum have applied."""
        newest = max([0, *(round_of(name) or 0 for name in self.store if name.endswith("manifest.json"))])
        for number in range(newest + 1, self.checker.tail + 1):
            seal = self.checker.seals[number]
            assert seal is not None
            if any(payload_name(number, island) not in self.store for island in seal.islands):
                applied = [self._is_undisturbed(each) and each.member.taken >= number for each in self.processes]
                return sum(applied) < self.settings.quorum
        return False

    # ---- processes

    def start(self, *, needed: bool = False) -> None:
        """A new process, unless there are enough, be they asleep."""
        if len(self.processes) >= self.most_islands and not needed:
            return
        slow = self._slowest if self._random.random() < 0.3 else 1.0
        step_seconds, making_seconds = slow * (0.8 + 0.4 * self._random.random()), self._making.random()
        token = f"process-{self.count['processes']}"
        process = Process(self, token, step_seconds, making_seconds * self._longest_making)
        self.processes.append(process)
        self.count["processes"] += 1
        self.trace(process.token, "starts, seconds per step:", process.step_seconds)
        process.run(lambda now: None)

    def failed(self, process: Process, error: Exception) -> None:
        """An island has raised an error: loud, and right only if something was wrong for long."""
        self.trace(process.token, "fails:", error)
        self.count["gave up"] += 1
        if not (isinstance(error, LostPeerError) and self._has("partition", "collector")):
            raise Violation(f"I7: {process.token}: {type(error).__name__}: {error}") from error
        self.ended(process)

    def ended(self, process: Process) -> None:
        if process.alive:
            process.alive = False
            self.processes.remove(process)
            self.at(self.now + 1 + 30 * self._random.random(), self.start)
            self._check_hope()

    # ---- the store

    def request(self, process: Process, operation: Operation) -> None:
        """A process asks something of the store, if nothing happens to it just then."""
        self.count["operations"] += 1
        self._disturb(process)
        if not process.alive:
            return
        path = self.faults.path(operation)
        reaches = path.arrives and process.cut_off_until <= self.now
        if reaches:
            self.at(self.now + path.there, self._land, process, operation, path)
        if not (reaches and path.answered):
            self.count["lost answers"] += 1
            no_answer = (process.answer, operation, Answer("again", "no answer"))
            self.at(self.now + REQUEST_TIMEOUT, process.run, *no_answer)

    def _disturb(self, process: Process) -> None:
        kind = self.faults.disturbance()
        if kind is None:
            return
        self.trace(process.token, kind)
        self.count[kind] += 1
        if kind == "crash":
            self.ended(process)
        elif kind == "blackout":
            for each in list(self.processes):
                self.ended(each)
        elif kind == "stall":
            process.asleep_until = self.now + self.faults.pause(self.settings.patience)
        elif kind == "partition":
            process.cut_off_until = self.now + self.faults.pause(self.settings.patience)
        elif kind == "leave" and process.member.joined and not process.leaving and not process.ending:
            if self._random.random() < 0.5:
                process.ending = True
            else:
                process.leaving = True
                process.member.leave(self.now)
        elif kind == "collector":
            last = self.checker.tail - self._random.randint(1, 6)
            for name in [name for name in self.store if name.startswith(ROUNDS) and (round_of(name) or 0) <= last]:
                if self._random.random() < 0.5:
                    del self.store[name]
            self._check_hope()

    def _land(self, process: Process, operation: Operation, path: Path) -> None:
        answer = path.refusal or self.perform(operation)
        if self._trace is not None:
            lost = "" if path.answered else "(lost)"
            self.trace(process.token, operation.kind, operation.name, "->", answer.status, lost)
        if path.cut and answer.status == "ok":
            answer = Answer("ok", answer.value[: self._random.randrange(len(answer.value))])
        if path.again_after:
            self.at(self.now + path.again_after, self.perform, operation)
        if path.answered:
            self.at(self.now + path.back, process.run, process.answer, operation, answer)

    def perform(self, operation: Operation) -> Answer:
        """What the store does, seen by the checker."""
        kind, name, there = operation.kind, operation.name, operation.name in self.store
        answer = perform(self.store, operation)
        if kind == "delete" and there:
            self.checker.deleted(name)
            self.count["deletions"] += 1
        elif kind in ("put", "create") and answer.status == "ok":
            self.checker.wrote(name, operation.body)
        return answer


def _schedule(draw: random.Random, fragments: int) -> Schedule:
    """Of any kind that a method can have."""
    sync_every = draw.randint(2, 6)
    offsets = tuple(p * sync_every // fragments for p in range(fragments))
    delayed = draw.random() < 0.2
    lateness = sync_every * draw.randint(1, 2) if delayed else draw.randrange(sync_every)
    start = ((draw.randint(1, 3), draw.randint(1, 2)),) if draw.random() < 0.2 else ()
    return Schedule(sync_every, offsets, lateness, start)
