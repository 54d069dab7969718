"""The two forms of `isles.wire.reduction`, as letters between processes.

An exchange gets ready for all that it will receive when it is made; `send` gives away what the island has, when all
have said that they are going to do the same; `collect` waits for what comes. What is left to do when everything has
come, and needs nobody, is what `collect` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from isles.wire import message, reduction
from isles.wire.codec import Codec
from isles.wire.mail import Kind, Mail
from isles.wire.message import CHECKSUM, Header
from isles.wire.world import Payload


class Exchange(Protocol):
    """One round between processes."""

    def send(self) -> None: ...

    def collect(self, headers: list[Header]) -> Callable[[], Tensor]: ...


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

    def collect(self, headers: list[Header]) -> Callable[[], Tensor]:
        self._mail.wait(self._coming)
        _all_sent(self._going)

        def read() -> Tensor:
            for rank, (header, body) in enumerate(zip(headers, self._bodies, strict=True)):
                message.verify(header, body, rank, self._mail.rank)
            weights = [header.weight for header in headers]
            return reduction.weighted_mean(self._bodies, weights, self._payload.codec, self._payload.numel)

        return read


class ReduceScatter:
    """Every island gets its piece of all bodies, in halves, averages it, and sends the mean to all others.

    While one half is averaged the other one is on the link. The last means are sent when all checksums were right:
    nobody completes a round that was damaged on its way to somebody.
    """

    def __init__(self, payload: Payload, mail: Mail, turn: int) -> None:
        self._payload, self._mail, self._turn = payload, mail, turn
        self._length = payload.codec.num_bytes(reduction.piece_numel(payload.numel, mail.size, payload.codec))
        self._halves = _halves(self._length, payload.codec)
        self._sent, self._received, self._means = torch.empty(
            3, mail.size, self._length + CHECKSUM.size, dtype=torch.uint8
        )
        self._going: list[Future[None]] = []
        self._coming = [mail.expect(Kind.BODY, self._received[:, half]) for half in self._halves]
        self._coming_means = [work for half in self._halves for work in mail.expect(Kind.MEAN, self._means[:, half])]

    def send(self) -> None:
        payload, mail = self._payload, self._mail
        self._sent[:, : self._length] = reduction.split(payload.body, payload.numel, mail.size, payload.codec)
        for row in self._sent:
            message.seal(row)
        self._received[mail.rank] = self._sent[mail.rank]
        for half in self._halves:
            self._going += mail.send(Kind.BODY, self._sent[:, half], self._turn)

    def collect(self, headers: list[Header]) -> Callable[[], Tensor]:
        mean, about = self._means[self._mail.rank], headers[0].about()
        weights = [header.weight for header in headers]
        for half, coming in zip(self._halves, self._coming, strict=True):
            self._mail.wait(coming)
            last = half is self._halves[-1]
            if last:
                for rank, row in enumerate(self._received):
                    message.unseal(row, f"a piece of island {rank} ({about})", self._mail.rank)
            self._average(half, weights, mean)
            if last:
                message.seal(mean)
            self._going += self._mail.send(Kind.MEAN, [mean[half]] * self._mail.size, self._turn)
        self._mail.wait(self._coming_means)
        _all_sent(self._going)

        def read() -> Tensor:
            checked = [
                message.unseal(row, f"the mean of island {rank} ({about})", self._mail.rank)
                for rank, row in enumerate(self._means)
            ]
            return reduction.decode_pieces(checked, self._payload.codec, self._payload.numel)

        return read

    def _average(self, half: slice, weights: list[float], into: Tensor) -> None:
        codec = self._payload.codec
        body = slice(half.start, min(half.stop, self._length))
        numel = (body.stop - body.start) // codec.block_bytes * codec.block
        values = reduction.weighted_mean([row[body] for row in self._received], weights, codec, numel)
        codec.encode(values, out=into[body])


FORMS: dict[str, Callable[[Payload, Mail, int], Exchange]] = {"all-gather": AllGather, "reduce-scatter": ReduceScatter}


def _all_sent(going: list[Future[None]]) -> None:
    """Raises what kept a letter from being sent."""
    for sent in going:
        sent.result()


def _halves(num_bytes: int, codec: Codec) -> list[slice]:
    """Two parts of a piece of so many bytes, of whole blocks each, the checksum behind it with the second; or only one.

    >>> from isles.wire.codecs import codecs
    >>> _halves(10 * 66, codecs["e3m0"])
    [slice(0, 330, None), slice(330, 664, None)]
    """
    middle = num_bytes // codec.block_bytes // 2 * codec.block_bytes
    end = num_bytes + CHECKSUM.size
    if middle == 0 or codec.stochastic:  # whose rounding depends on where in its piece a block stands
        return [slice(0, end)]
    return [slice(0, middle), slice(middle, end)]
