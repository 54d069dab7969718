"""Threads that work in turn: order, failures, and what comes before them.

A thread is held at a gate until all jobs are in its queue, so that the order is not a matter of luck.
"""

import threading

import pytest

from isles.wire.worker import Fate, Worker


@pytest.fixture
def worker():
    worker = Worker("test", Fate())
    yield worker
    worker.stop()


def test_earlier_turns_go_first_and_each_in_its_order(worker):
    gate, seen = threading.Event(), []
    worker.do(gate.wait)
    jobs = [worker.do(seen.append, (turn, number), turn=turn) for number in range(3) for turn in (2, 1, 3)]
    gate.set()
    for job in jobs:
        job.result(timeout=60)
    assert seen == [(turn, number) for turn in (1, 2, 3) for number in range(3)]


def test_a_failure_ends_its_turn_and_all_later_ones_for_all_threads():
    fate = Fate()
    workers = Worker("one", fate), Worker("other", fate)
    try:
        failed = workers[0].do(lambda: 1 // 0, turn=5)
        assert isinstance(failed.exception(timeout=60), ZeroDivisionError)
        for worker in workers:
            gate = threading.Event()
            worker.do(gate.wait, turn=4)
            earlier, same, later = (worker.do(lambda: "done", turn=turn) for turn in (4, 5, 6))
            gate.set()
            assert earlier.result(timeout=60) == "done"
            assert same.exception(timeout=60) is later.exception(timeout=60) is failed.exception()
    finally:
        for worker in workers:
            worker.stop()


def test_what_fails_later_in_an_earlier_turn_counts():
    fate = Fate()
    fate.fail(7, ValueError("later"))
    fate.fail(3, ValueError("earlier"))
    fate.fail(5, ValueError("too late"))
    fate.check(2)
    for turn in (3, 7, 9):
        with pytest.raises(ValueError, match="earlier"):
            fate.check(turn)
