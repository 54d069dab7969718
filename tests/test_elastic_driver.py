"""Threads around the protocol: a driver with a member and a store that do what a test says."""

import math
import threading

import pytest

from isles import LostPeerError
from isles.elastic.driver import Driver
from isles.elastic.requests import Answer, Operation
from tests.stores import threads


class Quiet:
    """A member that asks for what a test puts into `asked`, and does nothing with the answers."""

    def __init__(self):
        self.asked, self.answers = [], []
        self.taken, self.wake_at = -1, math.inf

    def operations(self):
        asked, self.asked = self.asked, []
        return asked

    def answer(self, operation, answer, now):
        self.answers.append((operation.kind, operation.name, answer.status))

    def ready(self, number):
        return None


class Store:
    """Answers everything at once."""

    def perform(self, operation):
        return Answer("ok", b"")


@pytest.fixture
def drive():
    drivers = []

    def make(member, store=None):
        drivers.append(Driver(store or Store(), lambda now: member, lambda number, header: None))
        return drivers[-1]

    yield make
    for driver in drivers:
        threads(driver.stop, seconds=20.0)


def test_after_an_error_the_timer_does_not_keep_the_training_loop_from_hearing_of_it(drive):
    """Requests that wait to be tried again are due for ever, once nobody starts them."""
    failed = threading.Event()

    class Failing(Quiet):
        def wake(self, now):
            failed.set()
            raise LostPeerError("the store is gone")

    member = Failing()
    driver = drive(member)

    def due(now):
        member.wake_at = now

    driver.call(due)
    assert failed.wait(20.0)
    with pytest.raises(LostPeerError, match="the store is gone"):
        threads(lambda: driver.call(lambda now: None), seconds=20.0)


def test_what_a_store_thread_does_not_expect_reaches_the_training_loop(drive):
    """A thread that died of it would leave an operation without an answer, and somebody waiting for it."""

    class Broken(Store):
        def perform(self, operation):
            raise MemoryError("no room for rounds/00000001/0000")

    member = Quiet()
    driver = drive(member, Broken())
    driver.call(lambda now: member.asked.append(Operation("get", "rounds/00000001/0000")))
    assert driver.wait_until(lambda: False, 20.0)
    with pytest.raises(RuntimeError, match="no room for rounds/00000001/0000"):
        driver.call(lambda now: None)


def test_a_seal_does_not_wait_for_garbage_that_is_deleted(drive):
    """Whoever writes a snapshot deletes hundreds of payloads: more than there are connections."""
    go_on = threading.Event()

    class Slow(Store):
        def perform(self, operation):
            if operation.kind == "delete":
                go_on.wait(60.0)
            return super().perform(operation)

    member = Quiet()
    driver = drive(member, Slow())
    garbage = [Operation("delete", f"rounds/{number:08d}/0000") for number in range(1, 100)]
    driver.call(lambda now: member.asked.extend([*garbage, Operation("create", "seals/00000100.json", b"{}")]))
    assert driver.wait_until(lambda: ("create", "seals/00000100.json", "ok") in member.answers, 20.0)
    assert not go_on.is_set()
    go_on.set()
    assert driver.wait_until(lambda: len(member.answers) == 100, 20.0)


def test_what_is_known_of_bad_payloads_does_not_grow_with_the_run(drive):
    member = Quiet()
    driver = drive(member)  # its payloads are empty, which no payload is
    for number in range(1, 201):
        driver.call(lambda now, number=number: member.asked.append(Operation("get", f"rounds/{number:08d}/0001")))
        assert driver.wait_until(lambda number=number: len(member.answers) == number, 20.0)
        driver.forget(number - 1)
    assert {status for _, _, status in member.answers} == {"damaged"}
    assert len(driver._refused) <= 1
