"""Threads that run jobs in order: failures, and what comes before them.

A thread is held at a gate until all jobs are in its queue, so that the order is not a matter of luck.
"""

import gc
import threading
import weakref

import pytest

from isles.wire.worker import FirstFailure, Inline, Worker, stop_all


@pytest.fixture
def worker():
    worker = Worker("test", FirstFailure())
    yield worker
    stop_all([worker])


def test_earlier_rounds_go_first_and_each_in_its_order(worker):
    gate, seen = threading.Event(), []
    worker.do(gate.wait)
    jobs = [
        worker.do(seen.append, (sequence, number), sequence=sequence) for number in range(3) for sequence in (2, 1, 3)
    ]
    gate.set()
    for job in jobs:
        job.result(timeout=60)
    assert seen == [(sequence, number) for sequence in (1, 2, 3) for number in range(3)]


def test_a_failure_ends_its_round_and_all_later_ones_for_all_threads():
    failure = FirstFailure()
    workers = Worker("one", failure), Worker("other", failure)
    try:
        failed = workers[0].do(lambda: 1 // 0, sequence=5)
        assert isinstance(failed.exception(timeout=60), ZeroDivisionError)
        for worker in workers:
            gate = threading.Event()
            worker.do(gate.wait, sequence=4)
            earlier, same, later = (worker.do(lambda: "done", sequence=sequence) for sequence in (4, 5, 6))
            gate.set()
            assert earlier.result(timeout=60) == "done"
            for after in (same.exception(timeout=60), later.exception(timeout=60)):
                assert repr(after) == repr(failed.exception())
                assert after.__cause__ is failed.exception()
    finally:
        for worker in workers:
            stop_all([worker])


class Peculiar(Exception):
    """Cannot be made again of its arguments."""

    def __init__(self, here, there):
        super().__init__(f"neither {here} nor {there}")


@pytest.mark.parametrize("error", [OSError(5, "broken"), Peculiar("here", "there")], ids=lambda error: str(error))
def test_an_error_that_is_raised_again_and_again_remembers_nobody(error):
    """What a job holds would otherwise live as long as the error, and grow with every job that fails."""
    failure = FirstFailure()
    failure.record(0, error)
    worker = Worker("test", failure)

    class Large:
        pass

    held = []
    for _ in range(10):
        large = Large()
        held.append(weakref.ref(large))
        failed = worker.do(lambda large=large: large).exception(timeout=60)
        assert str(error) in str(failed)
        del large, failed
    stop_all([worker])
    gc.collect()
    assert [each() for each in held] == [None] * 10
    assert error.__traceback__ is None


def test_nobody_waits_for_a_thread_that_has_ended():
    worker = Worker("test")
    assert worker.do(lambda: 1).result(timeout=60) == 1
    stop_all([worker])
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


def test_what_fails_later_in_an_earlier_round_counts():
    failure = FirstFailure()
    failure.record(7, ValueError("later"))
    failure.record(3, ValueError("earlier"))
    failure.record(5, ValueError("too late"))
    failure.check(2)
    for sequence in (3, 7, 9):
        with pytest.raises(ValueError, match="earlier"):
            failure.check(sequence)


def test_without_a_thread_jobs_run_in_order_when_one_is_waited_for():
    inline, seen = Inline(), []
    jobs = [inline.do(seen.append, number, sequence=number) for number in range(4)]
    assert seen == []
    inline.run_until(jobs[2])
    assert seen == [0, 1, 2]
    broken = inline.do(lambda: 1 // 0, sequence=4)
    later = inline.do(seen.append, 5, sequence=5)
    inline.run_until(later)
    assert seen == [0, 1, 2, 3]
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert repr(later.exception()) == repr(broken.exception())


def test_what_interrupts_a_job_without_a_thread_reaches_the_caller_and_ends_later_jobs():
    def interrupt():
        raise KeyboardInterrupt

    inline = Inline()
    first, second = inline.do(interrupt, sequence=0), inline.do(lambda: 1, sequence=1)
    with pytest.raises(KeyboardInterrupt):
        inline.run_until(first)
    inline.run_until(second)
    assert "interrupted by KeyboardInterrupt" in str(second.exception())
