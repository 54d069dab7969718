"""Weights that are not finite: nothing of them is sent, and they go back to the global values.

On a CPU, in an island of one rank, the loop knows at the send whether an outer gradient is finite, and acts at once.
On an accelerator the answer comes later. The ranks of an island have to agree about it: one rank alone must not sit out
a round. Both happen beside the loop, in the thread that makes the body of the payload, in the order of sends, which is
the same on all ranks. A payload that is not finite becomes one of weight zero there, before the others hear of it.

The loop then resets the weights at the first step at which it knows. Ranks of one island have to do so at the same
step: when the loop has waited for a round, all of them know about this round and all that were sent before it.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection

from torch import Tensor

from isles.core.device import SideStream
from isles.core.encoding import Encoding
from isles.core.fragments import Fragment
from isles.core.offload import Offload
from isles.core.replica import Replica
from isles.core.schedule import Due
from isles.core.state import Sent
from isles.wire.packing import is_finite

logger = logging.getLogger("isles")
Found = tuple[Due, Sent]


class Recovery:
    """What one island does about weights that are not finite."""

    def __init__(self, replica: Replica, offload: Offload, sides: list[SideStream]) -> None:
        self._replica, self._island, self._offload, self._sides = replica, replica.island, offload, sides
        self._found: deque[Found] = deque()
        """Rounds whose outer gradient is not finite, in the order of sends; found beside the loop."""
        self._numbers = itertools.count(1)
        self._reset_at = [0] * len(replica.fragments)
        """By fragment: the number of the last send before it was reset."""
        self._sent = 0

    def is_late(self, fragment: int) -> bool:
        """Whether the loop does not know at a send if the outer gradient is finite."""
        return self._sides[fragment].asynchronous or self._island.size > 1

    def watch(self, due: Due, sent: Sent, encoding: Encoding) -> Callable[[], Tensor | None]:
        """Makes the body of a payload, beside the loop; None if the outer gradient is not finite on some rank."""
        sent.number = self._sent = next(self._numbers)

        def body() -> Tensor | None:
            finite = encoding.finite() if callable(encoding.finite) else encoding.finite
            if self._island.any([not finite], beside=True)[0]:
                self._found.append((due, sent))
                return None
            return encoding.body() if callable(encoding.body) else encoding.body

        return body

    def found(self, waited_for: Sent | None = None) -> list[Found]:
        """What has been found since the last call, and may be acted on: anything in an island of one rank, and in an
        island of several, what was sent up to the round that the loop has just waited for.
        """
        if not self._found:
            return []
        last = self._sent if self._island.size == 1 else waited_for.number if waited_for is not None else 0
        found = []
        while self._found and self._found[0][1].number <= last:
            found.append(self._found.popleft())
        return found

    def act_on(self, found: Collection[Found]) -> None:
        """Resets what was sent when it was not finite, unless that has happened since."""
        stale = {due.fragment for due, sent in found if sent.number > self._reset_at[due.fragment]}
        for due, sent in found:
            sent.steps = 0
            state = self._offload.take(due.fragment, ("residual",), changing=("residual",), aside=True)
            if state.residual is not None:
                with self._sides[due.fragment].follow():
                    state.residual.zero_()
        if stale:
            self.reset(stale, sits_out=False)

    def reset(self, fragments: Collection[int], *, sits_out: bool) -> None:
        """Weights that are not finite go back to the global values, and their rounds do not count.

        All fragments at once, not only those that were found: weights that are left at NaN would spoil the others again
        in the next forward pass. `sits_out`: the round of those that were found is still to be sent.
        """
        for index, fragment in enumerate(self._replica.fragments):
            was_found = index in fragments
            if was_found or self._island.any([not _is_finite(fragment)])[0]:
                state = self._offload.take(index, ())
                fragment.write(state.anchor)
                state.was_reset = sits_out or not was_found
                self._reset_at[index] = self._sent
        self._replica.heal()


def say(rank: int, due: Due, step: int) -> None:
    """A line in the log."""
    logger.warning(
        "island %d: the outer gradient of fragment %d is not finite at step %d; what is not finite goes back to "
        "the global weights, and the island sits out those rounds",
        rank,
        due.fragment,
        step,
    )


def _is_finite(fragment: Fragment) -> bool:
    return is_finite(fragment.read())
