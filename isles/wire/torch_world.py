"""Islands as processes, joined by torch.distributed: one machine, many machines, or many datacentres.

Between islands everything goes over gloo, from host memory, whatever the training inside an island uses. The links are
TCP and slow, the payloads are small, and gloo needs no GPU. `TorchWorld` makes a group of its own with its own timeout,
so its traffic and the user's collectives cannot get into each other's way. `TorchWorld()` makes it of the ranks of a
process group, `TorchWorld.connect()` of islands that share none (`isles.wire.rendezvous`).

gloo sends a message when its receiver has posted the receive, and learns of that on the connection that the receiver's
own messages take. Where those fill the link, a receive that is posted late is heard of a queue later, and the sender's
link stands still meanwhile. So here

- receives are posted early: as soon as a size is known, long before anything can have been sent. The first message of a
  round has a fixed size, and the receive for the next one is always posted;
- one thread sends one message after the other, those of the earliest round first, and waits for no answer in between;
- long messages go in slices, a slice to each island in turn: the timeout is about silence, not about how long a large
  message takes on a slow link.

When a connection breaks, gloo does not wake whoever waits for the rest of a message that was cut off in the middle, and
on a full link there always is one. So `check` looks at the connections now and then. An island that leaves first writes
why into the store, where the others find it. `docs/log.md` ("A full link") has what all this is worth.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from isles.wire.exchange import Kind
from isles.wire.groups import break_connections, gloo_group, private_store, ranks_of
from isles.wire.message import check_byte_order
from isles.wire.reduction import Reduction, check_reduction
from isles.wire.rendezvous import linger, meet
from isles.wire.round import RoundWorld
from isles.wire.worker import FirstFailure, Worker, stop_all
from isles.wire.world import LostPeerError

SLICE_BYTES = 1 << 20
"""At most this much is sent at once."""
PROBE_SECONDS = 3.0
"""After so long without a message, connections are tried."""
STORE_SECONDS = 5.0
"""So long the store is waited for, when something has gone wrong."""


class TorchWorld(RoundWorld):
    """The islands of a process group, or of one dimension of a device mesh; None: the default group.

    `timeout` (seconds, or a timedelta) is how long an island may be silent before it counts as lost: longer than the
    longest pause of one, an evaluation, a checkpoint, a slow start. `reduction` is "all-gather", "reduce-scatter" or
    "auto" (see `isles.wire.reduction`). All ranks of the group make their TorchWorld at the same time.
    """

    def __init__(
        self,
        group_or_mesh: Any = None,
        timeout: float | datetime.timedelta = 600.0,
        *,
        reduction: Reduction = "auto",
    ) -> None:
        seconds = _check(timeout, reduction)
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "TorchWorld needs torch.distributed: start with torchrun, call torch.distributed.init_process_group(), "
                "or join islands without it, TorchWorld.connect(address, island, islands)"
            )
        self.ranks = ranks_of(group_or_mesh)
        """Global ranks of the islands; empty if they share no process group."""
        store = private_store("world", self.ranks)
        self._begin(store, self.ranks.index(dist.get_rank()), len(self.ranks), seconds, reduction)

    @classmethod
    def connect(
        cls,
        address: str,
        island: int,
        islands: int,
        timeout: float | datetime.timedelta = 600.0,
        *,
        reduction: Reduction = "auto",
    ) -> TorchWorld:
        """The islands that meet at an address, with no default process group or beside one: for trainers, which take
        the default group for one site. `address` is "HOST:PORT" of the machine of island 0. If there is a default
        group, all its ranks call this, and each finds the ranks at its place in the other islands.
        """
        seconds = _check(timeout, reduction)
        meeting = meet(address, island, islands, seconds)
        world = cls.__new__(cls)
        world.ranks = []
        world._begin(meeting.store, island, islands, seconds, reduction, meeting.is_host)
        return world

    def _begin(
        self, store: Store, rank: int, size: int, seconds: float, reduction: Reduction, hosts_store: bool = False
    ) -> None:
        failure = FirstFailure()
        transport = GlooTransport(store, rank, size, seconds, failure, hosts_store)
        super().__init__(transport, reduction, failure)


def _check(timeout: float | datetime.timedelta, reduction: Reduction) -> float:
    """The timeout in seconds."""
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e9:
        raise ValueError(f"timeout={timeout!r} must be a number of seconds greater than 0, or a timedelta")
    check_reduction(reduction)
    check_byte_order()
    return seconds


class GlooTransport:
    """Messages over a gloo group of its own: one to each of the other islands, in the order of ranks."""

    threaded = True

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        failure: FirstFailure,
        hosts_store: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout_seconds = timeout_seconds
        self._store: Any = store
        self._hosts_store = hosts_store
        self._left = False
        try:
            self._group: Any = gloo_group(store, rank, size, timeout_seconds)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._sender = Worker(f"isles-send-{self.rank}", failure)
        self._posted: set[_Pending] = set()
        """Receives that nothing has come for. If one went away while its connection is open, gloo would try to read
        what comes for it again and again."""
        self._num_done = self._num_seen = 0
        self._last_progress = time.monotonic()

    # ---- messages

    def receive(self, kind: Kind, sizes: Sequence[int]) -> _Pending:
        buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        works = [self._begin("recv", part, source, kind) for source, part in self._slices(buffers, -1)]
        pending = _Pending(self, buffers, works)
        self._posted.add(pending)
        return pending

    def send(self, kind: Kind, messages: Sequence[Tensor], sequence: int) -> list[Future[None]]:
        return [
            self._sender.do(self._send, kind, part, target, sequence=sequence)
            for target, part in self._slices(messages, 1)
        ]

    def send_now(self, kind: Kind, messages: Sequence[Tensor]) -> None:
        works = [self._begin("send", part, target, kind) for target, part in self._slices(messages, 1)]
        for work in works:
            self.finish(work)

    def finish(self, work: Any) -> None:
        """Waits for a send or a receive."""
        try:
            if work.wait() is False:
                raise RuntimeError("aborted")
        except RuntimeError as error:
            raise self._lost(error) from error
        self._num_done += 1

    def _send(self, kind: Kind, part: Tensor, target: int) -> None:
        self.finish(self._begin("send", part, target, kind))

    def _slices(self, messages: Sequence[Tensor], direction: int) -> Iterator[tuple[int, Tensor]]:
        """The messages of all others in the order in which they go, a slice of each in turn, the next island in a
        direction first. If everybody keeps to that order, and is as fast, no two islands send to the same one at the
        same time, and what arrives does so in the order of the other direction.
        """
        others = [(self.rank + direction * distance) % self.size for distance in range(1, self.size)]
        longest = max((messages[other].numel() for other in others), default=0)
        for start in range(0, longest, SLICE_BYTES):
            for other in others:
                part = messages[other][start : start + SLICE_BYTES]
                if part.numel():
                    yield other, part

    def _begin(self, what: str, part: Tensor, other: int, kind: Kind) -> Any:
        """Starts a send or a receive."""
        try:
            if self._group is None:
                raise RuntimeError("closed")
            call: Callable[..., Any] = getattr(self._group, what)
            return call([part], other, kind)
        except RuntimeError as error:
            raise self._lost(error) from error

    # ---- peers that are gone

    def check(self) -> None:
        """Raises LostPeerError if a connection is broken and nothing arrives any more."""
        if self._num_done > self._num_seen:
            self._num_seen, self._last_progress = self._num_done, time.monotonic()
        elif time.monotonic() - self._last_progress > min(PROBE_SECONDS, self._timeout_seconds / 4):
            self._last_progress = time.monotonic()
            for other, nothing in self._slices([torch.empty(1, dtype=torch.uint8)] * self.size, 1):
                self._begin("recv", nothing, other, Kind.PROBE)  # a broken connection refuses

    def _farewell(self) -> str:
        """What an island said that has left before its time, if one has."""
        for other in range(self.size):
            if other != self.rank and self._store.check([f"left/{other}"]):
                reason = self._store.get(f"left/{other}").decode(errors="replace")
                self._store.set(f"heard/{self.rank}", "")
                lost = f"island {self.rank} lost it; restart all islands from their last checkpoint"
                return f"island {other} left {reason} ({lost})"
        return ""

    def _ask_store(self, action: Callable[[], Any]) -> Any:
        """What the store says, or None: it may be gone, or behind a link that is down, and is not waited for long."""
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(action())

        thread = threading.Thread(target=ask, name="isles-store", daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        return answers[0] if answers else None

    def _lost(self, error: RuntimeError) -> LostPeerError:
        """What an error of gloo's means."""
        silent = "ime" in str(error) and "out" in str(error)
        if not silent and not self._left and (said := self._ask_store(self._farewell)):
            return LostPeerError(said)
        why = f"no answer for {self._timeout_seconds:g} s" if silent else "a connection broke"
        return LostPeerError(
            f"island {self.rank} lost another island ({why}); restart all islands from their last checkpoint"
        )

    # ---- leaving

    def leave(self, reason: str) -> None:
        if self._left or self._group is None:
            return
        self._left = True
        if reason:
            self._ask_store(lambda: self._store.set(f"left/{self.rank}", reason))
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        break_connections(self._group, others, Kind.PROBE)
        if self._hosts_store and (reason or self._store.check([f"heard/{self.rank}"])):
            # Somebody has left, this island or another: the reason is to be read by all before the store is gone.
            store = self._store
            linger(lambda: all(store.check([f"heard/{o}"]) or store.check([f"left/{o}"]) for o in others))
        stop_all([self._sender])

    def release(self) -> None:
        self._posted.clear()
        self._group = self._store = None


class _Pending:
    """Receives that are posted."""

    def __init__(self, transport: GlooTransport, buffers: list[Tensor], works: list[Any]) -> None:
        self._transport, self._buffers, self._works = transport, buffers, works

    def wait(self) -> list[Tensor]:
        for work in self._works:
            self._transport.finish(work)
        self._transport._posted.discard(self)
        return self._buffers
