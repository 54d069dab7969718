"""Islands as threads of one process, for research and tests: exact, deterministic, no network.

The islands take turns: one runs until it has to wait for the others, then hands over to the next that can go
on. So a run has one possible order of events, and each island can have its own random state, swapped in with
its turn (torch, `random`, and numpy if it is loaded): an island behaves as if it had a process for itself,
and a program that seeds and draws from the global generators gives the same numbers here as under torchrun.
It costs no speed where it matters: torch uses the cores for one island's operations instead of running two
islands' operations side by side.

An island that raises takes the others with it: whoever waits for it, now or later, gets a `LostPeerError`. If
all wait for rounds that nobody can complete any more, that is an error too, at once.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from isles.wire import message, reduction
from isles.wire.message import Header
from isles.wire.world import LostPeerError, Mean, MismatchError, Payload

T = TypeVar("T")
_here = threading.local()


def run_local(fn: Callable[[LocalWorld], T], islands: int, *, reduction: reduction.Reduction = "auto") -> list[T]:
    """Runs `fn(world)` once per island, in threads, and returns the results in the order of ranks.

    The first exception is raised, once every thread has ended.

    >>> run_local(lambda world: (world.rank, world.size), 3)
    [(0, 3), (1, 3), (2, 3)]
    """
    if not isinstance(islands, int) or isinstance(islands, bool) or islands < 1:
        raise ValueError(f"islands={islands!r} must be an integer of at least 1")
    if not callable(fn):
        raise ValueError(f"fn={fn!r} must be a function that takes a world")
    caller = _RandomState.now()
    table = _Table(islands, reduction)
    results: list[Any] = [None] * islands

    def island(rank: int) -> None:
        try:
            table.begin(rank)
            caller.restore()
            _here.world = LocalWorld(rank, table)
            results[rank] = fn(_here.world)
        except BaseException as error:  # the caller gets it: see below
            table.fail(rank, error)
        finally:
            table.end(rank)

    threads = [threading.Thread(target=island, args=(rank,), name=f"island-{rank}") for rank in range(islands)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C, or no more threads: islands end at their next exchange, then it goes on
        table.fail(None, error)
        begun = [thread for thread in threads if thread.ident is not None]
        for rank in range(len(begun), islands):
            table.end(rank)
        for thread in begun:
            thread.join()
    caller.restore()
    if table.failure is not None:
        raise table.failure
    return results


class LocalWorld:
    """One island's seat at the table."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank = rank
        self._table = table
        self._started = 0
        self._gathered = 0

    @classmethod
    def alone(cls) -> LocalWorld:
        """A world of one island, in the calling thread."""
        return cls(0, _Table(1, "auto"))

    @staticmethod
    def current() -> LocalWorld | None:
        """The world of the island that the calling thread is, inside `run_local`."""
        return getattr(_here, "world", None)

    @property
    def size(self) -> int:
        return self._table.size

    def start(self, payload: Payload) -> _Round:
        self._started += 1
        return self._table.put(self.rank, self._started, payload)

    def gather(self, data: bytes) -> list[bytes]:
        self._gathered += 1
        return self._table.gather(self.rank, self._gathered, data)


class _Round:
    """One exchange; the n-th of every island."""

    def __init__(self, rank: int, number: int, table: _Table, num_bytes: int) -> None:
        self._rank, self._number, self._table = rank, number, table
        self.bytes_sent = self.bytes_received = num_bytes
        self._mean: Mean | None = None

    def wait(self) -> Mean:
        if self._mean is None:
            self._mean = self._table.mean(self._rank, self._number)
        return self._mean


class _Table:
    """What the islands share: whose turn it is, and what lies on the table. Only the island whose turn it is
    touches it.
    """

    def __init__(self, size: int, form: reduction.Reduction) -> None:
        reduction.check_reduction(form)
        self.size = size
        self.reduction = form
        self.failure: BaseException | None = None
        self._culprit = ""
        self._changed = threading.Condition()
        self._turn = 0
        self._running = set(range(size))
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._payloads: dict[int, dict[int, Payload]] = {}
        self._outcomes: dict[int, Mean | MismatchError] = {}
        self._answered: dict[int, int] = {}
        self._notes: dict[int, dict[int, bytes]] = {}
        self._read: dict[int, int] = {}

    # ---- turns

    def begin(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def end(self, rank: int) -> None:
        with self._changed:
            self._running.discard(rank)
            if self._turn == rank:
                self._hand_over(rank)

    def fail(self, rank: int | None, error: BaseException) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = error
                self._culprit = "the program" if rank is None else f"island {rank}"

    def _wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        self._check_failure(rank)
        if ready():
            return
        own = _RandomState.now()
        with self._changed:
            self._waiting[rank] = ready
            self._hand_over(rank)
            self._changed.wait_for(lambda: self._turn == rank)
            del self._waiting[rank]
        own.restore()
        if not ready():
            self._check_failure(rank)
            raise LostPeerError(
                f"island {rank} waits for {what}, but every other island has ended or waits for something else"
            )

    def _check_failure(self, rank: int) -> None:
        if self.failure is not None:
            raise LostPeerError(f"island {rank} stops because {self._culprit} failed: {self.failure!r}")

    def _hand_over(self, rank: int) -> None:
        """Gives the turn to the next island that can go on; if none can, to the next that runs, which then raises."""
        after = [(rank + i) % self.size for i in range(1, self.size + 1)]
        running = [other for other in after if other in self._running]
        can_go_on = [other for other in running if other not in self._waiting or self._waiting[other]()]
        if running:
            self._turn = (can_go_on or running)[0]
            self._changed.notify_all()

    # ---- rounds

    def put(self, rank: int, number: int, payload: Payload) -> _Round:
        self._check_failure(rank)
        form = reduction.choose(self.reduction, self.size, payload.codec)
        self._payloads.setdefault(number, {})[rank] = payload
        return _Round(rank, number, self, reduction.traffic(form, self.size, payload))

    def mean(self, rank: int, number: int) -> Mean:
        ready = lambda: number in self._outcomes or len(self._payloads.get(number, ())) == self.size
        self._wait_until(rank, ready, f"the others' payloads in exchange {number}")
        if number not in self._outcomes:
            payloads = self._payloads.pop(number)
            try:
                self._outcomes[number] = self._reduce([payloads[r] for r in range(self.size)])
            except MismatchError as error:
                self._outcomes[number] = error
        outcome = self._outcomes[number]
        self._answered[number] = self._answered.get(number, 0) + 1
        if self._answered[number] == self.size:
            del self._outcomes[number], self._answered[number]
        if isinstance(outcome, MismatchError):
            raise outcome
        return outcome

    def _reduce(self, payloads: list[Payload]) -> Mean:
        forms = [reduction.choose(self.reduction, self.size, payload.codec) for payload in payloads]
        if self.size > 1:
            message.agree([Header.of_payload(payload, form) for payload, form in zip(payloads, forms, strict=True)])
        first, weights = payloads[0], [payload.weight for payload in payloads]
        if forms[0] == "all-gather":
            values = reduction.weighted_mean([payload.body for payload in payloads], weights, first.codec, first.numel)
        else:
            values = self._reduce_scatter(payloads, weights)
        return Mean(values, {rank: weight for rank, weight in enumerate(weights) if weight > 0})

    def _reduce_scatter(self, payloads: list[Payload], weights: list[float]) -> torch.Tensor:
        codec, numel = payloads[0].codec, payloads[0].numel
        size = reduction.piece_numel(numel, self.size, codec)
        pieces = [reduction.split(payload.body, numel, self.size, codec) for payload in payloads]
        means = torch.empty(self.size, size)
        for rank, values in enumerate(means):
            for part in reduction.parts(size, codec):
                mean = pieces[0].new_empty(part.num_bytes)
                reduction.average([own[rank, part.encoded] for own in pieces], weights, codec, part, out=mean)
                codec.decode(mean, part.numel, out=values[part.values])
        return means.view(-1)[:numel]

    def gather(self, rank: int, number: int, data: bytes) -> list[bytes]:
        self._notes.setdefault(number, {})[rank] = data
        self._wait_until(rank, lambda: len(self._notes[number]) == self.size, f"the others' notes, number {number}")
        notes = [self._notes[number][r] for r in range(self.size)]
        self._read[number] = self._read.get(number, 0) + 1
        if self._read[number] == self.size:
            del self._notes[number], self._read[number]
        return notes


@dataclass(frozen=True)
class _RandomState:
    """The global random generators, as they are at some moment."""

    torch_state: torch.Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def now(cls) -> _RandomState:
        numpy = sys.modules.get("numpy")
        return cls(torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None)

    def restore(self) -> None:
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        if self.numpy_state is not None:
            sys.modules["numpy"].random.set_state(self.numpy_state)
