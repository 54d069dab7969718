"""The two forms of `isles.wire.reduction`, as messages between islands.

A transport moves the messages. It knows nothing of codecs, weights or means. Messages of one kind from one island
arrive in the order in which they were sent; messages of different kinds may overtake each other.

    receive(kind, sizes) -> pending     posts a receive from every other island, before anything can have been sent
    pending.wait()       -> messages    by rank; the island's own place is to be filled in
    send(kind, messages, sequence)      queues a message to every other island; lower sequence numbers go first
    send_now(kind, messages)            sends small messages at once, ahead of those that are queued
    check()                             called now and then while somebody waits: raises if a peer is gone
    leave(reason)                       breaks the connections, which ends all waiting; tells the others why
    release()                           gives sockets and threads back, when nobody uses them any more

`isles.wire.local_world` has the one between threads, `isles.wire.torch_world` the one between processes.

An exchange posts all its receives when it is made. Then, each in a stage of its own (`isles.wire.round`): `send` queues
what the island contributes, once all islands have said that they will do the same; `reduce` averages for others, where
that is part of the form; `mean` waits for what comes to this island and makes the mean of it, or gives the payloads to
whoever averages them on a device (`Payload.gathers`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from isles.wire import message, reduction
from isles.wire.message import CHECKSUM, Header
from isles.wire.packing import empty
from isles.wire.reduction import Gathered
from isles.wire.world import Payload


class Kind(enum.IntEnum):
    """What a message is."""

    HEADER = 1
    BODY = 2
    MEAN = 3
    NOTE = 4
    PROBE = 5
    """Never sent."""


class Pending(Protocol):
    """Messages of one kind, one from every other island."""

    def wait(self) -> list[Tensor]: ...


class Transport(Protocol):
    """One island's connections to all others."""

    rank: int
    size: int
    threaded: bool
    """Whether rounds go on in threads, next to the training loop; else they do when somebody waits for one."""

    def receive(self, kind: Kind, sizes: Sequence[int]) -> Pending: ...

    def send(self, kind: Kind, messages: Sequence[Tensor], sequence: int) -> Sequence[Future[None]]: ...

    def send_now(self, kind: Kind, messages: Sequence[Tensor]) -> None: ...

    def check(self) -> None: ...

    def leave(self, reason: str) -> None: ...

    def release(self) -> None: ...


class AllGather:
    """Every island sends its body to all others."""

    def __init__(self, payload: Payload, transport: Transport, sequence: int) -> None:
        self._payload, self._transport, self._sequence = payload, transport, sequence
        self._bodies = transport.receive(Kind.BODY, [payload.body.numel()] * transport.size)
        self._sent: list[Future[None]] = []

    def send(self) -> None:
        bodies = [self._payload.body] * self._transport.size
        self._sent += self._transport.send(Kind.BODY, bodies, self._sequence)

    def reduce(self, headers: Sequence[Header]) -> None: ...  # everybody averages for itself

    def mean(self, headers: Sequence[Header]) -> Tensor | Gathered:
        bodies, payload = self._bodies.wait(), self._payload
        bodies[self._transport.rank] = payload.body
        _wait_for_sends(self._sent)
        for rank, (header, body) in enumerate(zip(headers, bodies, strict=True)):
            if rank != self._transport.rank:
                message.verify(header, body, rank, self._transport.rank)
        weights = [header.weight for header in headers]
        return Gathered(bodies, weights, payload.codec, payload.numel).result(payload.gathers)


class ReduceScatter:
    """Every island gets its piece of all bodies, averages it, and sends the mean to all others: part after part, so
    that one is averaged while others are on the link.

    Every part carries its own checksum. The last mean is sent only when all checksums were right: nobody completes a
    round of which a piece was damaged on its way to somebody.
    """

    def __init__(self, payload: Payload, transport: Transport, sequence: int) -> None:
        self._payload, self._transport, self._sequence = payload, transport, sequence
        self._numel = reduction.piece_numel(payload.numel, transport.size, payload.codec)
        self._parts = reduction.parts(self._numel, payload.codec)
        sizes = [[part.num_bytes + CHECKSUM.size] * transport.size for part in self._parts]
        self._pieces = [transport.receive(Kind.BODY, size) for size in sizes]
        self._means = [transport.receive(Kind.MEAN, size) for size in sizes]
        self._own_pieces: list[Tensor] = []
        self._own_means: list[Tensor] = []
        self._sent: list[Future[None]] = []

    def send(self) -> None:
        payload, transport = self._payload, self._transport
        pieces = reduction.split(payload.body, payload.numel, transport.size, payload.codec)
        for part in self._parts:
            rows = list(torch.empty(transport.size, part.num_bytes + CHECKSUM.size, dtype=torch.uint8))
            for row, piece in zip(rows, pieces, strict=True):
                row[: part.num_bytes] = piece[part.encoded]
                message.add_checksum(row)
            self._own_pieces.append(rows[transport.rank])
            self._sent += transport.send(Kind.BODY, rows, self._sequence)

    def reduce(self, headers: Sequence[Header]) -> None:
        codec, transport = self._payload.codec, self._transport
        weights, about = [header.weight for header in headers], headers[0].about()
        for part, pending, own in zip(self._parts, self._pieces, self._own_pieces, strict=True):
            rows = pending.wait()
            rows[transport.rank] = own
            bodies = [
                message.checked(row, f"a piece of island {rank} ({about})", transport.rank)
                for rank, row in enumerate(rows)
            ]
            mean = torch.empty_like(own)
            reduction.average(bodies, weights, codec, part, out=mean[: part.num_bytes])
            message.add_checksum(mean)
            self._own_means.append(mean)
            self._sent += transport.send(Kind.MEAN, [mean] * transport.size, self._sequence)

    def mean(self, headers: Sequence[Header]) -> Tensor:
        codec, transport, about = self._payload.codec, self._transport, headers[0].about()
        values = empty(transport.size * self._numel)
        pieces = values.view(transport.size, self._numel)
        for part, pending, own in zip(self._parts, self._means, self._own_means, strict=True):
            rows = pending.wait()
            rows[transport.rank] = own
            for rank, row in enumerate(rows):
                mean = message.checked(row, f"the mean of island {rank} ({about})", transport.rank)
                codec.decode(mean, part.numel, out=pieces[rank, part.values])
        _wait_for_sends(self._sent)
        return values[: self._payload.numel]


Exchange = AllGather | ReduceScatter
FORMS: dict[str, type[AllGather] | type[ReduceScatter]] = {"all-gather": AllGather, "reduce-scatter": ReduceScatter}


def _wait_for_sends(sent: Iterable[Future[None]]) -> None:
    """Raises what kept a message from being sent."""
    for each in sent:
        each.result()
