"""Islands as threads of one process, for research and tests: exact, deterministic, no network.

The islands take turns: one runs until it has to wait for the others, then hands over to the next that can go on. So a
run has one possible order of events, and each island can have its own random state, swapped in with its turn: a program
that seeds and draws from the global generators (torch, `random`, numpy) gives the same numbers here as under torchrun.
torch uses the cores for one island's operations instead of running two islands' operations side by side.

An island that raises takes the others with it: whoever waits for it, now or later, gets a `LostPeerError`. If all wait
for messages that nobody will send any more, that is an error too, at once.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from isles.wire.exchange import Kind
from isles.wire.reduction import Reduction, check_reduction
from isles.wire.round import RoundWorld
from isles.wire.worker import FirstFailure
from isles.wire.world import LostPeerError

T = TypeVar("T")
NOTHING = torch.empty(0, dtype=torch.uint8)
_here = threading.local()


def run_local(fn: Callable[[LocalWorld], T], islands: int, *, reduction: Reduction = "auto") -> list[T]:
    """Runs `fn(world)` once per island, in threads, and returns the results in the order of ranks.

    The first exception is raised, once every thread has ended.

    >>> run_local(lambda world: (world.rank, world.size), 3)
    [(0, 3), (1, 3), (2, 3)]
    """
    if not isinstance(islands, int) or isinstance(islands, bool) or islands < 1:
        raise ValueError(f"islands={islands!r} must be an integer of at least 1")
    if not callable(fn):
        raise ValueError(f"fn={fn!r} must be a function that takes a world")
    check_reduction(reduction)
    caller = _RandomState.now()
    turns = _Turns(islands)
    results: list[Any] = [None] * islands

    def island(rank: int) -> None:
        try:
            turns.begin(rank)
            caller.restore()
            _here.world = LocalWorld(rank, turns, reduction)
            results[rank] = fn(_here.world)
        except BaseException as error:  # the caller gets it: see below
            turns.fail(f"island {rank} failed: {error!r}", error)
        finally:
            turns.end(rank)

    threads = [threading.Thread(target=island, args=(rank,), name=f"island-{rank}") for rank in range(islands)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C, or no more threads: islands end at their next exchange, then it goes on
        turns.fail(f"the program failed: {error!r}", error)
        begun = [thread for thread in threads if thread.ident is not None]
        for rank in range(len(begun), islands):
            turns.end(rank)
        for thread in begun:
            thread.join()
    caller.restore()
    if turns.error is not None:
        raise turns.error
    return results


class LocalWorld(RoundWorld):
    """One of several islands in this process."""

    def __init__(self, rank: int, turns: _Turns, reduction: Reduction) -> None:
        super().__init__(LocalTransport(rank, turns), reduction, FirstFailure())

    @classmethod
    def alone(cls) -> LocalWorld:
        """A world of one island, in the calling thread."""
        return cls(0, _Turns(1), "auto")

    @staticmethod
    def current() -> LocalWorld | None:
        """The world of the island that the calling thread is, inside `run_local`."""
        return getattr(_here, "world", None)


class LocalTransport:
    """Messages between threads. Nothing is copied: a message is the sender's tensor."""

    threaded = False

    def __init__(self, rank: int, turns: _Turns) -> None:
        self.rank, self.size, self._turns = rank, turns.size, turns

    def receive(self, kind: Kind, sizes: Sequence[int]) -> _Pending:
        return _Pending(kind, self)

    def wait(self, kind: Kind) -> list[Tensor]:
        """The next message of this kind from every other island; the own place is an empty one."""
        boxes = {other: self._turns.boxes[kind, other, self.rank] for other in range(self.size) if other != self.rank}
        self._turns.wait_until(self.rank, lambda: all(boxes.values()), f"a {kind.name.lower()} of every other island")
        return [boxes[other].popleft() if other in boxes else NOTHING for other in range(self.size)]

    def send(self, kind: Kind, messages: Sequence[Tensor], sequence: int) -> Sequence[Future[None]]:
        self.send_now(kind, messages)
        return ()

    def send_now(self, kind: Kind, messages: Sequence[Tensor]) -> None:
        self._turns.check_failure(self.rank)
        for other in range(self.size):
            if other != self.rank:
                self._turns.boxes[kind, self.rank, other].append(messages[other])

    def check(self) -> None: ...  # nobody waits without giving the turn away

    def leave(self, reason: str) -> None:
        if reason:
            self._turns.fail(f"island {self.rank} left {reason}")

    def release(self) -> None: ...  # there is nothing to give back


@dataclass(frozen=True)
class _Pending:
    kind: Kind
    transport: LocalTransport

    def wait(self) -> list[Tensor]:
        return self.transport.wait(self.kind)


class _Turns:
    """What the islands share: whose turn it is, and messages on their way. Only the island whose turn it is touches
    the messages.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: BaseException | None = None
        """The first exception of an island's function."""
        self.boxes: dict[tuple[Kind, int, int], deque[Tensor]] = defaultdict(deque)
        """By kind, sender and receiver."""
        self._failure = ""
        self._changed = threading.Condition()
        self._turn = 0
        self._running = set(range(size))
        self._waiting: dict[int, Callable[[], bool]] = {}

    def begin(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def end(self, rank: int) -> None:
        with self._changed:
            self._running.discard(rank)
            if self._turn == rank:
                self._hand_over(rank)

    def fail(self, why: str, error: BaseException | None = None) -> None:
        """From now on nobody gets an answer. The first reason counts."""
        with self._changed:
            self.error = self.error or error
            self._failure = self._failure or why

    def wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        self.check_failure(rank)
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
            self.check_failure(rank)
            raise LostPeerError(
                f"island {rank} waits for {what}, but every other island has ended or waits for something else"
            )

    def check_failure(self, rank: int) -> None:
        if self._failure:
            raise LostPeerError(f"{self._failure} (island {rank} stops)")

    def _hand_over(self, rank: int) -> None:
        """Gives the turn to the next island that can go on; if none can, to the next that runs, which then raises."""
        after = [(rank + i) % self.size for i in range(1, self.size + 1)]
        running = [other for other in after if other in self._running]
        can_go_on = [other for other in running if other not in self._waiting or self._waiting[other]()]
        if running:
            self._turn = (can_go_on or running)[0]
            self._changed.notify_all()


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
