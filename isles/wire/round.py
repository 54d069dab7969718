"""One path for a round, whatever moves the bytes: from an outer gradient to the mean over islands.

A round passes three stages, in the order in which rounds were started, the same on every island:

    announce    encode, if that is still to be done; exchange headers and check that they agree; queue the body
    reduce      average the pieces that this island averages for all (`isles.wire.exchange`)
    complete    wait for the rest, check and decode it, and take the outer step with it (`Payload.then`)

Where the transport has threads (`isles.wire.torch_world`), each stage has one, and a fourth hands messages to the
network, so that the link never stands still while something is computed: while one round waits for the others, the
bodies of the next are sent. `docs/log.md` ("A full link") has what each is worth. Where it has none (islands as threads
that take turns), the stages run when somebody waits for the round.

When a peer is lost, the rounds in flight raise `LostPeerError`, and so does every later one. When islands disagree
about a round, it and every later one raise `MismatchError`; earlier ones are brought to their end.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from isles.wire import message, reduction
from isles.wire.exchange import FORMS, Exchange, Kind, Transport
from isles.wire.message import HEADER_BYTES, Header, bytes_of, tensor_of
from isles.wire.reduction import MAX_IN_FLIGHT, Gathered, Reduction, choose
from isles.wire.worker import FirstFailure, Inline, Worker, stop_all
from isles.wire.world import Handle, Mean, Payload

R = TypeVar("R")
POLL_SECONDS = 1.0
"""How often the transport is asked whether everybody is still there, while somebody waits."""


class RoundWorld:
    """A world on a transport. Subclasses make the transport."""

    def __init__(self, transport: Transport, reduction: Reduction, failure: FirstFailure) -> None:
        self._transport, self._reduction, self._failure = transport, reduction, failure
        self._sequences, self._order = itertools.count(), threading.Lock()
        self._slots = threading.Semaphore(MAX_IN_FLIGHT)
        self._closed = False
        self._inline = None if transport.threaded else Inline(failure)
        self._workers = (
            [Worker(f"isles-{stage}-{transport.rank}", failure) for stage in ("announce", "reduce", "complete")]
            if transport.threaded
            else []
        )
        self._next_headers = self._receive_headers()
        weakref.finalize(self, _leave, transport, self._workers, "")

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def size(self) -> int:
        return self._transport.size

    def start(self, payload: Payload) -> Handle:
        """Starts a round, which goes on in the background, if there is one."""
        if self.size == 1:
            return Alone(payload)
        if self._inline is not None:
            payload.body  # noqa: B018  (made here: there is no thread to make it in)
        form = choose(self._reduction, self.size, payload.codec)
        announce, reduce, complete = self._stages()
        with self._order:
            sequence = next(self._sequences)
            started = Round(self, payload, form, sequence)
            started.announced = announce.do(started._announce, sequence=sequence)
            started.reduced = reduce.do(started._reduce, sequence=sequence)
            started.completed = complete.do(started._complete, sequence=sequence)
        slots = self._slots
        started.completed.add_done_callback(lambda _: slots.release())
        return started

    def gather(self, data: bytes) -> list[bytes]:
        """Bytes from every island, in the order of ranks."""
        with self._order:
            notes = self._stages()[0].do(self._gather, data, sequence=next(self._sequences))
        return self.result(notes)

    def close(self, reason: str = "") -> None:
        """Leaves. With a reason ("at step 40: ..."), islands that still wait for this one raise it."""
        if not self._closed:
            self._closed = True
            self._failure.record(-1, RuntimeError("this world is closed: make a new one"))
            _leave(self._transport, self._workers, reason)
            self._next_headers = None  # which refers to connections

    def result(self, answer: Future[R]) -> R:
        """Waits for a stage. Raises LostPeerError if a peer is gone, although nobody may have noticed yet."""
        if self._inline is not None:
            self._inline.run_until(answer)
        while not (answer.done() or wait([answer], POLL_SECONDS).done):
            self._transport.check()
        return answer.result()

    def _stages(self) -> Sequence[Worker | Inline]:
        return self._workers or [self._inline] * 3  # type: ignore[list-item]

    # ---- in the first stage

    def exchange_headers(self, own: Header) -> list[Header]:
        """Everybody's header; raises unless they agree. Receives for the next headers are posted before anybody can
        have sent them.
        """
        pending, packed = self._next_headers, tensor_of(own.pack())
        self._next_headers = self._receive_headers()
        self._transport.send_now(Kind.HEADER, [packed] * self.size)
        rows = pending.wait()
        rows[self.rank] = packed
        headers = [Header.unpack(bytes_of(row), rank) for rank, row in enumerate(rows)]
        message.agree(headers)
        return headers

    def _receive_headers(self) -> Any:
        return self._transport.receive(Kind.HEADER, [HEADER_BYTES] * self.size)

    def _gather(self, data: bytes) -> list[bytes]:
        headers = self.exchange_headers(Header.of_note(data))
        pending = self._transport.receive(Kind.NOTE, [header.num_bytes for header in headers])
        own: Tensor = tensor_of(data)
        self._transport.send_now(Kind.NOTE, [own] * self.size)
        notes = pending.wait()
        notes[self.rank] = own
        for rank, (header, note) in enumerate(zip(headers, notes, strict=True)):
            message.verify(header, note, rank, self.rank)
        return [bytes_of(note) for note in notes]


@dataclass
class Alone:
    """A round of one island: its mean is what it sends, as others would decode it."""

    payload: Payload
    bytes_sent: int = 0
    bytes_received: int = 0
    mean: Mean | None = None

    def wait(self) -> Mean:
        if self.mean is None:
            payload, body = self.payload, self.payload.body
            weight = payload.weight  # which counts once the body is made
            result = Gathered([body], [weight], payload.codec, payload.numel).result(payload.gathers)
            self.mean = Mean(result, {0: weight} if weight > 0 else {}, closing=payload.closing)
        return self.mean


class Round:
    """A round in flight. It refers to its world until it is over, which lives at least as long."""

    announced: Future[None]
    reduced: Future[None]
    completed: Future[Mean]

    def __init__(self, world: RoundWorld, payload: Payload, form: Reduction, sequence: int) -> None:
        self._world: RoundWorld | None = world
        self._form, self._sequence = form, sequence
        self._payload: Payload | None = payload
        self._exchange: Exchange | None = None
        self._headers: list[Header] = []
        self.bytes_sent = self.bytes_received = reduction.traffic(form, world.size, payload)
        self.arrived: float | None = None

    def wait(self) -> Mean:
        world = self._world
        return self.completed.result() if world is None else world.result(self.completed)

    def _announce(self) -> None:
        world, payload = self._world, self._payload
        assert world is not None
        assert payload is not None
        payload.body  # noqa: B018  (made here, if it is not made yet)
        world._slots.acquire()
        world._failure.check(self._sequence)
        self._exchange = FORMS[self._form](payload, world._transport, self._sequence)
        self._headers = world.exchange_headers(Header.of_payload(payload, self._form))
        self._exchange.send()

    def _reduce(self) -> None:
        self.announced.result()
        assert self._exchange is not None
        self._exchange.reduce(self._headers)

    def _complete(self) -> Mean:
        self.reduced.result()
        assert self._exchange is not None
        assert self._payload is not None
        weights = {rank: header.weight for rank, header in enumerate(self._headers) if header.weight > 0}
        mean = Mean(self._exchange.mean(self._headers), weights, closing=self._payload.closing)
        in_background = self._world is not None and self._world._inline is None
        then = self._payload.then if in_background else None
        self._exchange = self._payload = None  # and with them the memory of bodies
        if then is not None:
            then(mean)
        self.arrived = time.perf_counter() if in_background else None
        self._world = None
        return mean


def _leave(transport: Transport, workers: Sequence[Worker], reason: str) -> None:
    """Tells the others, ends what threads wait for, ends the threads, gives connections back."""
    transport.leave(reason)
    stop_all(workers)
    transport.release()
