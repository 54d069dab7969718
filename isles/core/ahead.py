"""Work that need not wait for the training loop: encoding after a send, the outer step before an apply.

Between the step at which a fragment is sent and the one at which the result is applied, nothing reads its anchor but
whoever looks at the global model, and that must not change before its time. So a thread beside the training loop may
wait for the mean and take the outer step as soon as it has come, into *new* memory; when the step comes at which
the result is due, the loop has only to put it in place. The numbers are the same, to the last bit.

That is done where it pays and is possible: on a CPU, where the loop would do the work itself, with fresh updates (eager
ones need what the step itself brings), and with a world whose rounds may be waited for in any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from torch import Tensor

from isles.core.outer import OuterSGD
from isles.core.state import OuterState
from isles.wire.world import Handle, Mean


class Ahead:
    """A thread that takes outer steps in the order in which rounds were sent; `close` ends it."""

    def __init__(self, outer: OuterSGD) -> None:
        self._outer = outer
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def step(self, handle: Handle, state: OuterState) -> Future[Result]:
        """Waits for a round beside the training loop, and takes the outer step with it."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="isles-ahead", daemon=True)
            self._thread.start()
        future: Future[Result] = Future()

        def job() -> None:
            try:
                future.set_result(self._take(handle.wait(), state))
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def _take(self, mean: Mean, state: OuterState) -> Result:
        if not mean.weights:
            return mean, state.anchor, state.velocity
        return mean, *self._outer.updated(state.anchor, mean.values, state.velocity)

    def close(self) -> None:
        """Lets the thread end when it has nothing more to do."""
        self._jobs.put(None)


Result = tuple[Mean, Tensor, Tensor | None]
"""The mean, and the anchor and velocity after the outer step with it."""


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
