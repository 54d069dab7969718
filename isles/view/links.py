"""How long a run would take on another link between its islands: the planner, given the run's own numbers.

Model, method and fragments are those of the config event. Compute time is what was measured: the mean of a step's
seconds without waiting, for each island; encoding and applying in the training loop are part of it. The link has no
latency, evaluations and checkpoints take no time. One island alone only computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isles.plan import Island, Link, predict
from isles.plan.workload import workload_of
from isles.view.runs import Run

PER_DECADE = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
BANDWIDTHS = (*(digits * 10.0**power for power in range(4, 11) for digits in PER_DECADE), 1e11)
"""From 10 kbit/s to 100 Gbit/s, about evenly spaced on a logarithmic scale, in numbers that people use."""
EVERYDAY = 20e6
"""The link of the tables' column, in bit/s: what a home or an office can send."""


@dataclass(frozen=True)
class Times:
    """Planned times of a run, one of each kind for each bandwidth."""

    step_seconds: list[float]
    """Of a step, communication included, after the dense start."""
    start_steps: int
    """Length of the dense start; 0: there is none."""
    start_seconds: list[float]
    """Of the whole dense start."""

    def seconds(self, steps: int) -> list[float]:
        """Of the run's first steps, so many.

        >>> Times([0.5], start_steps=10, start_seconds=[20.0]).seconds(30)
        [30.0]
        """
        share = min(1.0, steps / self.start_steps) if self.start_steps else 0.0
        rest = max(0, steps - self.start_steps)
        return [share * start + rest * step for start, step in zip(self.start_seconds, self.step_seconds, strict=True)]


def times(run: Run, bandwidths: Sequence[float] = BANDWIDTHS) -> Times | None:
    """Planned times of a run on links of so many bit/s; None if its log does not say enough."""
    pace = compute_seconds(run)
    if pace is None:
        return None
    if run.alone:
        return Times(pace * len(bandwidths), start_steps=0, start_seconds=[0.0] * len(bandwidths))
    try:
        return _planned(run, pace, bandwidths)
    except (KeyError, TypeError, ValueError):  # a model or a method that the planner does not know
        return None


def seconds_on(run: Run, bits_per_second: float = EVERYDAY) -> float | None:
    """Planned time of all steps of a run on one link."""
    found = times(run, [bits_per_second])
    return found.seconds(run.steps[-1].step)[0] if found else None


def compute_seconds(run: Run) -> list[float] | None:
    """Mean time of a step without waiting, for each island; None if an island has no steps."""
    spent: list[list[float]] = [[] for _ in range(run.islands)]
    for event in run.events:
        if event["event"] == "step" and event.get("seconds") is not None:
            waited = float(event.get("wait_seconds") or 0.0)
            spent[int(event.get("island") or 0)].append(float(event["seconds"]) - waited)
    return [sum(each) / len(each) for each in spent] if all(spent) else None


def _planned(run: Run, pace: Sequence[float], bandwidths: Sequence[float]) -> Times | None:
    from isles.core.method import Method

    ranks = len({event.get("rank") for event in run.events if event["event"] == "island" and event.get("island") == 0})
    method = None if run.data_parallel else Method(**run.method)
    if method is None and ranks > 1:
        return None
    found = predict(
        workload_of(run.config, max(pace), max(1, ranks)),
        [Island(step_seconds=seconds, link=Link.symmetric(bandwidths[0])) for seconds in pace],
        method,
        reduction=(run.config.get("config") or {}).get("reduction", "auto"),
        bits_per_second=np.asarray(bandwidths),
        fragments=[int(each["numel"]) for each in run.config.get("fragments") or []],
    )
    return Times(found.step_seconds.tolist(), found.start.steps, found.start.seconds.tolist())
