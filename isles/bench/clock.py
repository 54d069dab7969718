"""Timing on a machine that does other things too: in turns, and at its best.

Two things are compared fairly if they take turns, so that both see the same machine, and if the best of several times
counts, which is the one that was disturbed least. What an optimizer's hook takes is read between two `Marks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def fastest(
    actions: Mapping[str, Callable[[], object]], *, repeats: int, limit_seconds: float = float("inf")
) -> dict[str, float]:
    """Seconds of each action at its best, after one turn that warms up. Beyond the limit there are no more turns.

    >>> sorted(fastest({"nothing": lambda: None, "less": lambda: 0}, repeats=3))
    ['less', 'nothing']
    """
    best = dict.fromkeys(actions, float("inf"))
    for action in actions.values():
        action()
    deadline = time.perf_counter() + limit_seconds
    for turn in range(repeats):
        if turn and time.perf_counter() > deadline:
            break
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


class Marks:
    """A hook that records when the optimizer last stepped. Hooks run in the order in which they were registered."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self.remove = optimizer.register_step_post_hook(self._note).remove

    def _note(self, *_: object) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter(), time.thread_time()
