"""Islands as processes, joined by torch.distributed: one machine, many machines, or many datacentres.

Between islands everything goes over gloo, from host memory, whatever the training inside an island uses. The
links are TCP and slow, the payloads are small, and gloo needs no GPU. `TorchWorld` makes a group of its own
with its own time-out, so that its traffic and the user's collectives cannot get into each other's way.

A round goes from thread to thread, beside the training loop, as on an assembly line; each one takes the rounds in the
order in which they were started, the same on every island:

    encode     makes the body, if that is still to be done
    agree      exchanges headers, checks that they agree, and only then has the body sent, in sealed pieces or whole
    send       hands letters to gloo, those of the earliest round first (`isles.wire.mail`)
    reduce     averages what the others need averaged, as it comes (`isles.wire.exchange`)
    read       waits for the rest, checks and decodes it

so that the link does not stand still while anything else is done. A few rounds may be on it: while one waits for
means, the bodies of the next one go.

When a peer dies or stays silent for `timeout`, the rounds that are under way raise `LostPeerError`, and so does every
later one. When islands disagree about a round, it and every later one raise `MismatchError`; those before it are
brought to their end.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from isles.wire import message, reduction
from isles.wire.exchange import FORMS, Exchange
from isles.wire.mail import Kind, Mail, for_ever, lost
from isles.wire.message import HEADER_BYTES, Header, bytes_of, tensor_of
from isles.wire.reduction import MOST_ON_THE_LINK, Reduction, check_reduction, choose
from isles.wire.worker import Fate, Worker, stop_all
from isles.wire.world import Mean, Payload

Agreed = Future[tuple[Exchange, list[Header]]]
"""An exchange about which all islands agree, and what they said."""


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
        self.rank = ranks.index(dist.get_rank())
        self._reduction: Reduction = reduction
        try:
            group = dist.new_group(
                ranks, datetime.timedelta(seconds=seconds), backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:
            raise lost(self.rank, error, seconds) from error
        self._fate = Fate()
        self._mail = Mail(group, seconds, self._fate)
        self._encoder, self._herald, self._reducer, self._reader = line = [
            Worker(f"isles-{what}-{self.rank}", self._fate) for what in ("encode", "agree", "reduce", "read")
        ]
        weakref.finalize(self, _leave, [*line, self._mail.sender], self._fate, self._mail.under_way)
        self._turns, self._in_order = itertools.count(), threading.Lock()
        self._room = threading.Semaphore(MOST_ON_THE_LINK)
        self._next_headers = self._expect(Kind.HEADER, [HEADER_BYTES] * self.size)

    @property
    def size(self) -> int:
        return self._mail.size

    waits_anywhere = True
    """Any thread may wait for a round."""

    def start(self, payload: Payload) -> _Round:
        form, room = choose(self._reduction, self.size, payload.codec), self._room
        with self._in_order:
            turn = next(self._turns)
            body = self._encoder.do(lambda: payload.body, turn=turn)
            agreed = self._herald.do(self._agree, payload, form, body, turn, turn=turn)
            reduced = self._reducer.do(_reduce, agreed, turn=turn)
            mean = self._reader.do(self._read, agreed, reduced, turn=turn)
        mean.add_done_callback(lambda _: room.release())
        return _Round(mean, self._mail, reduction.traffic(form, self.size, payload))

    def gather(self, data: bytes) -> list[bytes]:
        with self._in_order:
            notes = self._herald.do(self._gather, data, turn=next(self._turns))
        return self._mail.result_of(notes)

    # ---- in the herald's thread

    def _agree(
        self, payload: Payload, form: Reduction, body: Future[Tensor], turn: int
    ) -> tuple[Exchange, list[Header]]:
        """Begins an exchange when there is room for it, and all others do."""
        body.result()
        self._room.acquire()
        self._fate.check(turn)
        exchange = FORMS[form](payload, self._mail, turn)
        headers = self._exchange_headers(Header.of_payload(payload, form))
        exchange.send()
        return exchange, headers

    def _exchange_headers(self, own: Header) -> list[Header]:
        (rows, coming), packed = self._next_headers, tensor_of(own.pack())
        self._next_headers = self._expect(Kind.HEADER, [HEADER_BYTES] * self.size)  # before anybody can have left
        self._mail.send_at_once(Kind.HEADER, [packed] * self.size)
        self._mail.wait(coming)
        rows[self.rank] = packed
        headers = [Header.unpack(bytes_of(row), rank) for rank, row in enumerate(rows)]
        message.agree(headers)
        return headers

    def _gather(self, data: bytes) -> list[bytes]:
        headers = self._exchange_headers(Header.of_note(data))
        notes, coming = self._expect(Kind.NOTE, [header.num_bytes for header in headers])
        notes[self.rank] = tensor_of(data)
        self._mail.send_at_once(Kind.NOTE, [notes[self.rank]] * self.size)
        self._mail.wait(coming)
        for rank, (header, note) in enumerate(zip(headers, notes, strict=True)):
            message.verify(header, note, rank, self.rank)
        return [bytes_of(note) for note in notes]

    def _expect(self, kind: Kind, sizes: list[int]) -> tuple[list[Tensor], list[Any]]:
        """Gets ready for a letter of each island, of so many bytes."""
        letters = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        return letters, self._mail.expect(kind, letters)

    # ---- in the reader's thread

    def _read(self, agreed: Agreed, reduced: Future[None]) -> Mean:
        """The mean of a round. (A method, so that the world and its threads live until its last round is over.)"""
        reduced.result()
        exchange, headers = agreed.result()
        weights = {rank: header.weight for rank, header in enumerate(headers) if header.weight > 0}
        return Mean(exchange.read(headers), weights)


def _leave(workers: list[Worker], fate: Fate, under_way: set[Any]) -> None:
    """Nobody holds the world any more."""
    stop_all(workers)
    if fate.has_failed:
        for_ever.append(under_way)


def _reduce(agreed: Agreed) -> None:
    exchange, headers = agreed.result()
    exchange.reduce(headers)


class _Round:
    """A round on its way from thread to thread."""

    def __init__(self, answer: Future[Mean], mail: Mail, num_bytes: int) -> None:
        self._answer, self._mail = answer, mail
        self.bytes_sent = self.bytes_received = num_bytes

    def wait(self) -> Mean:
        return self._mail.result_of(self._answer)


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
