"""What can go wrong in a simulation. Everything is drawn from one generator, so a seed is a whole story.

Each seed picks some of the kinds that are allowed, and how often each of them happens: a run in which everything goes
wrong at once never gets to where the rare combinations are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from isles.elastic.requests import Answer, Operation

FAULTS = {
    "slow": "islands whose steps take up to ten times as long",
    "delay": "requests that take a hundred times as long as others, and are overtaken",
    "lost": "requests that do not arrive, and answers that do not, although the write has happened",
    "errors": "409, 412, 429, 500, 503",
    "twice": "requests that are performed again, much later",
    "lies": "objects that are said to be missing, and reads that are cut short",
    "crash": "processes that die between any two operations; new ones start",
    "blackout": "all processes die at once",
    "stall": "processes that sleep, for longer than patience or for many rounds, and go on",
    "partition": "processes that do not reach the store for a while",
    "leave": "processes that leave, at once or after sending what is left",
    "collector": "a stranger who deletes payloads too early",
}
RATES = {"delay": 0.05, "lost": 0.02, "errors": 0.05, "twice": 0.03, "lies": 0.02}
"""What a store does to requests: how often, at most, per request."""
TIMES = {"crash": 12, "blackout": 2, "stall": 8, "partition": 8, "leave": 4, "collector": 4}
"""What happens to processes between two requests: how many times, at most, per seed of 50 rounds."""
RATE = 0.002
REQUEST_TIMEOUT = 4.0


def parse_faults(text: str) -> tuple[str, ...]:
    """The kinds that "all", "none" or a list with commas names.

    >>> parse_faults("crash,stall")
    ('crash', 'stall')
    """
    if text in ("all", "none"):
        return tuple(FAULTS) if text == "all" else ()
    kinds = tuple(part.strip() for part in text.split(","))
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        raise ValueError(f"unknown fault {unknown[0]!r}: choose all, none, or some of {', '.join(FAULTS)}")
    return kinds


@dataclass(slots=True)
class Path:
    """What happens to one request."""

    there: float
    """Seconds until the store performs it."""
    back: float
    """Seconds until the answer arrives."""
    arrives: bool = True
    answered: bool = True
    refusal: Answer | None = None
    """Answered instead of performing it."""
    cut: bool = False
    """What is read is cut short."""
    again_after: float = 0.0
    """It is performed once more."""


class Faults:
    """Draws what happens, until `stop`."""

    def __init__(self, rng: random.Random, allowed: Iterable[str], rounds: int) -> None:
        self._random = rng
        self.kinds = [kind for kind in allowed if rng.random() < 0.7]
        self._requests = [(kind, RATES[kind] * rng.random()) for kind in self.kinds if kind in RATES]
        self._processes = [(kind, RATE * rng.random()) for kind in self.kinds if kind in TIMES]
        self._times = {kind: 1 + int(most * rng.random() * rounds / 50) for kind, most in TIMES.items()}

    def stop(self) -> None:
        self._requests, self._processes = [], []

    def disturbance(self) -> str | None:
        """What happens to a process that is about to ask something of the store."""
        kind = self._draw(self._processes)
        if kind is not None:
            self._times[kind] -= 1
            self._processes = [each for each in self._processes if self._times[each[0]] > 0]
        return kind

    def path(self, operation: Operation) -> Path:
        """The way of a request, and of its answer."""
        draw = self._random.random
        path = Path(0.01 + 0.05 * draw(), 0.01 + 0.05 * draw())
        kind = self._draw(self._requests)
        if kind == "delay":
            path.there, path.back = 6 * draw() ** 3, 6 * draw() ** 3
        elif kind == "lost":
            path.answered, path.arrives = False, draw() < 0.5
        elif kind == "errors":
            refused = operation.kind == "create" and draw() < 0.5  # 409 or 412, with nothing written
            path.refusal = Answer("exists") if refused else Answer("again", "503")
        elif kind == "lies" and operation.kind == "get":
            path.cut = draw() < 0.5
            path.refusal = None if path.cut else Answer("missing")
        elif kind == "twice" and operation.kind != "list":
            path.again_after = 30 * draw()
        return path

    def _draw(self, rates: list[tuple[str, float]]) -> str | None:
        """At most one of them."""
        if rates:
            draw = self._random.random()
            for kind, rate in rates:
                draw -= rate
                if draw < 0:
                    return kind
        return None

    def pause(self, patience: float) -> float:
        """How long a process sleeps, or does not reach the store."""
        draw = self._random.random
        return patience * (0.2 + 2 * draw()) * (10 if draw() < 0.15 else 1)
