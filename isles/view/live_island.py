"""One island of a run that goes on: where it is, how fast, what crosses its link, and whether it is in the rounds."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from isles.view.events import Event

RECENT_STEPS, RECENT_ROUNDS = 100, 20
SILENT_SECONDS, SILENT_STEPS = 5.0, 15
"""An island is silent if it says nothing for so long, for so many of its steps, and for twice its longest pause."""


def _steps() -> deque[float]:
    return deque(maxlen=RECENT_STEPS)


def _rounds() -> deque[float]:
    return deque(maxlen=RECENT_ROUNDS)


@dataclass
class LiveIsland:
    """Fed with the island's events; everything about speed is of its last steps, more than a period of most methods."""

    number: int
    step: int = 0
    clock: int | None = None
    """Of the run, where that is not the island's own step."""
    loss: float | None = None
    loss_is_finite: bool = True
    last_time: float = 0.0
    longest_pause: float = 0.0
    """Between two of its events: evaluations and checkpoints make some."""
    seconds: deque[float] = field(default_factory=_steps)
    waits: deque[float] = field(default_factory=_steps)
    slacks: deque[float] = field(default_factory=_rounds)
    bytes_sent: int = 0
    bytes_sealed: int = 0
    """Of its payloads in seals: all that is known as long as it tells nothing itself."""
    bytes_received: int = 0
    wait_seconds: float = 0.0
    rounds_in: int = 0
    rounds_out: int = 0
    rounds_caught_up: int = 0
    out_since: int | None = None
    """The first of the rounds in a row that it has not been in; None: it was in the last one."""
    out_in_a_row: int = 0
    lateness: deque[float] = field(default_factory=_rounds)
    """How long after the round was completed its payload was sent, where it was left out."""
    nonfinite_round: int | None = None
    rounds_at_nonfinite: int = 0
    joined: int | None = None
    """The first round that it could be in, where islands come and go."""
    left: int | None = None
    gone: Event | None = None
    """Its process has ended: a `gone` event."""
    ended: bool = False
    host: str = ""
    _before_in: tuple[int, int | None, int, deque[float]] = field(default_factory=lambda: (0, None, 0, _rounds()))

    def take(self, event: Event) -> None:
        """What every event says: the island lives."""
        time = float(event.get("time") or 0.0)
        if self.last_time:
            self.longest_pause = max(self.longest_pause, time - self.last_time)
        self.last_time = max(self.last_time, time)
        if self.gone is not None and time > float(self.gone["time"]):
            self.gone = None

    def take_step(self, event: Event) -> None:
        own = event.get("own_step")
        self.step, self.clock = (int(event["step"]), None) if own is None else (int(own), int(event["step"]))
        loss = event.get("loss")
        self.loss_is_finite = loss is not None or "loss" not in event
        self.loss = loss if self.loss is None or loss is None else 0.9 * self.loss + 0.1 * loss
        self.seconds.append(float(event.get("seconds") or 0.0))
        self.waits.append(float(event.get("wait_seconds") or 0.0))
        self.wait_seconds += self.waits[-1]
        self.bytes_sent += int(event.get("bytes_sent") or 0)
        self.bytes_received += int(event.get("bytes_received") or 0)

    def was_in(self, number: int) -> None:
        """Round `number` has its payload."""
        self._before_in = (self.rounds_in, self.out_since, self.out_in_a_row, self.lateness)
        self.rounds_in += 1
        self.out_since, self.out_in_a_row, self.lateness = None, 0, _rounds()

    def was_not_in(self) -> None:
        """What `was_in` was last told is not so: an apply is told before it is known whether the island was in."""
        self.rounds_in, self.out_since, self.out_in_a_row, self.lateness = self._before_in

    def was_out(self, number: int) -> None:
        """Round `number` was completed without it."""
        self.rounds_out += 1
        self.out_in_a_row += 1
        self.out_since = number if self.out_since is None else self.out_since

    @property
    def place(self) -> int:
        """In the schedule."""
        return self.step if self.clock is None else self.clock

    @property
    def step_seconds(self) -> float | None:
        return statistics.mean(self.seconds) if sum(self.seconds) > 0 else None

    @property
    def utilization(self) -> float | None:
        return 1 - sum(self.waits) / sum(self.seconds) if sum(self.seconds) > 0 else None

    @property
    def slack_seconds(self) -> float | None:
        """The median of late: how long before they are due results arrive."""
        return statistics.median(self.slacks) if self.slacks else None

    def state(self, now: float, over: bool, total_steps: int | None) -> str:
        """One word: in, out, left, gone, silent, done, joined."""
        if self.ended or (over and self.left is None) or (total_steps and self.place >= total_steps):
            return "done"
        if self.left is not None:
            return "left"
        if self.gone is not None:
            return "gone"
        usual = max(SILENT_SECONDS, SILENT_STEPS * (self.step_seconds or 0.0), 2 * self.longest_pause)
        if self.last_time and now - self.last_time > usual:
            return "silent"
        if self.out_in_a_row:
            return "out"
        return "in" if self.rounds_in or self.joined is None else "joined"

    def row(self, now: float, over: bool, total_steps: int | None, tokens: float | None) -> dict[str, Any]:
        """What is shown of it; `tokens`: of one of its steps."""
        pace = self.step_seconds
        return {
            "island": self.number,
            "state": self.state(now, over, total_steps),
            "step": self.step,
            "clock": self.clock,
            "loss": self.loss,
            "tokensPerSecond": tokens / pace if tokens and pace else None,
            "stepSeconds": pace,
            "utilization": self.utilization,
            "waitSeconds": statistics.mean(self.waits) if self.waits else None,
            "sent": self.bytes_sent or self.bytes_sealed,
            "received": self.bytes_received,
            "slack": self.slack_seconds,
            "lastTime": self.last_time or None,
            "roundsIn": self.rounds_in,
            "roundsOut": self.rounds_out,
            "caughtUp": self.rounds_caught_up,
            "outInARow": self.out_in_a_row,
            "outSince": self.out_since,
            "joined": self.joined,
            "left": self.left,
            "host": self.host,
        }
