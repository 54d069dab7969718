"""One simulated island: the real protocol around a toy model, and a training loop that is a generator.

The loop does what the engine of a real island does (`isles.core`). It yields the seconds that a step takes, or None
while it waits for a decision: then it goes on after whatever happens next to its process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from isles.elastic.decisions import Apply, Decision
from isles.elastic.documents import DamagedError
from isles.elastic.objects import (
    Blob,
    Contribution,
    Manifest,
    Part,
    Run,
    digest,
    open_payload,
    part_name,
    payload_name,
    round_of,
    told_of,
)
from isles.elastic.requests import Answer, Operation
from isles.elastic.toy import State, Toy, read_payload
from isles.wire.world import LostPeerError, MismatchError

if TYPE_CHECKING:
    from isles.elastic.simulator import Simulation

Loop = Generator[float | None, None, None]
_told_of = functools.lru_cache(maxsize=256)(told_of)  # all islands read the same payloads
_read_payload = functools.lru_cache(maxsize=256)(read_payload)


class Process:
    """One island, from its start to its end. It never comes back: whoever restarts is a new process."""

    def __init__(self, simulation: Simulation, token: str, step_seconds: float, making_seconds: float) -> None:
        self.token, self.step_seconds, self.simulation = token, step_seconds, simulation
        self._making_seconds, self._making = making_seconds, set[int]()
        """What it takes to make a payload, beside the loop; and the rounds whose payloads are being made."""
        self.alive, self.leaving, self.ending = True, False, False
        self.asleep_until = self.cut_off_until = 0.0
        self.joined_after = 1 << 60
        """The end of the log when it joined."""
        self.toy = Toy(simulation.numbering)
        start = State.initial(simulation.fragments).pack()
        blob = Blob(len(start), digest(start))
        part = Part(part_name(0, "state", blob.sha256), *blob)
        own = Run(token, "toy", simulation.model, simulation.gone_after, Manifest(0, "", (part,)))
        options = (simulation.numbering, simulation.settings, token, simulation.now)
        self.member = simulation.member(own, {part.name: start}, *options)
        self.kept: dict[str, bytes] = {}
        """Payloads, and parts of snapshots, that it has read."""
        self.sent: dict[int, bytes] = {}
        self.wake_at = math.inf
        self._loop = self._train()
        self._waits = True

    # ---- events

    def run(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Something happens to this process: an answer, a time that has come, the end of a step."""
        simulation = self.simulation
        if not self.alive:
            return
        if self.asleep_until > simulation.now:
            simulation.at(self.asleep_until, self.run, action, *arguments)
            return
        try:
            action(*arguments, simulation.now)
            if self._waits:
                self.resume(simulation.now)
        except (LostPeerError, MismatchError) as error:
            simulation.failed(self, error)
            return
        for operation in self.member.operations():
            simulation.request(self, operation)
        if self.member.left:
            simulation.ended(self)
        wake_at = self.member.wake_at
        if wake_at < self.wake_at and self.alive:
            self.wake_at = max(wake_at, simulation.now)
            simulation.at(self.wake_at, self._wake, self.wake_at)

    def answer(self, operation: Operation, answer: Answer, now: float) -> None:
        """Payloads and parts of snapshots stay here; the protocol is told what they are."""
        name, data = operation.name, answer.value
        if operation.kind == "get" and answer.status == "ok":
            try:
                answer = Answer("ok", _told_of(name, data))
                if answer.value is not data:
                    self.kept[name] = data
            except DamagedError:
                answer = Answer("damaged")
        self.member.answer(operation, answer, now)

    def _wake(self, time: float) -> None:
        if time == self.wake_at:  # else there is an earlier one
            self.wake_at = math.inf
            self.run(self.member.wake)

    def resume(self, now: float) -> None:
        """The training loop goes on until it sleeps or waits."""
        if self.leaving:
            return
        pause = next(self._loop)
        self._waits = pause is None
        if pause is not None:
            self.simulation.at(now + pause, self.run, self.resume)

    # ---- the training loop, as the engine of a real island has it

    def _train(self) -> Loop:
        member, simulation, numbering = self.member, self.simulation, self.simulation.numbering
        while not member.joined:
            self._take(member.log.tail)
            yield None
        self.joined_after = simulation.checker.tail
        simulation.count["joins"] += 1
        yield from self._wait_for(member.log.tail)
        clock = member.clock
        while True:
            if self.ending:
                yield from self._end(clock)
            yield self.step_seconds
            self.toy.learn(member.number or 0)
            simulation.checker.observe(self.token, self.toy, member.taken)
            reached = member.reach(clock + 1, simulation.now)
            simulation.count["jumps"] += reached > clock + 1
            while clock < reached:
                clock += 1
                for number in numbering.sent_at(clock):
                    if member.wants(number):
                        self._send(number)
                for number in numbering.applied_at(clock):
                    yield from self._wait_for(number)

    def _end(self, clock: int) -> Loop:
        """Sends what was learned since the last sends, waits until that is counted or not, and leaves."""
        member, numbering = self.member, self.simulation.numbering
        last = max(numbering.last_sent(clock), member.log.tail) + self.simulation.fragments
        for number in range(last - self.simulation.fragments + 1, last + 1):
            if member.wants(number):
                self._send(number, closing=True)
        member.finish(last, self.simulation.now)
        yield from self._wait_for(last)
        self.simulation.count["ends"] += 1
        self.leaving = True
        member.leave(self.simulation.now)
        while True:
            yield None

    def _send(self, number: int, *, closing: bool = False) -> None:
        self.sent[number] = data = self.toy.send(number, closing=closing)
        self._making.add(number)
        self.member.begin(number, self.simulation.now)
        if self._making_seconds:
            self.simulation.at(self.simulation.now + self._making_seconds, self.run, self._made, number, data)
        else:
            self._made(number, data, self.simulation.now)

    def _made(self, number: int, data: bytes, now: float) -> None:
        self._making.discard(number)
        self.member.send(number, open_payload(payload_name(number, 0), data)[0], data, now)

    def _wait_for(self, number: int) -> Loop:
        while any(sent <= number for sent in self._making):
            yield None
        self.member.wait(number, self.simulation.now)
        self._take(number)
        while self.member.taken < number:
            yield None
            self._take(number)

    def _take(self, number: int) -> None:
        for decision in self.member.take(number, self.simulation.now):
            self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        member, toy, simulation = self.member, self.toy, self.simulation
        if isinstance(decision, Apply):
            number = decision.number
            toy.apply(number, [self._payload(number, each) for each in decision.contributions], decision.included)
            outcome = "included" if decision.included else "excluded" if self.joined_after < number else "replayed"
            simulation.count[outcome] += 1
        else:
            number = decision.manifest.round
            toy.load(State.parse(self.kept[decision.manifest.parts[0].name]), decision.counted, number)
            simulation.count["reloads" if member.joined else "loads"] += 1
        simulation.checker.observe(self.token, toy, number)
        simulation.trace(self.token, decision)
        self.kept = {name: data for name, data in self.kept.items() if (round_of(name) or 0) > number}
        if isinstance(decision, Apply) and decision.save:
            assert toy.state is not None
            data = toy.state.pack()
            member.save(decision, {"state": (Blob(len(data), digest(data)), data)}, simulation.now)
            simulation.count["snapshots"] += 1

    def _payload(self, number: int, contribution: Contribution) -> tuple[float, int]:
        name = payload_name(number, contribution.island)
        return _read_payload(self.kept[name] if name in self.kept else self.sent[number])
