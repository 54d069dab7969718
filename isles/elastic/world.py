"""`StoreWorld`: islands that come and go, joined by a bucket or a folder.

To the engine it is a world like the others: it starts a round with a payload and waits for the mean. What is behind it
is the log of sealed rounds (`isles.elastic.protocol`), moved along by threads beside the training loop
(`isles.elastic.driver`). An island that starts is given the newest snapshot and every round after it, so its anchors
are those of the others, bit for bit. One that was left out of a round is told so, and keeps what it has learned.

An island of several ranks (FSDP2, DDP, tensor parallelism) is one writer: its first rank does all this, for all of them
(`isles.elastic.lock_step`).

The mean of a round is a function of its seal: payloads in the order of the seal, each with the weight of its island
times the number of steps in it. Islands that have taken the same number of steps count by their weights alone.

Patience, if it is not given, is the time that the overlap covers: then an island that dies costs the others nothing. It
is longer where that is very short: two steps of the loop, twice the way of a payload through the store, and
`LEAST_PATIENCE` seconds are the least.
"""

from __future__ import annotations

import json
import math
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import safetensors.torch
import torch.distributed as dist
from torch import Tensor

from isles.elastic.decisions import Apply, Decision, Load, Settings
from isles.elastic.driver import Driver
from isles.elastic.layout import Layout, label
from isles.elastic.numbering import Numbering
from isles.elastic.objects import (
    CLOSING_FORM,
    FORM,
    RUN,
    Blob,
    Contribution,
    DamagedError,
    Manifest,
    Part,
    Run,
    digest,
    part_name,
    payload_name,
)
from isles.elastic.protocol import NOBODY, Member
from isles.elastic.robust import limited
from isles.elastic.store import open_store, probe
from isles.wire import reduction
from isles.wire.message import HEADER_BYTES, Header, bytes_of, check_byte_order, checksum, tensor_of
from isles.wire.world import Handle, Joining, LostPeerError, Mean, Missed, MissedRound, Payload, Snapshot

if TYPE_CHECKING:
    from isles.elastic.lock_step import Follower

LEAST_PATIENCE = 10.0
PERIODS_BETWEEN_SNAPSHOTS = 16
"""A snapshot has about the bytes of so many periods in 4 bits, two of them per parameter being in fp32."""
ROUNDS_UNTIL_GONE = 8
"""For which an island that was missing is still looked for, besides those in flight."""
LOCAL_POLL, POLL = 0.01, 0.2
"""Seconds between two looks, where asking costs nothing and where it does."""
LEAVE_SECONDS = 10.0
"""So long leaving may take; then the others find out by themselves."""
S = TypeVar("S", bound="Session")
Pack = Callable[[list[dict[str, Tensor]]], dict[str, bytes]]
"""From the state of all fragments to the parts of a snapshot, by label."""
Limit = Callable[[Iterable[Tensor]], list[float]]
"""The factors of outer gradients."""


class StoreWorld:
    """Islands that come and go, joined by the object store or folder behind `url`.

    `quorum` is the least number of islands in a round. `patience` is for how many seconds after its own send an island
    waits for others; None: chosen from the step and the overlap; math.inf: nobody is ever left out. `timeout` is how
    long, in seconds, a store may keep failing. `key` (or ISLES_STORE_KEY) is a secret that all islands share.
    `robust` bounds what one bad island can do (`isles.elastic.robust`); all islands of a run have it or none.
    `snapshot_every` is in rounds; None: 16 periods. With `observe` it reads the global model, which needs no rights to
    write, and takes no part. `options` go to obstore: endpoint, region, credentials. Every rank of an island makes one;
    only the first rank's is used.

    >>> world = StoreWorld("memory://doctest", patience=5.0)
    >>> world.size
    1
    """

    def __init__(
        self,
        url: str,
        *,
        quorum: int = 1,
        patience: float | None = None,
        timeout: float = 600.0,
        key: str | bytes | None = None,
        robust: bool = False,
        snapshot_every: int | None = None,
        observe: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(quorum, bool) or not isinstance(quorum, int) or quorum < 1:
            raise ValueError(f"quorum={quorum!r} must be a number of islands, at least 1")
        if patience is not None and not _is_number(patience, 0.0):
            raise ValueError(f"patience={patience!r} must be a number of seconds, math.inf or None")
        if not _is_number(timeout, 1e-9) or timeout == math.inf:
            raise ValueError(f"timeout={timeout!r} must be a number of seconds greater than 0")
        if snapshot_every is not None and (not isinstance(snapshot_every, int) or snapshot_every < 1):
            raise ValueError(f"snapshot_every={snapshot_every!r} must be a number of rounds, at least 1")
        check_byte_order()
        self.store = open_store(url, key, timeout, **options)
        if observe and self.store.get(RUN) is None:
            raise ValueError(f"there is no run in {self.store.url}")
        self._robust = bool(robust)
        self._observe = self._is_probed = observe
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            self._probe()  # else this may be one rank of many in an island: when they join, the first one does it
        self.url, self._patience, self._snapshot_every = self.store.url, patience, snapshot_every
        poll = LOCAL_POLL if self.store.is_local else POLL
        self._settings = Settings(
            quorum=quorum,
            patience=LEAST_PATIENCE if patience is None else patience,
            poll=poll,
            longest_poll=15 * poll,
            backoff=poll,
            timeout=timeout,
        )
        self._session: Session | Follower | None = None

    def _probe(self) -> None:
        if not self._is_probed:
            probe(self.store)
        self._is_probed = True

    @property
    def rank(self) -> int:
        """This island's number, from 0, in the order of joining."""
        return 0 if self._session is None else self._session.number or 0

    @property
    def size(self) -> int:
        """How many islands were in the last round."""
        return max(1, len(self.members))

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the islands that were in the last round."""
        return () if self._session is None else self._session.members

    @property
    def last_round(self) -> int:
        """How many rounds of the log are in the global model."""
        return max(0, self._joined.taken)

    @property
    def clock(self) -> int:
        """Where in the schedule this island is."""
        return self._joined.clock

    @property
    def _joined(self) -> Session | Follower:
        if self._session is None:
            raise RuntimeError("this island has not joined its run: isles.DiLoCo does that")
        return self._session

    def join(self, joining: Joining) -> Iterator[Missed]:
        """Joins the run, or makes it."""
        if self._session is not None:
            raise ValueError("this StoreWorld has joined its run already: make a new one for every DiLoCo")
        numbering = Numbering(joining.schedule, joining.empty)
        if self._robust:
            joining = replace(joining, settings=json.dumps({**json.loads(joining.settings), "robust": True}))
        if joining.ranks:
            from isles.elastic.lock_step import join_as_ranks

            self._session = join_as_ranks(joining, numbering, self._make_session)
        else:
            self._session = self._make_session(joining, numbering, Layout.of_one(joining), pack_fragments, Session)
        yield from self._session.join()

    def _make_session(
        self, joining: Joining, numbering: Numbering, layout: Layout, pack: Pack, kind: Callable[..., S]
    ) -> S:
        """The session of an island, or of its first rank. `pack` is for the state that the run starts from."""
        self._probe()
        every = self._snapshot_every or PERIODS_BETWEEN_SNAPSHOTS * len(layout.numels)
        settings = replace(self._settings, snapshot_every=every, max_payload_bytes=HEADER_BYTES + layout.most_bytes)
        token = uuid.uuid4().hex
        parts: dict[str, bytes] = {}
        if self.store.get(RUN) is None:  # what this island starts from, should it make the run
            packed = pack([{"anchor": tensors["anchor"]} for tensors in joining.state()])
            parts = {part_name(0, name, digest(data)): data for name, data in packed.items()}
        start = Manifest(0, "", tuple(Part(name, len(data), digest(data)) for name, data in parts.items()))
        own = Run(token, joining.settings, joining.model, numbering.most_in_flight + ROUNDS_UNTIL_GONE, start)
        make = lambda now: Member(own, parts, numbering, settings, token, now, observe=self._observe)
        driver = Driver(self.store, make, _Check(layout, numbering))
        weakref.finalize(self, driver.stop)
        limit = limited if self._robust else None
        return kind(driver, joining, numbering, self._patience, limit, layout)

    def start(self, payload: Payload) -> Handle:
        """Starts a round with this payload."""
        return self._joined.start(payload)

    def gather(self, data: bytes) -> list[bytes]:
        """Islands that come and go have nobody to ask at once."""
        raise RuntimeError("a StoreWorld has no gather: its islands agree by reading the same log")

    def reach(self, clock: int) -> int:
        """The training loop has taken a step."""
        return self._joined.reach(clock)

    def wants(self, fragment: int, round: int) -> bool:
        """Whether a payload of this round may still count."""
        return self._joined.wants(self.order(fragment, round))

    def watch(self, fragment: int, round: int) -> Handle:
        """A round to which this island has sent nothing; there is none before the first."""
        return RoundHandle(self._joined, self.order(fragment, round) if round > 0 else 0)

    def applied(self, fragment: int, round: int) -> bool:
        """A round has been applied; writes a snapshot, if that is this island's turn."""
        return self._joined.applied(self.order(fragment, round))

    def order(self, fragment: int, round: int) -> int:
        """The place of a round in the log."""
        return self._joined.numbering.number(fragment, round)

    def last_rounds(self, fragments: Sequence[int]) -> list[tuple[int, int]]:
        """The rounds after the last one that was sent or sealed, until each of these fragments has had one."""
        return self._joined.last_rounds(fragments)

    def finish(self) -> None:
        """The last rounds have been sent, before their time."""
        self._joined.finish()

    def close(self, reason: str = "") -> None:
        """Leaves the run, and ends the threads."""
        if self._session is not None:
            self._session.leave()

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received besides payloads that were sent, since the last call."""
        return self._joined.traffic()


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
        self._preparing: Any = None
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
        if self._preparing is not None:
            self._preparing.result()  # of an earlier step: what was sent is known before the clock may jump
            self._preparing = None
        now = time.monotonic()
        if self._patience is None and not math.isnan(self._last_step):
            self._step_seconds = [*self._step_seconds[-30:], now - self._last_step]
            usual = sorted(self._step_seconds)[len(self._step_seconds) // 2]
            covered = self.numbering.schedule.lateness * usual
            least = max(LEAST_PATIENCE, 2 * usual, 2 * self.driver.transfer_seconds)
            self.driver.member.patience = max(least, covered)
        self._last_step = now
        return self.driver.call(self.driver.member.reach, clock)

    def wants(self, number: int) -> bool:
        return self.driver.call(lambda now: self.driver.member.wants(number))

    def start(self, payload: Payload) -> Handle:
        number = self.numbering.number(payload.fragment, payload.round)
        self._sent[number] = payload
        self.last_sent = max(self.last_sent, number)
        self._preparing = self.driver.codec.do(self._prepare, number, payload)
        return RoundHandle(
            self, number, HEADER_BYTES + (self.layout.num_bytes(payload.fragment) if payload.weight else 0)
        )

    def applied(self, number: int) -> bool:
        decision = self._decided.pop(number, None)
        self._decided = {k: each for k, each in self._decided.items() if k > number}
        self._sent = {k: each for k, each in self._sent.items() if k > number}
        self._own = {k: each for k, each in self._own.items() if k > number}
        self.arrived = {k: each for k, each in self.arrived.copy().items() if k > number}
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
        return replace(mean, included=decision.included, closing=decision.closing)

    def _snapshot(self, decision: Load) -> Snapshot:
        number = decision.manifest.round
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

    def _prepare(self, number: int, payload: Payload) -> None:
        """Makes the object of a payload. An island that has nothing to contribute sends a header alone."""
        try:
            body = bytes_of(payload.body) if payload.weight else b""
            form = CLOSING_FORM if payload.closing else FORM
            where = (payload.codec.name, payload.fragment, payload.round, payload.numel)
            header = Header(form, *where, len(body), payload.weight, payload.steps, checksum(tensor_of(body)))
            data = header.pack() + body
            own = Contribution(NOBODY, payload.weight, payload.steps, len(data), digest(data), payload.closing)
            self._own[number] = data
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
        values = reduction.weighted_mean(bodies, weights, self._joining.codec, numel, factors)
        present = {each.island: weight for each, weight in zip(contributions, weights, strict=True) if weight > 0}
        mean, sent = Mean(values, present), self._sent.get(number)
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
class _Check:
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


NOTHING = Tensor()


def shares(contributions: Sequence[Contribution]) -> list[float]:
    """The weights of a mean: of each island, times its steps as a share of the most steps in the round.

    >>> some = [Contribution(0, 1.0, 30, 99, "x"), Contribution(1, 2.0, 30, 99, "y"), Contribution(2, 1.0, 15, 99, "z")]
    >>> shares(some)
    [1.0, 2.0, 0.5]
    """
    most = max(each.steps for each in contributions) or 1
    return [each.weight * (each.steps / most) for each in contributions]


def pack_fragments(state: list[dict[str, Tensor]], rank: int = 0) -> dict[str, bytes]:
    """The parts of a snapshot that a rank has, by label."""
    return {label(index, rank): pack_state(tensors) for index, tensors in enumerate(state)}


def check_sizes(number: int, fragments: list[dict[str, Tensor]], numels: list[int]) -> None:
    """Raises unless a snapshot fits."""
    sizes = [each["anchor"].numel() for each in fragments]
    if sizes != numels:
        raise DamagedError(f"snapshot {number} has fragments of {sizes} values, not {numels}")


def pack_state(tensors: dict[str, Tensor]) -> bytes:
    """A part of a snapshot: safetensors, the same bytes whoever writes them."""
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in sorted(tensors.items())})


def unpack_state(data: bytes, name: str) -> dict[str, Tensor]:
    """Reads it back. Nothing in it is evaluated."""
    try:
        return safetensors.torch.load(data)
    except Exception as error:
        raise DamagedError(f"{name} is not a part of a snapshot: {error}") from None


def _is_number(value: Any, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
