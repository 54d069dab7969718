"""Threads that run jobs in order, next to the training loop; and the same without a thread.

Several workers take the same rounds in turn, as a pipeline: what one has finished the next takes up. They share a
`FirstFailure`: once a round has failed, no job of that round or of a later one is begun, by any worker. Jobs of earlier
rounds are brought to their end.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class FirstFailure:
    """The lowest sequence number at which something failed, and the error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sequence, self._error = math.inf, Exception()

    def record(self, sequence: float, error: Exception) -> None:
        with self._lock:
            if sequence < self._sequence:
                self._sequence, self._error = sequence, error

    def check(self, sequence: float) -> None:
        """Raises the error of this sequence number or of an earlier one."""
        with self._lock:
            failed, error = sequence >= self._sequence, self._error
        if failed:
            raise _copy(error) from error


def _copy(error: Exception) -> Exception:
    """A copy to raise. The error itself would keep the frames of everybody who ever raises it, and all they hold."""
    try:
        return copy.copy(error)
    except Exception:  # one that cannot be made from its arguments
        return RuntimeError(f"{type(error).__name__}: {error}")


def _job(
    function: Callable[..., R], arguments: Sequence[Any], sequence: float, failure: FirstFailure
) -> tuple[Future[R], Callable[[], None]]:
    """A future, and the call that fulfils it unless an earlier round, or this one, has failed."""
    answer: Future[R] = Future()

    def run() -> None:
        try:
            failure.check(sequence)
            answer.set_result(function(*arguments))
        except Exception as error:
            failure.record(sequence, error)
            answer.set_exception(error)
        except BaseException as error:  # Ctrl-C, where a job runs in the training loop's thread
            failure.record(sequence, RuntimeError(f"this round was interrupted by {type(error).__name__}"))
            answer.set_exception(error)
            raise

    return answer, run


class Worker:
    """A thread and its queue. Jobs with lower sequence numbers go first. The thread ends with `stop_all`, or when
    nobody refers to its worker any more.
    """

    def __init__(self, name: str, failure: FirstFailure | None = None) -> None:
        self._jobs: Jobs = queue.SimpleQueue()  # which is safe to use from a garbage collector's callback
        self._numbers = itertools.count()
        self._failure = failure or FirstFailure()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self._stopped = False
        weakref.finalize(self, self._jobs.put, END)

    def do(self, job: Callable[..., R], *arguments: Any, sequence: float = 0) -> Future[R]:
        """Queues a job behind those of its sequence number."""
        if self._stopped:
            raise RuntimeError(f"the thread {self._thread.name} has ended")
        answer, run = _job(job, arguments, sequence, self._failure)
        self._jobs.put((sequence, next(self._numbers), run))
        return answer


def stop_all(workers: Sequence[Worker]) -> None:
    """Ends threads; one that hangs is left behind."""
    for worker in workers:
        worker._stopped = True
        worker._jobs.put(END)
    deadline = time.monotonic() + 1.0
    for worker in workers:
        if worker._thread is not threading.current_thread():
            worker._thread.join(timeout=max(0.0, deadline - time.monotonic()))


class Inline:
    """A worker without a thread: jobs run in their order, in the thread of whoever waits for one of them."""

    def __init__(self, failure: FirstFailure | None = None) -> None:
        self._failure = failure or FirstFailure()
        self._jobs: deque[Callable[[], None]] = deque()

    def do(self, job: Callable[..., R], *arguments: Any, sequence: float = 0) -> Future[R]:
        answer, run = _job(job, arguments, sequence, self._failure)
        self._jobs.append(run)
        return answer

    def run_until(self, answer: Future[Any]) -> None:
        while not answer.done():
            self._jobs.popleft()()


Job = tuple[float, float, Callable[[], None] | None]
Jobs = queue.SimpleQueue[Job]
END: Job = (math.inf, math.inf, None)
"""Comes after everything that is still to be done."""


def _work(jobs: Jobs) -> None:
    waiting: list[Job] = []
    while True:
        if not waiting:
            heapq.heappush(waiting, jobs.get())
        while not jobs.empty():
            heapq.heappush(waiting, jobs.get())
        run = heapq.heappop(waiting)[2]
        if run is None:
            break
        run()
        del run  # it refers to its round, which would otherwise live until the next job
