"""Outer steps ahead of their time, beside the training loop.

Between the step at which a fragment is sent and the one at which the result is applied, nothing reads its anchor but
whoever looks at the global model, and that must not change before its time. So a thread beside the training loop may
wait for the mean and take the outer step as soon as it has come, into *new* memory; when the step comes at which
the result is due, the loop has only to put it in place. The numbers are the same, to the last bit. What was in that
place is where a later step goes: memory that was used before is several times as fast as new memory, which the system
has to clear.

That is done where it pays and is possible: on a CPU, where the loop would do the work itself, with fresh updates (eager
ones need what the step itself brings), and with a world whose rounds may be waited for in any thread.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future

from torch import Tensor

from isles.core.outer import OuterSGD, Position
from isles.core.state import OuterState
from isles.wire.worker import Worker
from isles.wire.world import Handle, Mean

Result = tuple[Mean, Tensor, Tensor | None]
"""The mean of a round, and the anchor and velocity after the outer step with it."""


class Ahead:
    """Takes outer steps in the order in which rounds were sent; its thread begins with the first, `close` ends it."""

    def __init__(self, outer: OuterSGD) -> None:
        self._outer = outer
        self._worker: Worker | None = None
        self._spare: dict[int, list[Position]] = defaultdict(list)
        """Memory that nobody needs any more, by the number of values."""

    def step(self, handle: Handle, state: OuterState) -> Future[Result]:
        """Waits for a round beside the training loop, and takes the outer step with it."""
        self._worker = self._worker or Worker("isles-ahead")
        return self._worker.do(self._take, handle, state)

    def _take(self, handle: Handle, state: OuterState) -> Result:
        mean = handle.wait()
        if not mean.weights:
            return mean, state.anchor, state.velocity
        spare = self._spare[state.anchor.numel()]
        into = spare.pop() if spare else self._outer.room_for(state.anchor)
        self._outer.update_into(into, state.anchor, mean.values, state.velocity)
        return mean, *into

    def put_in_place(self, state: OuterState, result: Result) -> Mean:
        """Makes what has come of a step the state of the fragment; in the training loop."""
        mean, anchor, velocity = result
        if anchor is not state.anchor:
            self._spare[anchor.numel()].append((state.anchor, state.velocity))
        state.anchor, state.velocity = anchor, velocity
        return mean

    def close(self) -> None:
        """Lets the thread end."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        self._spare.clear()
