"""A thread that does one thing after the other, beside the training loop.

Several threads may work on the same things in turn, as on an assembly line: what one is done with the next takes up.
They share a `Fate`: where one of them fails, nothing of that turn or of a later one is begun any more, by anybody;
what came before is brought to its end, if it can be.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class Fate:
    """The first turn in which something failed, and why."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn, self._error = math.inf, Exception()

    def fail(self, turn: float, error: Exception) -> None:
        with self._lock:
            if turn < self._turn:
                self._turn, self._error = turn, error

    @property
    def has_failed(self) -> bool:
        return self._turn < math.inf

    def check(self, turn: float) -> None:
        """Raises what an earlier turn, or this one, failed with."""
        with self._lock:
            failed, error = turn >= self._turn, self._error
        if failed:
            raise _once_more(error) from error


def _once_more(error: Exception) -> Exception:
    """The same error, to be raised: it would itself remember everybody who ever raises it, and all that they hold."""
    try:
        return copy.copy(error)
    except Exception:  # one that cannot be made of its arguments
        return RuntimeError(f"{type(error).__name__}: {error}")


class Worker:
    """A queue of jobs and the thread that works through it. Jobs of an earlier turn go first. After a failure every
    later job fails likewise. The thread ends with `stop`, or when nobody knows its worker any more.
    """

    def __init__(self, name: str, fate: Fate | None = None) -> None:
        self._jobs: Jobs = queue.SimpleQueue()  # which may be used where a garbage collector interrupts
        self._numbers = itertools.count()
        self._fate = fate or Fate()
        self._thread = threading.Thread(target=_work_through, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self._stopped = False
        weakref.finalize(self, self._jobs.put, END)

    def do(self, job: Callable[..., R], *arguments: Any, turn: float = 0) -> Future[R]:
        """Puts a job at the end of its turn's."""
        if self._stopped:
            raise RuntimeError(f"the thread {self._thread.name} has ended: there is nobody to do it any more")
        answer: Future[R] = Future()

        def run() -> None:
            try:
                self._fate.check(turn)
                answer.set_result(job(*arguments))
            except Exception as error:
                self._fate.fail(turn, error)
                answer.set_exception(error)

        self._jobs.put((turn, next(self._numbers), run))
        return answer

    def stop(self) -> None:
        stop_all([self])


def stop_all(workers: Sequence[Worker]) -> None:
    """Ends threads, at the latest when the program ends; one that waits for a silent peer is left behind."""
    for worker in workers:
        worker._stopped = True
        worker._jobs.put(END)
    deadline = time.monotonic() + 1.0
    for worker in workers:
        if worker._thread is not threading.current_thread():
            worker._thread.join(timeout=max(0.0, deadline - time.monotonic()))


Job = tuple[float, float, Callable[[], None] | None]
Jobs = queue.SimpleQueue[Job]
END: Job = (math.inf, math.inf, None)
"""After all that is still to be done."""


def _work_through(jobs: Jobs) -> None:
    waiting: list[Job] = []
    while True:
        if not waiting:
            heapq.heappush(waiting, jobs.get())
        while not jobs.empty():
            heapq.heappush(waiting, jobs.get())
        job = heapq.heappop(waiting)[2]
        if job is None:
            break
        job()
        del job  # it knows whoever gave it, who would otherwise live until the next job, or for ever
