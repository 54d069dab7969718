"""Islands as processes, joined by torch.distributed: one machine, many machines, or many datacentres.

Between islands everything goes over gloo, from host memory, whatever the training inside an island uses. The
links are TCP and slow, the payloads are small, and gloo needs no GPU. `TorchWorld` makes a group of its own
with its own time-out, so that its traffic and the user's collectives cannot get into each other's way.

One thread per world does all the talking: it takes the rounds in the order in which they were started, the
same on every island, exchanges headers, checks that they agree, moves the bodies, checks them, and averages,
while the training loop runs on. Bodies go in slices: the time-out is about silence, not about how long a
large payload takes on a slow link.

When a peer dies or stays silent for `timeout`, the round that was under way raises `LostPeerError`, and so
does every later one."""

from __future__ import annotations

import datetime
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isles.wire import message, reduction
from isles.wire.message import Header
from isles.wire.reduction import Reduction, check_reduction, choose
from isles.wire.world import LostPeerError, Mean, MismatchError, Payload

T = TypeVar("T")
R = TypeVar("R")

SLICE_BYTES = 8 << 20
"""At most this much of a body goes into one collective."""


class TorchWorld:
    """The islands of a process group, or of one dimension of a device mesh; None: the default group.

    `timeout` (seconds, or a timedelta) is how long an island may be silent before it counts as lost. It has
    to be longer than the longest pause of one island: an evaluation, a checkpoint, a slow start. `reduction`
    is "all-gather", "reduce-scatter" or "auto" (see `isles.wire.reduction`). All ranks of the group make
    their TorchWorld at the same time."""

    def __init__(
        self,
        group_or_mesh: Any = None,
        timeout: float | datetime.timedelta = 600.0,
        *,
        reduction: Reduction = "auto",
    ) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e9:
            raise ValueError(f"timeout={timeout!r} must be a number of seconds greater than 0, or a timedelta")
        check_reduction(reduction)
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "TorchWorld needs torch.distributed: start with torchrun, call torch.distributed.init_process_group()"
            )
        ranks = dist.get_process_group_ranks(_group_of(group_or_mesh))
        self.timeout_seconds = float(seconds)
        self._group = dist.new_group(
            ranks, timeout=datetime.timedelta(seconds=seconds), backend="gloo", use_local_synchronization=True
        )
        self.rank = ranks.index(dist.get_rank())
        self._size = len(ranks)
        self._form = choose(reduction, self._size)
        self._talker = _Talker(self.rank, self.timeout_seconds)
        weakref.finalize(self, self._talker.stop)

    @property
    def size(self) -> int:
        return self._size

    def start(self, payload: Payload) -> _Round:
        return _Round(self._talker.do(self._exchange, payload), reduction.traffic(self._form, self.size, payload))

    def gather(self, data: bytes) -> list[bytes]:
        return self._talker.do(self._gather, data).result()

    # ---- in the talker's thread

    def _exchange(self, payload: Payload) -> Mean:
        all_gather = self._form == "all-gather"
        pieces = (
            payload.body.view(1, -1)
            if all_gather
            else reduction.split(payload.body, payload.numel, self.size, payload.codec)
        )
        headers = self._exchange_headers(message.header_of(payload, list(pieces)))
        values = (self._all_gather if all_gather else self._reduce_scatter)(payload, pieces, headers)
        return Mean(values, {rank: header.weight for rank, header in enumerate(headers) if header.weight > 0})

    def _exchange_headers(self, own: Header) -> list[Header]:
        received = self._collect(_tensor_of(own.pack()))
        headers = [Header.unpack(_bytes_of(row), len(own.checksums), rank) for rank, row in enumerate(received)]
        message.agree(headers)
        return headers

    def _all_gather(self, payload: Payload, pieces: Tensor, headers: list[Header]) -> Tensor:
        bodies = self._collect(pieces[0])
        for rank, (header, body) in enumerate(zip(headers, bodies, strict=True)):
            message.verify(header, 0, body, rank)
        return reduction.weighted_mean(bodies, [header.weight for header in headers], payload.codec, payload.numel)

    def _reduce_scatter(self, payload: Payload, pieces: Tensor, headers: list[Header]) -> Tensor:
        codec = payload.codec
        size = reduction.piece_numel(payload.numel, self.size, codec)
        received = self._distribute(pieces)
        for rank, (header, piece) in enumerate(zip(headers, received, strict=True)):
            message.verify(header, self.rank, piece, rank)
        own_mean = codec.encode(reduction.weighted_mean(received, [header.weight for header in headers], codec, size))
        checksums = self._collect(_tensor_of(message.checksum(own_mean).to_bytes(reduction.CHECKSUM_BYTES, "little")))
        means = self._collect(own_mean)
        for rank, (mean, expected) in enumerate(zip(means, checksums, strict=True)):
            if message.checksum(mean) != int.from_bytes(_bytes_of(expected), "little"):
                raise MismatchError(f"the mean that island {rank} made ({headers[0].about()}) was damaged on the way")
        return torch.cat([codec.decode(mean, size) for mean in means])[: payload.numel]

    def _gather(self, data: bytes) -> list[bytes]:
        sizes = [
            int.from_bytes(_bytes_of(row), "little")
            for row in self._collect(_tensor_of(len(data).to_bytes(8, "little")))
        ]
        padded = self._collect(_tensor_of(data.ljust(max(sizes), b"\0")))
        return [_bytes_of(row[:size]) for row, size in zip(padded, sizes, strict=True)]

    # ---- collectives on bytes, in slices

    def _collect(self, own: Tensor) -> list[Tensor]:
        """Everybody's tensor; all have the same size."""
        received = list(torch.empty(self.size, own.numel(), dtype=torch.uint8))
        works = [
            dist.all_gather([row[cut] for row in received], own[cut], group=self._group, async_op=True)
            for cut in _slices(own.numel())
        ]
        for work in works:
            work.wait()
        return received

    def _distribute(self, pieces: Tensor) -> list[Tensor]:
        """Row r of everybody's table goes to island r: returns everybody's row for this island."""
        received = torch.empty_like(pieces)
        for cut in _slices(pieces.shape[1]):
            arrived = torch.empty_like(pieces[:, cut])
            dist.all_to_all_single(arrived, pieces[:, cut].contiguous(), group=self._group)
            received[:, cut] = arrived
        return list(received)


class _Round:
    """A round in the hands of the talker."""

    def __init__(self, answer: Future[Mean], num_bytes: int) -> None:
        self._answer = answer
        self.bytes_sent = self.bytes_received = num_bytes

    def wait(self) -> Mean:
        return self._answer.result()


class _Talker:
    """A thread that does one thing after the other. After a failure it does nothing more: every later job fails
    likewise.
    """

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rank, self._timeout_seconds = rank, timeout_seconds
        self._failure: Exception | None = None
        threading.Thread(target=_work_through, args=(self._jobs,), name=f"isles-island-{rank}", daemon=True).start()

    def do(self, job: Callable[[T], R], argument: T) -> Future[R]:
        answer: Future[R] = Future()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                answer.set_result(job(argument))
            except Exception as error:
                self._failure = self._failure or self._explain(error)
                answer.set_exception(self._failure)

        self._jobs.put(run)
        return answer

    def stop(self) -> None:
        self._jobs.put(None)

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, MismatchError) or not isinstance(error, RuntimeError):
            return error
        why = f"no answer for {self._timeout_seconds:g} s" if "imed out" in str(error) else "a connection broke"
        lost = LostPeerError(
            f"island {self._rank} lost another island ({why}); restart all islands from their last checkpoint"
        )
        lost.__cause__ = error
        return lost


def _work_through(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _group_of(group_or_mesh: Any) -> Any:
    """The process group of a one-dimensional device mesh, or what was given."""
    return group_or_mesh.get_group() if hasattr(group_or_mesh, "get_group") else group_or_mesh


def _slices(num_bytes: int) -> list[slice]:
    return [slice(at, min(at + SLICE_BYTES, num_bytes)) for at in range(0, num_bytes, SLICE_BYTES)]


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
