"""Letters between islands over gloo, on links that may be full.

gloo lets a letter go when its receiver has said that it is ready for it, and the receiver says so on the connection
that its own letters take. Where those fill the link, whoever gets ready late is heard a queue later, and the link of
the sender stands still meanwhile. So here

- receivers are ready early: `expect` is called as soon as a size is known, long before anything can have come. What
  comes first of all has one size, and everybody is always ready for the next one;
- letters go out one after the other, those of the earliest round first, and nobody waits for an answer in between:
  while one round waits for the others, the next one has the link;
- long letters go in slices, a slice to each island in turn: the time-out is about silence, not about how long a large
  letter takes on a slow link.

When a connection breaks, gloo tells those who wait for a letter of which nothing has come yet. Of a letter that was cut
off in the middle it says nothing until the time-out, and on a full link there always is one. So whoever waits long
asks now and then whether all connections are there (`result_of`).

`docs/log.md` has what this is worth.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isles.wire.worker import Fate, Worker
from isles.wire.world import LostPeerError

SLICE_BYTES = 1 << 20
"""At most this much goes at once."""
ASK_SECONDS = 10.0
"""So long is waited before connections are looked at."""
R = TypeVar("R")
for_ever: list[set[Any]] = []
"""Letters that had not arrived when a world failed. If gloo's side of one went away, what comes for it would stay in
the connection, with all that is behind it, and gloo would try to read it again and again.
"""


class Kind(enum.IntEnum):
    """What a letter is. Those of one kind arrive in the order in which they were sent; others may overtake them."""

    HEADER = 1
    BODY = 2
    MEAN = 3
    NOTE = 4
    NONE = 5
    """Never sent."""


class Mail:
    """The letters of one island to and from all others of a group: one for each of them, in the order of ranks. What is
    in the island's own place is not touched.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float, fate: Fate) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._timeout_seconds = group, timeout_seconds
        self.sender = Worker(f"isles-send-{self.rank}", fate)
        self.under_way: set[Any] = set()
        """Letters that have not arrived yet."""
        self._num_waited = 0

    def expect(self, kind: Kind, into: Sequence[Tensor]) -> list[Any]:
        """Gets ready for a letter of everybody; what it returns is to be waited for."""
        return [self._hold(dist.irecv, part, group_src=origin, tag=kind) for origin, part in self._slices(into, -1)]

    def send(self, kind: Kind, letters: Sequence[Tensor], turn: int) -> list[Future[None]]:
        """Has a letter sent to everybody when its turn has come."""
        return [self.sender.do(self._send, kind, part, to, turn=turn) for to, part in self._slices(letters, 1)]

    def send_at_once(self, kind: Kind, letters: Sequence[Tensor]) -> None:
        """Sends letters before those that wait for their turn, and waits until they are gone."""
        self.wait([self._hold(dist.isend, part, group_dst=to, tag=kind) for to, part in self._slices(letters, 1)])

    def wait(self, works: Iterable[Any]) -> None:
        try:
            for work in works:
                if work.wait() is False:
                    raise RuntimeError("aborted")
                self.under_way.discard(work)
                self._num_waited += 1
        except RuntimeError as error:
            raise lost(self.rank, error, self._timeout_seconds) from error

    def result_of(self, coming: Future[R]) -> R:
        """Waits for what is made of letters. Raises LostPeerError if a connection has broken, and no letter that came
        before can be what is waited for.
        """
        while True:
            before = self._num_waited
            if coming.done() or wait([coming], min(ASK_SECONDS, self._timeout_seconds / 4)).done:
                return coming.result()
            try:
                self._look_at_connections()
            except LostPeerError:
                if self._num_waited == before:
                    raise

    def _look_at_connections(self) -> None:
        """A broken one refuses a new receive. What will never be sent need not be held."""
        for other, nothing in self._slices([torch.empty(1, dtype=torch.uint8)] * self.size, 1):
            self._begin(dist.irecv, nothing, group_src=other, tag=Kind.NONE)

    def _send(self, kind: Kind, part: Tensor, to: int) -> None:
        self.wait([self._hold(dist.isend, part, group_dst=to, tag=kind)])

    def _slices(self, letters: Sequence[Tensor], direction: int) -> Iterator[tuple[int, Tensor]]:
        """The letters of all others in the order in which they go, a slice of each in turn, the next island in a
        direction first. If everybody keeps to that order, and is as fast, no two meet at one receiver, and what
        comes does so in the order of the other direction.
        """
        others = [(self.rank + direction * distance) % self.size for distance in range(1, self.size)]
        longest = max((letters[other].numel() for other in others), default=0)
        for start in range(0, longest, SLICE_BYTES):
            for other in others:
                part = letters[other][start : start + SLICE_BYTES]
                if part.numel():
                    yield other, part

    def _hold(self, what: Callable[..., Any], part: Tensor, **more: Any) -> Any:
        work = self._begin(what, part, **more)
        self.under_way.add(work)
        return work

    def _begin(self, what: Callable[..., Any], part: Tensor, **more: Any) -> Any:
        try:
            return what(part, group=self._group, **more)
        except RuntimeError as error:
            raise lost(self.rank, error, self._timeout_seconds) from error


def lost(rank: int, error: RuntimeError, timeout_seconds: float) -> LostPeerError:
    """What an error of gloo's means."""
    silent = "ime" in str(error) and "out" in str(error)
    why = f"no answer for {timeout_seconds:g} s" if silent else "a connection broke"
    return LostPeerError(f"island {rank} lost another island ({why}); restart all islands from their last checkpoint")
