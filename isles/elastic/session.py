"""An island's life in a run of a `StoreWorld`, from joining to leaving: between the training loop and the protocol.

The mean of a round is a function of its seal: payloads in the order of the seal, each with the weight of its island
times the number of steps in it. Islands that have taken the same number of steps count by their weights alone.

Patience, if it is not given, is the time that the overlap covers: then an island that dies costs the others nothing. It
is longer where that is very short: two steps of the loop, twice what a payload takes to be made and to go through the
store, and `LEAST_PATIENCE` seconds are the least.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isles.elastic.decisions import Apply, Decision, Load
from isles.elastic.documents import DamagedError
from isles.elastic.driver import Driver
from isles.elastic.layout import Layout, check_sizes, pack_fragments, unpack_state
from isles.elastic.numbering import Numbering
from isles.elastic.objects import (
    CLOSING_FORM,
    FORM,
    Blob,
    Contribution,
    Manifest,
    digest,
    payload_name,
)
from isles.elastic.protocol import NOBODY
from isles.wire.message import HEADER_BYTES, Header, bytes_of, checksum, tensor_of
from isles.wire.reduction import Gathered
from isles.wire.world import Handle, Joining, LostPeerError, Mean, Missed, MissedRound, Payload, Snapshot

if TYPE_CHECKING:
    from isles.elastic.follower import Follower

LEAST_PATIENCE = 10.0
LEAVE_SECONDS = 10.0
"""So long leaving may take; then the others find out by themselves."""
NOTHING = Tensor()
Limit = Callable[[Iterable[Tensor]], list[float]]
"""The factors of outer gradients."""


class Session:
    """An island's life in a run, from joining to leaving. It does not refer to its StoreWorld, so that one that nobody
    holds any more ends its threads.
    """

    def __init__(
        self,
        driver: Driver,
        joining: Joining,
        numbering: Numbering,
        patience: float | None,
        limit: Limit | None,
        layout: Layout,
    ) -> None:
        self._limit = limit
        self.driver, self.numbering, self.layout, self.last_sent = driver, numbering, layout, 0
        self.members: tuple[int, ...] = ()
        self._joining, self._patience = joining, patience
        self._sent: dict[int, Payload] = {}
        self._own: dict[int, bytes] = {}
        """Own payloads as objects, by round."""
        self._decided: dict[int, Apply] = {}
        self.arrived: dict[int, float] = {}
        """When the mean of a round was there, by `perf_counter`."""
        self._preparing: dict[int, Future[None]] = {}
        """Payloads that are being made, by round."""
        self._making_seconds: deque[float] = deque(maxlen=8)
        self._step_seconds: list[float] = []
        self._last_step = math.nan
        self._left = False
        driver.average_with(self._average)

    @property
    def number(self) -> int | None:
        return self.driver.member.number

    @property
    def taken(self) -> int:
        return self.driver.member.taken

    @property
    def clock(self) -> int:
        return self.driver.member.clock

    # ---- joining and leaving

    def join(self) -> Iterator[Missed]:
        member = self.driver.member
        while True:
            decisions = self.driver.decisions(lambda: member.log.tail, lambda: member.joined)
            for decision in decisions:
                yield self._missed(decision)
            if not decisions and member.taken >= member.log.tail:
                break
        self.last_sent = self.numbering.last_sent(member.clock)
        if member.log.tail:
            self.members = member.log[member.log.tail].islands

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        member = self.driver.member
        try:
            self.driver.call(member.leave)
            self.driver.wait_until(lambda: member.left, LEAVE_SECONDS)
        except (LostPeerError, ValueError, RuntimeError):
            pass  # it has failed before: the others find out by themselves
        self.driver.stop()

    # ---- the training loop

    def reach(self, clock: int) -> int:
        now = time.monotonic()
        if self._patience is None and not math.isnan(self._last_step):
            self._step_seconds = [*self._step_seconds[-30:], now - self._last_step]
            usual = sorted(self._step_seconds)[len(self._step_seconds) // 2]
            covered = self.numbering.schedule.lateness * usual
            way = max(tuple(self._making_seconds), default=0.0) + self.driver.transfer_seconds
            least = max(LEAST_PATIENCE, 2 * usual, 2 * way)
            self.driver.member.patience = max(least, covered)
        self._last_step = now
        return self.driver.call(self.driver.member.reach, clock)

    def wants(self, number: int) -> bool:
        return self.driver.call(lambda now: self.driver.member.wants(number))

    def start(self, payload: Payload) -> Handle:
        number = self.numbering.number(payload.fragment, payload.round)
        self._sent[number] = payload
        self.last_sent = max(self.last_sent, number)
        self.driver.call(self.driver.member.begin, number)  # known before the clock may jump; made beside the loop
        self._preparing[number] = self.driver.codec.do(self._prepare, number, payload, time.monotonic())
        return RoundHandle(
            self, number, HEADER_BYTES + (self.layout.num_bytes(payload.fragment) if payload.weight else 0)
        )

    def applied(self, number: int) -> bool:
        decision = self._decided.pop(number, None)
        forget(number, self._decided, self._sent, self._own, self.arrived)
        self.driver.forget(number)
        if decision is not None and decision.save:
            self.driver.codec.do(self._save, decision, self._joining.state())
        return decision is not None and decision.sealed

    def last_rounds(self, fragments: Sequence[int]) -> list[tuple[int, int]]:
        number, wanted, places = max(self.last_sent, self.driver.member.log.tail), set(fragments), []
        while wanted:
            number += 1
            place = self.numbering.place(number)
            places.append((place.fragment, place.round))
            wanted.discard(place.fragment)
        return places

    def finish(self) -> None:
        self.driver.call(self.driver.member.finish, self.last_sent)

    def traffic(self) -> tuple[int, int]:
        driver = self.driver
        sent, received = driver.bytes_sent, driver.bytes_received
        driver.bytes_sent -= sent
        driver.bytes_received -= received
        return sent, received

    # ---- decisions

    def wait(self, number: int) -> Mean:
        """The mean of a round, with what the others did meanwhile."""
        self._made(number)
        driver, member = self.driver, self.driver.member
        if number <= member.taken:
            return Mean(NOTHING, {}, included=False, superseded=True)
        driver.call(member.wait, number)
        missed: list[Missed] = []
        while True:
            for decision in driver.decisions(lambda: number, lambda: member.taken >= number):
                if isinstance(decision, Apply) and decision.number == number:
                    return replace(self._mean(decision), missed=tuple(missed))
                missed.append(self._missed(decision))
            if member.taken >= number:
                return Mean(NOTHING, {}, included=False, missed=tuple(missed), superseded=True)

    def _made(self, number: int) -> None:
        """Waits until the payloads of all rounds up to this one are made, which none can be completed without but those
        of the others: whoever acts on a round knows what became of its own payload, as all ranks of an island do.
        """
        for sent in [k for k in self._preparing if k <= number]:
            self._preparing.pop(sent).result()

    def _missed(self, decision: Decision) -> Missed:
        if isinstance(decision, Apply):
            place = self.numbering.place(decision.number)
            return MissedRound(place.fragment, place.round, self._mean(decision))
        return self._snapshot(decision)

    def _mean(self, decision: Apply) -> Mean:
        self._decided[decision.number] = decision
        mean: Mean = self.driver.averaged(decision.number, decision.contributions)
        assert not mean.superseded
        self.members = tuple(each.island for each in decision.contributions)
        is_late = not decision.included and decision.number in self._sent
        late = self.driver.left_out(decision.number) if is_late else None
        return replace(mean, included=decision.included, closing=decision.closing, late_seconds=late)

    def _snapshot(self, decision: Load) -> Snapshot:
        number = decision.manifest.round
        self._made(number)
        fragments = self._unpack(decision.manifest)
        check_sizes(number, fragments, self._joining.numels)
        places = {k: self.numbering.place(k)[:2] for k in self._sent if k <= number}
        counted = tuple(places[k] for k in decision.counted if k in places)
        self.applied(number)
        return Snapshot(fragments, counted, tuple(place for place in places.values() if place not in counted))

    def _unpack(self, manifest: Manifest) -> list[dict[str, Tensor]]:
        """The state of every fragment from the parts of a snapshot."""
        return [unpack_state(self.driver.kept[part.name], part.name) for part in manifest.parts]

    # ---- beside the loop, in the codec's thread

    def _prepare(self, number: int, payload: Payload, begin: float) -> None:
        """Makes the object of a payload. An island that has nothing to contribute sends a header alone."""
        try:
            made = payload.body if payload.weight else None
            body = b"" if made is None or not payload.weight else bytes_of(made)
            form = CLOSING_FORM if payload.closing else FORM
            where = (payload.codec.name, payload.fragment, payload.round, payload.numel)
            header = Header(form, *where, len(body), payload.weight, payload.steps, checksum(tensor_of(body)))
            data = header.pack() + body
            own = Contribution(NOBODY, payload.weight, payload.steps, len(data), digest(data), payload.closing)
            self._own[number] = data
            self._making_seconds.append(time.monotonic() - begin)
            self.driver.call(self.driver.member.send, number, own, data)
        except Exception as error:
            self.driver.fail(error)

    def _average(self, number: int, contributions: tuple[Contribution, ...]) -> Mean:
        """The mean of a round; takes the outer step ahead of time where this island is in it."""
        fragment = self.numbering.place(number).fragment
        weights = shares(contributions)
        try:
            objects = [self._object(number, each) for each in contributions]
        except KeyError:  # a snapshot has taken the place of this round meanwhile: nobody will ask for its mean
            return Mean(NOTHING, {}, included=False, superseded=True)
        bodies = [tensor_of(data[HEADER_BYTES:]) for data in objects]
        factors = None
        if self._limit is not None:
            heavy = [body for body, weight in zip(bodies, weights, strict=True) if weight > 0]
            found = iter(self._limit(self.layout.decode(fragment, body) for body in heavy))
            factors = [next(found) if weight > 0 else 0.0 for weight in weights]
        bodies = self._share_out(number, bodies, weights, factors, contributions)
        numel = self._joining.numels[fragment]
        sent = self._sent.get(number)
        gathered = Gathered(bodies, weights, self._joining.codec, numel, factors)
        present = {each.island: weight for each, weight in zip(contributions, weights, strict=True) if weight > 0}
        mean = Mean(gathered.result(sent is not None and sent.gathers), present)
        if sent is not None and sent.then is not None and self.driver.member.number in present:
            sent.then(mean)
        self.arrived[number] = time.perf_counter()
        return mean

    def _share_out(
        self,
        number: int,
        bodies: list[Tensor],
        weights: list[float],
        factors: list[float] | None,
        contributions: tuple[Contribution, ...],
    ) -> list[Tensor]:
        """What this rank averages: everything, in an island of one rank."""
        return bodies

    def _object(self, number: int, contribution: Contribution) -> bytes:
        data = self.driver.kept.get(payload_name(number, contribution.island))
        return self._own[number] if data is None else data

    def _save(self, decision: Apply, state: list[dict[str, Tensor]]) -> None:
        try:
            parts = {name: (Blob(len(data), digest(data)), data) for name, data in self._pack(state).items()}
            self.driver.call(self.driver.member.save, decision, parts)
        except Exception as error:
            self.driver.fail(error)

    def _pack(self, state: list[dict[str, Tensor]]) -> dict[str, bytes]:
        """The parts of a snapshot."""
        return pack_fragments(state)


def forget(number: int, *known: dict[int, Any]) -> None:
    """Rounds up to this one are over. What other threads add meanwhile stays."""
    for each in known:
        for old in [k for k in each.copy() if k <= number]:
            del each[old]


@dataclass(frozen=True)
class RoundHandle:
    """A round, sent or not."""

    session: Session | Follower
    number: int
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def arrived(self) -> float | None:
        return self.session.arrived.get(self.number)

    def wait(self) -> Mean:
        return self.session.wait(self.number)


@dataclass(frozen=True)
class PayloadCheck:
    """Whether a payload can be of this run: another one must not be averaged, whoever wrote it."""

    layout: Layout
    numbering: Numbering

    def __call__(self, number: int, header: Header) -> None:
        place = self.numbering.place(number)
        codec, numel = self.layout.codec, self.layout.numel(place.fragment)
        num_bytes = self.layout.num_bytes(place.fragment) if header.weight else 0
        found = (header.form in (FORM, CLOSING_FORM), header.codec, header.fragment, header.round, header.numel)
        if found != (True, codec.name, place.fragment, place.round, numel) or header.num_bytes != num_bytes:
            wanted = f"fragment {place.fragment}, round {place.round}, {numel} values of {codec.name}"
            raise DamagedError(f"it {header.about()}, and must be {wanted}")


def shares(contributions: Sequence[Contribution]) -> list[float]:
    """The weights of a mean: of each island, times its steps as a share of the most steps in the round.

    >>> some = [Contribution(0, 1.0, 30, 99, "x"), Contribution(1, 2.0, 30, 99, "y"), Contribution(2, 1.0, 15, 99, "z")]
    >>> shares(some)
    [1.0, 2.0, 0.5]
    """
    most = max(each.steps for each in contributions) or 1
    return [each.weight * (each.steps / most) for each in contributions]
