"""The run and its reference, in turns of some seconds: for a machine that is not equally fast all the time.

A virtual machine's cores are shared with others, and the same step may take a fifth longer a minute later. What was
measured before the run is then no measure for it. So both are there at once, one of them stopped:

    run        ======    ======    ======        each a second and a half, and on until the links are quiet
    reference        ====      ====      ====    as long, or four steps if that is longer

The run is stopped only while nothing moves on any link: what is on its way would arrive meanwhile, for nothing. A link
that is always full is never quiet; then there is a turn before the run and one after it.

The time in which the run was stopped is taken out of its log (`running`). What a switch costs, caches that have to be
filled again, is left to the run's account. A run that never exchanges anything has 98 to 99 % by this measure
(docs/log.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isles.lab.figures import Sample
from isles.lab.nodes import Node
from isles.lab.reference import Alone, Turn
from isles.view import events
from isles.view.events import Event

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Of both: memory that was freed is kept. Otherwise it depends on what a process happens to have allocated before
whether it gives memory back in every step and asks for it again, and one of the two is some percent slower for good.
"""
RUN_SECONDS, ALONE_SECONDS, ALONE_STEPS = 1.5, 1.5, 4
QUIET_SAMPLES, QUIET_BYTES = 3, 500
"""Nothing moves if an island has sent no more than so many bytes in so many samples: no frame of data."""


class Turns:
    """Lets two sets of processes work in turns. `tick` is called now and then, with all samples so far."""

    def __init__(self, run: Sequence[Node], alone: Alone, log: Path) -> None:
        self._run, self._alone, self._log = run, alone, log
        step_seconds = max(alone.step_seconds(alone.turns[-1]))
        self._alone_seconds = max(ALONE_SECONDS, ALONE_STEPS * step_seconds)
        self._next: float | None = None
        self._stopped: float | None = None
        self.pauses: list[Turn] = []
        """In which the run was stopped."""

    def tick(self, samples: Sequence[Sample]) -> None:
        """Hands over if it is time."""
        if self._next is None:
            if self._begun():  # starting is not training
                self._next = time.time() + RUN_SECONDS
        elif time.time() < self._next:
            pass
        elif self._stopped is not None:
            self._hand_back()
        elif quiet(samples):
            self._hand_over()

    def _begun(self) -> bool:
        if not events.locate(self._log).exists():
            return False
        at_work = {event["island"] for event in events.read(self._log) if event["event"] == "step"}
        return len(at_work) == len(self._run)

    def _hand_over(self) -> None:
        for node in self._run:
            node.stop()
        self._stopped = time.time()
        self._alone.go_on()
        self._next = self._stopped + self._alone_seconds

    def _hand_back(self) -> None:
        assert self._stopped is not None
        self._alone.stop()
        now = time.time()
        self.pauses.append(Turn(self._stopped, now))
        self._stopped, self._next = None, now + RUN_SECONDS
        for node in self._run:
            node.go_on()


def quiet(samples: Sequence[Sample]) -> bool:
    """Whether nothing has moved on any link of late."""
    if len(samples) < QUIET_SAMPLES:
        return False
    (_, before), (_, now) = samples[-QUIET_SAMPLES], samples[-1]
    return all((new - old).sent_bytes <= QUIET_BYTES for new, old in zip(now, before, strict=True))


def running(when: float, pauses: Sequence[Turn]) -> float:
    """A time by a clock that stands still while the run is stopped.

    >>> [running(when, [Turn(10, 12), Turn(20, 25)]) for when in (5, 11, 15, 30)]
    [5, 10, 13, 23]
    """
    return when - sum(min(when, pause.end) - pause.begin for pause in pauses if pause.begin < when)


def without_pauses(log: Sequence[Event], pauses: Sequence[Turn]) -> list[Event]:
    """The log as if the run had never been stopped."""

    def at(event: Event) -> dict[str, Any]:
        end = running(event["time"], pauses)
        if event["event"] != "step":
            return {"time": end}
        seconds = end - running(event["time"] - event["seconds"], pauses)
        stopped = event["seconds"] - seconds
        parts = {name: event[name] for name in ("wait_seconds", "engine_seconds")}
        within = {name: value - stopped for name, value in parts.items() if value > seconds}  # it was stopped there
        return {"time": end, "seconds": seconds, **within}

    return [{**event, **at(event)} for event in log]
