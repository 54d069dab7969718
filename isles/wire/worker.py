"""A thread that does one thing after the other, beside the training loop.

Several threads may work on the same things in turn, as on an assembly line: what one is done with the next takes up.
They share a `Fate`: where one of them fails, nothing of that turn or of a later one is done any more, by anybody, while
what came before is brought to its end.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections.abc import Callable
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

    def check(self, turn: float) -> None:
        """Raises what an earlier turn, or this one, failed with."""
        with self._lock:
            if turn >= self._turn:
                raise self._error


class Worker:
    """A queue of jobs and the thread that works through it. Jobs of an earlier turn go first. After a failure every
    later job fails likewise.
    """

    def __init__(self, name: str, fate: Fate | None = None) -> None:
        self._jobs: Jobs = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._fate = fate or Fate()
        self._thread = threading.Thread(target=_work_through, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[..., R], *arguments: Any, turn: float = 0) -> Future[R]:
        """Puts a job at the end of its turn's."""
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
        """Ends the thread, at the latest when the program ends; one that waits for a silent peer is left behind."""
        self._jobs.put((math.inf, next(self._numbers), None))
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)


Jobs = queue.PriorityQueue[tuple[float, int, Callable[[], None] | None]]


def _work_through(jobs: Jobs) -> None:
    while (job := jobs.get()[2]) is not None:
        job()
        del job  # it knows whoever gave it, who would otherwise live until the next job, or for ever
