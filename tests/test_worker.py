"""Threads that work in turn: order, failures, and what comes before them.

A thread is held at a gate until all jobs are in its queue, so that the order is not a matter of luck.
"""

import gc
import threading
import weakref

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
            for after in (same.exception(timeout=60), later.exception(timeout=60)):
                assert repr(after) == repr(failed.exception())
                assert after.__cause__ is failed.exception()
    finally:
        for worker in workers:
            worker.stop()


class Peculiar(Exception):
    """Cannot be made again of its arguments."""

    def __init__(self, here, there):
        super().__init__(f"neither {here} nor {there}")


@pytest.mark.parametrize("error", [OSError(5, "broken"), Peculiar("here", "there")], ids=lambda error: str(error))
def test_an_error_that_is_raised_again_and_again_remembers_nobody(error):
    """What a job holds would otherwise live as long as the error, and grow with every job that fails."""
    fate = Fate()
    fate.fail(0, error)
    worker = Worker("test", fate)

    class Large:
        pass

    held = []
    for _ in range(10):
        large = Large()
        held.append(weakref.ref(large))
        failed = worker.do(lambda large=large: large).exception(timeout=60)
        assert str(error) in str(failed)
        del large, failed
    worker.stop()
    gc.collect()
    assert [each() for each in held] == [None] * 10
    assert error.__traceback__ is None


def test_nobody_waits_for_a_thread_that_has_ended():
    worker = Worker("test")
    assert worker.do(lambda: 1).result(timeout=60) == 1
    worker.stop()
    with pytest.raises(RuntimeError, match="test has ended"):
        worker.do(lambda: 1)


def test_a_thread_ends_when_nobody_knows_its_worker():
    worker = Worker("test")
    thread, gate = worker._thread, threading.Event()
    worker.do(gate.wait)
    last = worker.do(lambda: "done")
    del worker
    gc.collect()
    assert thread.is_alive(), "it has something to do"
    gate.set()
    assert last.result(timeout=60) == "done"
    thread.join(60)
    assert not thread.is_alive()


def test_what_fails_later_in_an_earlier_turn_counts():
    fate = Fate()
    fate.fail(7, ValueError("later"))
    fate.fail(3, ValueError("earlier"))
    fate.fail(5, ValueError("too late"))
    fate.check(2)
    for turn in (3, 7, 9):
        with pytest.raises(ValueError, match="earlier"):
            fate.check(turn)
