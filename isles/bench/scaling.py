"""How the cost of a round grows: with the number of parameters, and with the number of fragments.

A round is everything isles does in the training loop in one period, for all fragments: outer gradient, encode, decode,
outer step, mix. There is no training here, the optimizer's step is empty, so a hundred million parameters take
seconds. Before every step at which isles has something to do, a large vector is read: it evicts from the cache what a
training step would have evicted. Models take turns, round by round, and for each step of the period the shortest of all
rounds counts, in CPU time, which leaves out what other programs took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import isles
from isles.bench.clock import Marks
from isles.bench.training import stack

LAYERS = 64
SYNC_EVERY = 128


def measure(
    parameters: Sequence[int], fragments: Sequence[int], fragmented_parameters: Sequence[int], rounds: int
) -> dict[str, Any]:
    """The cost of a round over sizes, with the exponent of the power law, and over numbers of fragments, for each size
    that is given, with what the most fragments cost against one.
    """
    by_parameters = _costs([_Subject(each, 8) for each in parameters], rounds)
    by_fragments = [_costs([_Subject(size, each) for each in fragments], rounds) for size in fragmented_parameters]
    points = [(row["parameters"], row["seconds"]) for row in by_parameters]
    return {
        "parameters": by_parameters,
        "exponent": exponent(points),
        "fragments": by_fragments,
        "growth": [rows[-1]["seconds"] / rows[0]["seconds"] for rows in by_fragments],
    }


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """b of the power law y = a * x^b that fits the points best, in logarithms.

    >>> round(exponent([(1, 3), (10, 30), (100, 300)]), 6)
    1.0
    """
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    centre_x, centre_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - centre_x) * (y - centre_y) for x, y in zip(xs, ys, strict=True))
    return slope / sum((x - centre_x) ** 2 for x in xs)


class _Subject:
    """A model with isles and nothing to learn."""

    def __init__(self, parameters: int, fragments: int) -> None:
        self._model = stack(parameters, LAYERS)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)  # no gradients: its step does nothing
        method = isles.Method.streaming(sync_every=SYNC_EVERY, fragments=fragments)
        self._before = Marks(self._optimizer)
        self.diloco = isles.DiLoCo(self._model, self._optimizer, method, world=isles.LocalWorld.alone())
        self._after = Marks(self._optimizer)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)

    def round(self, ballast: Tensor) -> list[float]:
        """Seconds of isles after each step of one period."""
        seconds, schedule = [], self.diloco.schedule
        for _ in range(SYNC_EVERY):
            coming = self.diloco.step_count + 1
            if schedule.sends(coming) or schedule.applies(coming):
                ballast.sum()
            self._optimizer.step()
            seconds.append(self._after.cpu_seconds - self._before.cpu_seconds)
        return seconds


def _costs(subjects: Sequence[_Subject], rounds: int) -> list[dict[str, Any]]:
    """Rounds of all subjects in turns; the first one warms up."""
    ballast = torch.ones(1 << 24)
    least = [[math.inf] * SYNC_EVERY for _ in subjects]
    for turn in range(1 + rounds):
        for index, subject in enumerate(subjects):
            seconds = subject.round(ballast)
            if turn:
                least[index] = [min(pair) for pair in zip(least[index], seconds, strict=True)]
    for subject in subjects:
        subject.diloco.close()
    return [
        {
            "parameters": sum(fragment.numel for fragment in subject.diloco.fragments),
            "fragments": len(subject.diloco.fragments),
            "seconds": sum(seconds),
        }
        for subject, seconds in zip(subjects, least, strict=True)
    ]
