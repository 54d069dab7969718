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
    "leave": "processes that leave",
    "collector": "a stranger who deletes payloads too early",
}
RATES = {
    "delay": 0.05,
    "lost": 0.02,
    "errors": 0.05,
    "twice": 0.03,
    "lies": 0.02,
    "crash": 0.0007,
    "blackout": 0.00006,
    "stall": 0.0006,
    "partition": 0.0006,
    "leave": 0.0003,
    "collector": 0.0002,
}
"""The most that each happens, per operation."""
STORE_FAULTS = ("delay", "lost", "errors", "twice", "lies", "partition")
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


@dataclass
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

    def __init__(self, rng: random.Random, allowed: Iterable[str]) -> None:
        self._random = rng
        self.kinds = [kind for kind in allowed if rng.random() < 0.7]
        self._rates = {kind: RATES[kind] * rng.random() for kind in self.kinds if kind in RATES}

    def stop(self) -> None:
        self._rates = {}

    def happens(self, kind: str) -> bool:
        """Whether this fault happens at this operation."""
        rate = self._rates.get(kind)
        return rate is not None and self._random.random() < rate

    def path(self, operation: Operation) -> Path:
        """The way of a request, and of its answer."""
        draw = self._random.random
        path = Path(0.01 + 0.05 * draw(), 0.01 + 0.05 * draw())
        if not self._rates:
            return path
        if self.happens("delay"):
            path.there += 6 * draw() ** 2
        if self.happens("delay"):
            path.back += 6 * draw() ** 2
        if self.happens("lost"):
            path.answered = False
            path.arrives = draw() < 0.5
        if self.happens("errors"):
            refused = operation.kind == "create" and draw() < 0.5  # 409 or 412, with nothing written
            path.refusal = Answer("exists") if refused else Answer("again", "503")
        if self.happens("lies") and operation.kind == "get":
            path.cut = draw() < 0.5
            path.refusal = path.refusal if path.cut else Answer("missing")
        if self.happens("twice") and operation.kind != "list":
            path.again_after = 30 * draw()
        return path

    def pause(self, patience: float) -> float:
        """How long a process sleeps, or does not reach the store."""
        draw = self._random.random
        return patience * (0.2 + 2 * draw()) * (10 if draw() < 0.15 else 1)
