"""A thread that does one thing after the other, beside the training loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class Worker:
    """A queue of jobs and the thread that works through it. After a failure it does nothing more: every later job
    fails likewise.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=_work_through, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[..., R], *arguments: Any) -> Future[R]:
        """Puts a job at the end of the queue."""
        answer: Future[R] = Future()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                answer.set_result(job(*arguments))
            except Exception as error:
                self._failure = error
                answer.set_exception(error)

        self._jobs.put(run)
        return answer

    def stop(self) -> None:
        """Ends the thread, at the latest when the program ends; one that waits for a silent peer is left behind."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)


def _work_through(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it knows whoever gave it, who would otherwise live until the next job, or for ever
