"""The run and its reference, in turns of some seconds: for a machine whose speed varies.

A virtual machine's cores are shared with others, and the same step may take a fifth longer a minute later. A
measurement before the run then says little about the run. So both are there at once, one of them stopped:

    run        ======    ======    ======        a second and a half or four steps, and on until the links are quiet
    reference        ====      ====      ====    as long

The run is stopped only while nothing moves on any link: bytes in flight would arrive during the pause, at no cost to
the run. A link that is always full is never quiet; then there is a turn before the run and one after it.

The time in which the run was stopped is taken out of its log (`running`). The cost of a switch, caches that have to be
filled again, is charged to the run. A run that never exchanges anything has 98 to 99 % by this measure (docs/log.md).
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
TURN_SECONDS, TURN_STEPS = 1.5, 4
"""The longer of the two is the length of a turn."""
QUIET_SECONDS, QUIET_LATENCIES, QUIET_BYTES = 0.1, 4, 500
"""Nothing moves if no island has sent more than so many bytes, no frame of data, for so long."""
TURNS_IN_A_TIMEOUT = 4
"""A run whose timeout is shorter than so many turns cannot be stopped."""


class Turns:
    """Lets two sets of processes work in turns. `tick` is called now and then, with all samples so far."""

    def __init__(self, run: Sequence[Node], alone: Alone, log: Path, *, latency_seconds: float = 0.0) -> None:
        self._run, self._alone, self._log = run, alone, log
        self._turn_seconds = turn_seconds(alone)
        self._quiet_seconds = max(QUIET_SECONDS, QUIET_LATENCIES * latency_seconds)
        self._next: float | None = None
        self._stopped: float | None = None
        self.pauses: list[Turn] = []
        """In which the run was stopped."""

    def tick(self, samples: Sequence[Sample]) -> None:
        """Hands over if it is time."""
        if self._next is None:
            if self._begun():  # starting is not training
                self._next = time.time() + self._turn_seconds
        elif time.time() < self._next:
            pass
        elif self._stopped is not None:
            self._hand_back()
        elif quiet(samples, self._quiet_seconds):
            self._hand_over()

    def _begun(self) -> bool:
        try:
            log = events.read(self._log)
        except ValueError:
            return False  # not yet
        return len({event["island"] for event in log if event["event"] == "step"}) >= len(self._run)

    def _hand_over(self) -> None:
        for node in self._run:
            node.stop()
        self._stopped = time.time()
        self._alone.go_on()
        self._next = self._stopped + self._turn_seconds

    def _hand_back(self) -> None:
        assert self._stopped is not None
        self._alone.stop()
        now = time.time()
        self.pauses.append(Turn(self._stopped, now))
        self._stopped, self._next = None, now + self._turn_seconds
        for node in self._run:
            node.go_on()


def turn_seconds(alone: Alone) -> float:
    """How long a turn is, by what a step took in the first one."""
    return max(TURN_SECONDS, TURN_STEPS * max(alone.step_seconds(alone.turns[0])))


def quiet(samples: Sequence[Sample], seconds: float) -> bool:
    """Whether nothing has moved on any link for so long."""
    when, now = samples[-1]
    before = next((counted for earlier, counted in reversed(samples) if earlier <= when - seconds), None)
    if before is None:
        return False
    return all((new - old).sent_bytes <= QUIET_BYTES for new, old in zip(now, before, strict=True))


def moved(samples: Sequence[Sample], pauses: Sequence[Turn]) -> int:
    """The bytes that all islands have sent while the run was stopped: what was in flight after all, and the heartbeats
    of torchrun, which is not stopped.
    """
    found = 0
    for pause in pauses:
        within = [counted for when, counted in samples if pause.begin <= when <= pause.end]
        if within:
            found += sum((last - first).sent_bytes for last, first in zip(within[-1], within[0], strict=True))
    return found


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
        within = {name: max(0.0, value - stopped) for name, value in parts.items() if value > seconds}  # stopped there
        return {"time": end, "seconds": seconds, **within}

    return [{**event, **at(event)} for event in log]
