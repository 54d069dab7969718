"""The two forms of `isles.wire.reduction`, as letters between processes.

An exchange gets ready for all that it will receive when it is made. Then, each in a thread of its own (see
`isles.wire.torch_world`), `send` gives away what the island has, when all have said that they are going to do the same;
`reduce` averages for others, where that is part of the form; `read` waits for what comes to the island and makes the
mean of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from isles.wire import message, reduction
from isles.wire.mail import Kind, Mail
from isles.wire.memory import empty
from isles.wire.message import CHECKSUM, Header
from isles.wire.world import Payload


class Exchange(Protocol):
    """One round between processes."""

    def send(self) -> None: ...

    def reduce(self, headers: Sequence[Header]) -> None: ...

    def read(self, headers: Sequence[Header]) -> Tensor: ...


class AllGather:
    """Every island sends its body to all others."""

    def __init__(self, payload: Payload, mail: Mail, turn: int) -> None:
        self._payload, self._mail, self._turn = payload, mail, turn
        self._bodies = [torch.empty_like(payload.body) for _ in range(mail.size)]
        self._bodies[mail.rank] = payload.body
        self._coming = mail.expect(Kind.BODY, self._bodies)
        self._going: list[Future[None]] = []

    def send(self) -> None:
        self._going += self._mail.send(Kind.BODY, [self._payload.body] * self._mail.size, self._turn)

    def reduce(self, headers: Sequence[Header]) -> None:
        """Everybody averages for itself."""

    def read(self, headers: Sequence[Header]) -> Tensor:
        self._mail.wait(self._coming)
        _all_sent(self._going)
        for rank, (header, body) in enumerate(zip(headers, self._bodies, strict=True)):
            message.verify(header, body, rank, self._mail.rank)
        weights = [header.weight for header in headers]
        return reduction.weighted_mean(self._bodies, weights, self._payload.codec, self._payload.numel)


class ReduceScatter:
    """Every island gets its piece of all bodies, averages it, and sends the mean to all others: part after part, so
    that one is averaged while others are on the link.

    Every part has its own checksum. The last mean is sent when all of them were right: nobody completes a round of
    which a piece was damaged on its way to somebody.
    """

    def __init__(self, payload: Payload, mail: Mail, turn: int) -> None:
        self._payload, self._mail, self._turn = payload, mail, turn
        self._numel = reduction.piece_numel(payload.numel, mail.size, payload.codec)
        self._parts = reduction.parts(self._numel, payload.codec)
        self._sent, self._received, self._means = (
            [list(torch.empty(mail.size, part.num_bytes + CHECKSUM.size, dtype=torch.uint8)) for part in self._parts]
            for _ in range(3)
        )
        self._coming = [mail.expect(Kind.BODY, received) for received in self._received]
        self._coming_means = [mail.expect(Kind.MEAN, means) for means in self._means]
        self._going: list[Future[None]] = []

    def send(self) -> None:
        payload, mail = self._payload, self._mail
        pieces = reduction.split(payload.body, payload.numel, mail.size, payload.codec)
        for part, sent, received in zip(self._parts, self._sent, self._received, strict=True):
            for row, piece in zip(sent, pieces, strict=True):
                row[: part.num_bytes] = piece[part.encoded]
                message.seal(row)
            received[mail.rank] = sent[mail.rank]
            self._going += mail.send(Kind.BODY, sent, self._turn)

    def reduce(self, headers: Sequence[Header]) -> None:
        codec, mail = self._payload.codec, self._mail
        weights, about = [header.weight for header in headers], headers[0].about()
        for part, coming, received, means in zip(self._parts, self._coming, self._received, self._means, strict=True):
            mail.wait(coming)
            bodies = [
                message.unseal(row, f"a piece of island {rank} ({about})", mail.rank)
                for rank, row in enumerate(received)
            ]
            mean = means[mail.rank]
            reduction.average(bodies, weights, codec, part, out=mean[: part.num_bytes])
            message.seal(mean)
            self._going += mail.send(Kind.MEAN, [mean] * mail.size, self._turn)

    def read(self, headers: Sequence[Header]) -> Tensor:
        codec, mail, about = self._payload.codec, self._mail, headers[0].about()
        values = empty(mail.size * self._numel)
        pieces = values.view(mail.size, self._numel)
        for part, coming, means in zip(self._parts, self._coming_means, self._means, strict=True):
            mail.wait(coming)
            for rank, row in enumerate(means):
                mean = message.unseal(row, f"the mean of island {rank} ({about})", mail.rank)
                codec.decode(mean, part.numel, out=pieces[rank, part.values])
        _all_sent(self._going)
        return values[: self._payload.numel]


FORMS: dict[str, Callable[[Payload, Mail, int], Exchange]] = {"all-gather": AllGather, "reduce-scatter": ReduceScatter}


def _all_sent(going: list[Future[None]]) -> None:
    """Raises what kept a letter from being sent."""
    for sent in going:
        sent.result()
