"""What islands that come and go ask of their store: requests, bytes, waiting.

The protocol (`isles.elastic.protocol`) is a state machine without a clock and without a store, so there is nothing to
model: the real one is run here, one for each island, on a store of names and sizes and links of given speed. Each
request is counted.

    request   waits for one of `CONNECTIONS`, then takes `latency_seconds`, and the time of its bytes on the link
    link      one each way for an island; what is on it at the same time shares it evenly
    loop      steps of a fixed time; sends and applies by the schedule; waits where a round is not there

The count is over the rounds between two snapshots, after a few periods for the islands to get into step. Left out are
joins and failures, the time of coding and checksums, the headers of HTTP (about 1 kB a request), and everything that is
not steady: jitter, slow answers of the store, a dense start.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isles.core.schedule import Schedule
from isles.elastic.decisions import Apply, Settings
from isles.elastic.driver import CONNECTIONS
from isles.elastic.numbering import Numbering
from isles.elastic.objects import Blob, Contribution, Manifest, Part, Run, part_name
from isles.elastic.protocol import NOBODY, Member
from isles.elastic.requests import Answer, Operation, perform
from isles.elastic.session import LEAST_PATIENCE
from isles.elastic.world import PERIODS_BETWEEN_SNAPSHOTS, POLL, ROUNDS_UNTIL_GONE
from isles.plan.exchange import FRAMING
from isles.plan.fleet import Island
from isles.plan.shared_link import Events, SharedLink

WARM_UP_PERIODS = 3
MOST_ISLANDS = 16
SLOWEST = 10
"""How many times longer than the steps of a period its payloads may take on the link: beyond that there is no plan."""
STATE_BYTES = 8
"""Of a parameter in a snapshot: anchor and velocity in fp32."""


class SlowLinkError(ValueError):
    """The link cannot carry what this method sends."""


@dataclass(frozen=True)
class Traffic:
    """What happens between two snapshots, all islands together."""

    rounds: int
    seconds: float
    requests: Counter[str]
    """By kind: get, put, create, list, delete."""
    bytes_up: int
    bytes_down: int
    seal_bytes: int
    """Of this, seals: they are never deleted."""
    utilisation: float
    """Compute time over total time, on average over islands."""
    included: float
    """Of the islands, the share that is in a round."""

    @property
    def reads(self) -> int:
        return self.requests["get"]

    @property
    def writes(self) -> int:
        """Lists cost as much as writes."""
        return self.requests["put"] + self.requests["create"] + self.requests["list"]


def simulate(
    schedule: Schedule,
    payload_bytes: Sequence[int],
    state_bytes: Sequence[int],
    fleet: Sequence[Island],
    *,
    latency_seconds: float = 0.0,
    patience_seconds: float | None = None,
    poll: float = POLL,
    snapshot_every: int | None = None,
) -> Traffic:
    """Runs the protocol for islands of this fleet. Sizes are by fragment: of a payload with its header, and of its part
    of a snapshot. Patience, if it is not given, is what a StoreWorld chooses by itself.

    >>> from isles.plan.fleet import Link, alike
    >>> fleet = alike(2, 0.5, Link.symmetric(50e6))
    >>> traffic = simulate(Schedule(20, (0, 10), 4), [10_000] * 2, [160_000] * 2, fleet, latency_seconds=0.05)
    >>> traffic.rounds, traffic.requests["put"] - traffic.rounds * 2, round(traffic.utilisation, 2)
    (32, 2, 1.0)
    """
    if len(fleet) > MOST_ISLANDS:
        raise ValueError(f"{len(fleet)} islands are more than can be planned on a store: at most {MOST_ISLANDS}")
    for island in fleet:
        up, down = island.link.up_bits_per_second, island.link.down_bits_per_second
        seconds = 8 * FRAMING * sum(payload_bytes) * max(1 / up, (len(fleet) - 1) / down)
        if seconds > SLOWEST * schedule.sync_every * island.step_seconds:
            steps = schedule.sync_every * island.step_seconds
            raise SlowLinkError(
                f"the link is too slow: the payloads of a period take {seconds:.3g} s on it, its {schedule.sync_every} "
                f"steps {steps:.3g} s; use a faster link, a longer period or fewer bits"
            )
    every = snapshot_every or PERIODS_BETWEEN_SNAPSHOTS * len(payload_bytes)
    longest = max(island.step_seconds for island in fleet)
    chosen = max(LEAST_PATIENCE, 2 * schedule.lateness * longest, 3 * longest)
    settings = Settings(
        patience=chosen if patience_seconds is None else patience_seconds,
        snapshot_every=every,
        poll=poll,
        longest_poll=15 * poll,
        backoff=poll,
    )
    return _Simulation(schedule, payload_bytes, state_bytes, fleet, latency_seconds, settings).run()


class _Simulation(Events):
    """Islands, and a store."""

    def __init__(
        self,
        schedule: Schedule,
        payload_bytes: Sequence[int],
        state_bytes: Sequence[int],
        fleet: Sequence[Island],
        latency_seconds: float,
        settings: Settings,
    ) -> None:
        super().__init__()
        self.numbering = Numbering(schedule.steady)
        self.payload_bytes, self.state_bytes = payload_bytes, state_bytes
        self.latency_seconds, self.settings, self.every = latency_seconds, settings, settings.snapshot_every
        self.store: dict[str, Any] = {}
        self.requests: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.computed = 0.0
        self.included = 0
        self.islands = [_Island(self, index, island) for index, island in enumerate(fleet)]

    def run(self) -> Traffic:
        for island in self.islands:
            island.run(lambda now: None)
        # A snapshot is in the middle: it is written and what is older deleted well before the count ends.
        first = -(-WARM_UP_PERIODS * len(self.payload_bytes) // self.every) * self.every + self.every // 2
        self._until(first)
        begin = self.now
        self.requests.clear()
        self.num_bytes.clear()
        self.computed = self.included = 0
        self._until(first + self.every)
        seconds, count = self.now - begin, len(self.islands)
        return Traffic(
            rounds=self.every,
            seconds=seconds,
            requests=self.requests,
            bytes_up=self.num_bytes["up"],
            bytes_down=self.num_bytes["down"],
            seal_bytes=self.num_bytes["seals"],
            utilisation=min(1.0, self.computed / seconds / count),
            included=self.included / count / (self.every * count),
        )

    def _until(self, number: int) -> None:
        """Until this round is applied everywhere."""
        while any(island.member.taken < number for island in self.islands):
            self.go_on()

    def perform(self, operation: Operation) -> Answer:
        """What a store does. Payloads are known by what a seal says of them."""
        name, body = operation.name, operation.body
        answer = perform(self.store, operation)
        if isinstance(body, Contribution):
            self.store[name] = replace(body, island=int(name[-4:]))
        if name.startswith("seals/") and operation.kind == "create" and answer.status == "ok":
            self.num_bytes["seals"] += len(body)
        return answer


class _Island:
    """One island: protocol, training loop, connections and link."""

    def __init__(self, simulation: _Simulation, index: int, about: Island) -> None:
        self.simulation, self.step_seconds = simulation, about.step_seconds
        self.up = SharedLink(simulation, about.link.up_bits_per_second)
        self.down = SharedLink(simulation, about.link.down_bits_per_second)
        self._token = f"island {index}"
        numbering = simulation.numbering
        own, start = self._own_run(numbering)
        self.member = Member(own, start, numbering, simulation.settings, self._token, simulation.now)
        self._queue: deque[Operation] = deque()
        self._busy = 0
        self._wake_at = math.inf
        self._loop = self._train()
        self._waits = True

    def _own_run(self, numbering: Numbering) -> tuple[Run, dict[str, Any]]:
        """It starts from nothing: the first state is not what is counted."""
        blob = Blob(0, hashlib.sha256().hexdigest())
        part = Part(part_name(0, "state", blob.sha256), *blob)
        gone_after = numbering.most_in_flight + ROUNDS_UNTIL_GONE
        return Run(self._token, "", "", gone_after, Manifest(0, "", (part,))), {part.name: blob}

    # ---- events

    def run(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Tells the protocol something, and does what it asks for."""
        simulation, member = self.simulation, self.member
        action(*arguments, simulation.now)
        if self._waits:
            self._resume(simulation.now)
        self._queue.extend(member.operations())
        while self._queue and self._busy < CONNECTIONS:
            self._start(self._queue.popleft())
        if member.wake_at < self._wake_at:
            self._wake_at = max(member.wake_at, simulation.now)
            simulation.at(self._wake_at, self._wake, self._wake_at)

    def _wake(self, time: float) -> None:
        if time == self._wake_at:
            self._wake_at = math.inf
            self.run(self.member.wake)

    # ---- requests

    def _start(self, operation: Operation) -> None:
        self._busy += 1
        self.simulation.requests[operation.kind] += 1
        size = _size(operation.body) if operation.kind in ("put", "create") else 0
        self.simulation.num_bytes["up"] += size
        self.up.carry(size, self._travel, self._land, operation)

    def _travel(self, then: Callable[..., Any], *arguments: Any) -> None:
        """Half of the way to the store and back."""
        self.simulation.at(self.simulation.now + self.simulation.latency_seconds / 2, then, *arguments)

    def _land(self, operation: Operation) -> None:
        answer = self.simulation.perform(operation)
        size = _size(answer.value) if operation.kind == "get" and answer.status == "ok" else 0
        self.simulation.num_bytes["down"] += size
        self.down.carry(size, self._travel, self.run, self._answer, operation, answer)

    def _answer(self, operation: Operation, answer: Answer, now: float) -> None:
        self._busy -= 1
        self.member.answer(operation, answer, now)

    # ---- the training loop

    def _resume(self, now: float) -> None:
        pause = next(self._loop)
        self._waits = pause is None
        if pause is not None:
            self.simulation.at(now + pause, self.run, self._stepped)

    def _stepped(self, now: float) -> None:
        self.simulation.computed += self.step_seconds
        self._resume(now)

    def _train(self) -> Generator[float | None, None, None]:
        member, numbering = self.member, self.simulation.numbering
        while not member.joined:
            self._take(member.log.tail)
            yield None
        clock = member.clock
        while True:
            yield self.step_seconds
            reached = member.reach(clock + 1, self.simulation.now)
            while clock < reached:
                clock += 1
                for number in numbering.sent_at(clock):
                    if member.wants(number):
                        self._send(number)
                for number in numbering.applied_at(clock):
                    member.wait(number, self.simulation.now)
                    self._take(number)
                    while member.taken < number:
                        yield None
                        self._take(number)

    def _send(self, number: int) -> None:
        size = self.simulation.payload_bytes[self.simulation.numbering.place(number).fragment]
        sha256 = hashlib.sha256(f"{self._token} {number}".encode()).hexdigest()
        payload = Contribution(NOBODY, 1.0, self.simulation.numbering.schedule.sync_every, size, sha256)
        self.member.send(number, payload, payload, self.simulation.now)

    def _take(self, number: int) -> None:
        for decision in self.member.take(number, self.simulation.now):
            if isinstance(decision, Apply):
                self.simulation.included += len(decision.contributions)
                if decision.save:
                    sha256 = hashlib.sha256(str(decision.number).encode()).hexdigest()
                    blobs = [Blob(size, sha256) for size in self.simulation.state_bytes]
                    parts = {f"fragment-{index:04d}": (blob, blob) for index, blob in enumerate(blobs)}
                    self.member.save(decision, parts, self.simulation.now)


def _size(body: Any) -> int:
    return len(body) if isinstance(body, bytes) else int(body.num_bytes)


def payload_sizes(sizes: Iterable[int], codec: str) -> list[int]:
    """Bytes of the payload of each fragment, with its header."""
    from isles.wire.codecs import codecs
    from isles.wire.message import HEADER_BYTES

    return [HEADER_BYTES + codecs[codec].num_bytes(numel) for numel in sizes]
