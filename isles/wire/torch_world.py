"""Islands as processes, joined by torch.distributed: one machine, many machines, or many datacentres.

Between islands everything goes over gloo, from host memory, whatever the training inside an island uses. The
links are TCP and slow, the payloads are small, and gloo needs no GPU. `TorchWorld` makes a group of its own
with its own time-out, so that its traffic and the user's collectives cannot get into each other's way.

One thread per world does all the talking: it takes the rounds in the order in which they were started, the
same on every island, exchanges headers, checks that they agree, and moves the bodies, while the training loop
runs on. A second one encodes before it, what is not encoded yet, and a third one checks and averages after it, so
that the link does not stand still meanwhile. Bodies go in slices: the time-out is about silence, not about how long
a large payload takes on a slow link.

When a peer dies or stays silent for `timeout`, the round that was under way raises `LostPeerError`, and so
does every later one.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from isles.wire import message, reduction
from isles.wire.codec import Codec
from isles.wire.message import CHECKSUM, Header
from isles.wire.reduction import Reduction, check_reduction, choose
from isles.wire.worker import Worker
from isles.wire.world import LostPeerError, Mean, Payload

SLICE_BYTES = 1 << 20
"""At most this much of a body goes into one collective."""


class TorchWorld:
    """The islands of a process group, or of one dimension of a device mesh; None: the default group.

    `timeout` (seconds, or a timedelta) is how long an island may be silent before it counts as lost. It has
    to be longer than the longest pause of one island: an evaluation, a checkpoint, a slow start. `reduction`
    is "all-gather", "reduce-scatter" or "auto" (see `isles.wire.reduction`). All ranks of the group make
    their TorchWorld at the same time.
    """

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
        ranks = _ranks_of(group_or_mesh)
        self.timeout_seconds = float(seconds)
        self.rank = ranks.index(dist.get_rank())
        self._size = len(ranks)
        self._reduction: Reduction = reduction
        try:
            self._group = dist.new_group(
                ranks, datetime.timedelta(seconds=seconds), backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:
            raise self._lost(error) from error
        self._encoder, self._talker, self._reader = (
            Worker(f"isles-{what}-{self.rank}") for what in ("encode", "island", "read")
        )
        for thread in (self._encoder, self._talker, self._reader):
            weakref.finalize(self, thread.stop)

    @property
    def size(self) -> int:
        return self._size

    waits_anywhere = True
    """Any thread may wait for a round."""

    def start(self, payload: Payload) -> _Round:
        form = choose(self._reduction, self.size, payload.codec)
        body = self._encoder.do(lambda: payload.body)
        moved = self._talker.do(self._exchange, payload, form, body)
        return _Round(self._reader.do(lambda: moved.result()()), reduction.traffic(form, self.size, payload))

    def gather(self, data: bytes) -> list[bytes]:
        return self._talker.do(self._gather, data).result()

    # ---- in the talker's thread

    def _exchange(self, payload: Payload, form: Reduction, body: Future[Tensor]) -> Callable[[], Mean]:
        """Moves what there is to move; returns what is left to do."""
        body.result()
        headers = self._exchange_headers(Header.of_payload(payload, form))
        weights = [header.weight for header in headers]
        move = self._all_gather if form == "all-gather" else self._reduce_scatter
        read = move(payload, headers, weights)
        return lambda: Mean(read(), {rank: weight for rank, weight in enumerate(weights) if weight > 0})

    def _exchange_headers(self, own: Header) -> list[Header]:
        headers = [
            Header.unpack(_bytes_of(row), rank) for rank, row in enumerate(self._collect(_tensor_of(own.pack())))
        ]
        message.agree(headers)
        return headers

    def _all_gather(self, payload: Payload, headers: list[Header], weights: list[float]) -> Callable[[], Tensor]:
        bodies = self._collect(payload.body)

        def read() -> Tensor:
            for rank, (header, body) in enumerate(zip(headers, bodies, strict=True)):
                message.verify(header, body, rank, self.rank)
            return reduction.weighted_mean(bodies, weights, payload.codec, payload.numel)

        return read

    def _reduce_scatter(self, payload: Payload, headers: list[Header], weights: list[float]) -> Callable[[], Tensor]:
        """Every island gets its piece of all bodies, in halves, averages it, and the means are collected.

        While one half is averaged the other one is on the link. The last means are sent when all checksums were right:
        nobody completes a round that was damaged on its way to somebody.
        """
        codec, about = payload.codec, headers[0].about()
        pieces = reduction.split(payload.body, payload.numel, self.size, codec)
        length = pieces.shape[1]
        sent, received, means = torch.empty(3, self.size, length + CHECKSUM.size, dtype=torch.uint8)
        sent[:, :length] = pieces
        for row in sent:
            message.seal(row)
        received[self.rank] = sent[self.rank]
        mean = torch.empty_like(sent[0])

        def average(half: slice) -> None:
            body = slice(half.start, min(half.stop, length))
            numel = (body.stop - body.start) // codec.block_bytes * codec.block
            values = reduction.weighted_mean([row[body] for row in received], weights, codec, numel)
            codec.encode(values, out=mean[body])

        halves = _halves(length, codec)
        for number, half in enumerate(halves):
            works = self._pass_on(sent, received, half, 1)
            if number > 0:
                average(halves[number - 1])
            self._wait(works)
            for distance in range(2, self.size):
                self._wait(self._pass_on(sent, received, half, distance))
        going = [work for half in halves[:-1] for work in self._start_collecting(means, mean, half)]
        for rank, row in enumerate(received):
            message.unseal(row, f"a piece of island {rank} ({about})", self.rank)
        average(halves[-1])
        message.seal(mean)
        self._wait([*going, *self._start_collecting(means, mean, halves[-1])])

        def read() -> Tensor:
            checked = [
                message.unseal(row, f"the mean of island {rank} ({about})", self.rank) for rank, row in enumerate(means)
            ]
            return reduction.decode_pieces(checked, codec, payload.numel)

        return read

    def _gather(self, data: bytes) -> list[bytes]:
        headers = self._exchange_headers(Header.of_note(data))
        longest = max(header.num_bytes for header in headers)
        notes = []
        for rank, (header, row) in enumerate(
            zip(headers, self._collect(_tensor_of(data.ljust(longest, b"\0"))), strict=True)
        ):
            message.verify(header, row[: header.num_bytes], rank, self.rank)
            notes.append(_bytes_of(row[: header.num_bytes]))
        return notes

    # ---- collectives on bytes, in slices

    def _collect(self, own: Tensor) -> list[Tensor]:
        """Everybody's tensor; all have the same size."""
        received = torch.empty(self.size, own.numel(), dtype=torch.uint8)
        self._wait(self._start_collecting(received, own, slice(0, own.numel())))
        return list(received)

    def _start_collecting(self, received: Tensor, own: Tensor, part: slice) -> list[Any]:
        """Starts to collect a part of everybody's tensor in the rows of a table."""
        return [
            self._start(dist.all_gather, [row[cut] for row in received], own[cut], async_op=True)
            for cut in _slices(part)
        ]

    def _pass_on(self, pieces: Tensor, received: Tensor, part: slice, distance: int) -> list[Any]:
        """Starts to give the island so many places on its row of a table, and to receive one's own row.

        All islands at once would be simpler, and slower: where several senders meet on one link, other links stand idle
        (docs/log.md).
        """
        to, origin = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        return [
            work
            for cut in _slices(part)
            for work in (
                self._start(dist.irecv, received[origin, cut], group_src=origin),
                self._start(dist.isend, pieces[to, cut], group_dst=to),
            )
        ]

    def _start(self, what: Callable[..., Any], *tensors: Any, **more: Any) -> Any:
        try:
            return what(*tensors, group=self._group, **more)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, works: Iterable[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> LostPeerError:
        why = (
            f"no answer for {self.timeout_seconds:g} s"
            if "ime" in str(error) and "out" in str(error)
            else "a connection broke"
        )
        return LostPeerError(
            f"island {self.rank} lost another island ({why}); restart all islands from their last checkpoint"
        )


class _Round:
    """A round in the hands of the talker."""

    def __init__(self, answer: Future[Mean], num_bytes: int) -> None:
        self._answer = answer
        self.bytes_sent = self.bytes_received = num_bytes

    def wait(self) -> Mean:
        return self._answer.result()


def _ranks_of(group_or_mesh: Any) -> list[int]:
    """The global ranks of a process group, or of a one-dimensional device mesh; None: of the default group."""
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names or "its dimensions"
            raise ValueError(
                f"a mesh of {group_or_mesh.ndim} dimensions: choose the one of the islands, as mesh[name], of {names}"
            )
        group_or_mesh = group_or_mesh.get_group()
    if group_or_mesh is not None and not isinstance(group_or_mesh, dist.ProcessGroup):
        raise ValueError(f"TorchWorld takes a process group or a device mesh, not {group_or_mesh!r}")
    ranks = dist.get_process_group_ranks(group_or_mesh)
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"rank {dist.get_rank()} is not in this group of ranks {ranks}: make a TorchWorld on its members only"
        )
    return ranks


def _slices(part: slice) -> list[slice]:
    """What goes into one collective each."""
    starts = range(part.start, part.stop, SLICE_BYTES)
    return [slice(start, min(start + SLICE_BYTES, part.stop)) for start in starts]


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


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
