"""Threads around the protocol: store operations, encoding and averaging, all beside the training loop.

The protocol (`isles.elastic.protocol`) is a state machine without threads; here it lives behind one lock. Whoever has
something for it, the training loop, a store operation that has ended, a timer, takes the lock for microseconds, tells
it, and starts the operations that it asks for. Everything that takes time happens outside the lock:

    store     up to `CONNECTIONS` operations at a time: requests, and checksums of what they bring. Parts of snapshots
              and deletes have `BULK_CONNECTIONS` of their own, so that payloads and seals never wait for them
    codec     one job after the other: encodes what is sent, averages what is sealed, takes the outer step ahead of time
    timer     wakes the protocol when it has nothing else to wake it

Payloads are kept here, from when they are read until their round is averaged, at most as many rounds as the protocol
reads ahead. It sees what they are (`Contribution`), never their bytes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from isles.elastic.decisions import Decision
from isles.elastic.documents import DamagedError
from isles.elastic.lateness import Lateness
from isles.elastic.objects import ROUNDS, Check, Contribution, is_part, round_of, told_of
from isles.elastic.protocol import Member
from isles.elastic.requests import Answer, Operation
from isles.elastic.store import ObjectStore
from isles.wire.worker import Worker, stop_all
from isles.wire.world import LostPeerError

CONNECTIONS, BULK_CONNECTIONS = 8, 2
R = TypeVar("R")
Operations = queue.SimpleQueue[Operation | None]
Average = Callable[[int, tuple[Contribution, ...]], Any]
logger = logging.getLogger("isles")


class Driver:
    """A member, its store, and the threads in between. An error beside the loop is final: later calls raise it too."""

    def __init__(self, store: ObjectStore, make_member: Callable[[float], Member], check: Check) -> None:
        self._store, self._check = store, check
        self._changed = threading.Condition()
        self.kept: dict[str, bytes] = {}
        """Payloads, and parts of snapshots, by name."""
        self.bytes_sent = self.bytes_received = 0
        self._failure: Exception | None = None
        self._stopped = False
        self._averages: dict[int, Future[Any]] = {}
        self._average: Average | None = None
        self._refused: set[str] = set()
        self._lateness = Lateness()
        self.codec = Worker("isles-codec")
        self._operations: Operations = queue.SimpleQueue()
        self._bulk: Operations = queue.SimpleQueue()
        self._queues = [self._operations] * CONNECTIONS + [self._bulk] * BULK_CONNECTIONS
        """One for each thread."""
        self._transfers: dict[str, deque[float]] = {"put": deque(maxlen=8), "get": deque(maxlen=8)}
        self.member = make_member(time.monotonic())
        threading.Thread(target=self._run_timer, name="isles-timer", daemon=True).start()
        for operations in self._queues:
            threading.Thread(target=self._run_operations, args=(operations,), name="isles-store", daemon=True).start()
        self.call(lambda now: None)

    # ---- for the training loop

    def call(self, action: Callable[..., R], *arguments: Any) -> R:
        """Tells the protocol something. The time is added to the arguments."""
        with self._changed:
            self._raise_failure()
            result = action(*arguments, time.monotonic())
            self._start_operations()
        return result

    def decisions(self, number: Callable[[], int], until: Callable[[], bool]) -> list[Decision]:
        """The next decisions, up to round `number()`: waits for them, or until there is nothing to wait for."""
        with self._changed:
            while True:
                self._raise_failure()
                found = self.member.take(number(), time.monotonic())
                self._start_operations()
                if found or until():
                    return found
                self._changed.wait()

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for the protocol to get somewhere."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failure is not None or condition(), seconds)

    @property
    def transfer_seconds(self) -> float:
        """What the way of a payload has taken of late, up and down."""
        return sum(max(seconds, default=0.0) for seconds in map(tuple, self._transfers.values()))

    def average_with(self, average: Average) -> None:
        """From now on, every round that is sealed and read is averaged in the background."""
        self._average = average

    def averaged(self, number: int, contributions: tuple[Contribution, ...]) -> Any:
        """The average of a round that has been decided."""
        with self._changed:
            started, average = self._averages.pop(number, None), self._average
        assert average is not None
        return average(number, contributions) if started is None else started.result()

    def forget(self, number: int) -> None:
        """Rounds up to this one have been applied."""
        with self._changed:
            self._averages = {k: each for k, each in self._averages.items() if k > number}
            self.kept = {name: data for name, data in self.kept.items() if (round_of(name) or 0) > number}
            self._refused = {name for name in self._refused if (round_of(name) or 0) > number}
            self._lateness.forget(number)

    def left_out(self, number: int) -> float | None:
        """A round was completed without what this island has sent: how many seconds too late its payloads come."""
        with self._changed:
            return self._lateness.left_out(number)

    def stop(self) -> None:
        """Ends the threads. Operations under way come to their end unheard."""
        with self._changed:
            self._stopped = True
            self._failure = self._failure or RuntimeError("this island has left its run: make a new StoreWorld")
            self._changed.notify_all()
        for operations in self._queues:
            operations.put(None)
        stop_all([self.codec])

    # ---- in threads

    def _start_operations(self) -> None:
        """After every call, with the lock held."""
        for operation in self.member.operations():
            bulk = operation.kind == "delete" or is_part(operation.name)
            (self._bulk if bulk else self._operations).put(operation)
        self._start_averages()
        self._changed.notify_all()

    def _start_averages(self) -> None:
        number = max([self.member.taken, *self._averages], default=0) + 1
        while self._average is not None and not self._stopped and (parts := self.member.ready(number)) is not None:
            self._averages[number] = self.codec.do(self._average, number, parts)
            number += 1

    def _run_operations(self, operations: Operations) -> None:
        while (operation := operations.get()) is not None and not self._stopped:
            try:
                self._perform(operation)
            except Exception as error:  # or somebody would wait for ever for the answer
                self.fail(error)

    def _perform(self, operation: Operation) -> None:
        name, begin = operation.name, time.monotonic()
        done = self._store.perform(operation)
        end, answer = time.monotonic(), self._opened(operation, done)
        with self._changed:
            if answer.status == "ok" and answer.value is not done.value:
                self.kept[name] = done.value
            if answer.status == "damaged" and name.startswith(ROUNDS) and name not in self._refused:
                self._refused.add(name)
                logger.warning("%s is left out: %s", name, answer.value)
            if done.status == "ok":
                self._count(operation, done, end - begin)
            self._lateness.note(operation, done, begin, end)
            self._tell(self.member.answer, operation, answer)

    def _opened(self, operation: Operation, done: Answer) -> Answer:
        """What the protocol is told: of payloads, and of parts of snapshots, what they are. Their bytes stay here."""
        if operation.kind != "get" or done.status != "ok":
            return done
        try:
            return Answer("ok", told_of(operation.name, done.value, self._check))
        except DamagedError as error:
            return Answer("damaged", str(error))

    def _count(self, operation: Operation, done: Answer, seconds: float) -> None:
        is_payload = operation.name.startswith(ROUNDS)
        if is_payload and operation.kind in self._transfers:
            self._transfers[operation.kind].append(seconds)
        if operation.kind == "get":
            self.bytes_received += len(done.value)
        elif operation.body is not None and not is_payload:
            self.bytes_sent += len(operation.body)  # payloads are counted when they are sent

    def _run_timer(self) -> None:
        with self._changed:
            while not self._stopped and self._failure is None:
                pause = self.member.wake_at - time.monotonic()
                if pause <= 0:
                    self._tell(self.member.wake)
                else:
                    self._changed.wait(min(pause, 60.0))

    def _tell(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Tells the protocol something, in a thread that nobody waits for: errors go to whoever calls next."""
        if self._failure is not None:
            return
        try:
            action(*arguments, time.monotonic())
            self._start_operations()
        except Exception as error:
            self._fail(error)

    def fail(self, error: Exception) -> None:
        """Something else went wrong beside the loop."""
        with self._changed:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            kind = type(self._failure) if isinstance(self._failure, (LostPeerError, ValueError)) else RuntimeError
            raise kind(str(self._failure)) from self._failure
