"""Long series made short enough to draw, without losing what one looks for in them.

A bucket keeps the mean *and* the extremes of what falls into it, so a spike of one step in 100,000 is still seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from isles.view.runs import Run, Step

CURVE_BUCKETS = 500
EARLY_BUCKETS = 150
TRAFFIC_ROWS = 4000
UTILIZATION_BUCKETS = 120


def even_edges(count: int, buckets: int) -> list[int]:
    """Where buckets of equal width begin, and where the last one ends.

    >>> even_edges(10, 4)
    [0, 3, 6, 9, 10]
    """
    width = max(1, -(-count // buckets))
    return [*range(0, count, width), count] if count else [0]


def curve_edges(count: int) -> list[int]:
    """As `even_edges`, with finer buckets early on, where a loss falls fast and a logarithmic axis is wide."""
    early = {round(count ** (index / EARLY_BUCKETS)) for index in range(EARLY_BUCKETS)} if count else set()
    return sorted(early | set(even_edges(count, CURVE_BUCKETS)))


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """The mean over a window around each value; None is left out.

    The window is narrower at the ends, and grows from the beginning on, where values change fast.

    >>> smooth([1.0, 2.0, None, 6.0, 8.0], 3)
    [1.0, 2.0, None, 7.0, 7.0]
    """
    half = window // 2
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    result: list[float | None] = []
    for index in range(len(values)):
        reach = min(half, index // 3)
        first, last = index - reach, min(len(values), index + reach + 1)
        count = counts[last] - counts[first]
        result.append((sums[last] - sums[first]) / count if count else None)
    return result


def loss_curve(steps: Sequence[Step]) -> list[list[Any]]:
    """Rows of [step, tokens, bytes so far, wall seconds, smoothed loss, least, most] of the training loss."""
    losses = [step.loss for step in steps]
    smoothed = smooth(losses, len(steps) // 80)
    totals = [0]
    for step in steps:
        totals.append(totals[-1] + step.bytes_sent)
    edges = curve_edges(len(steps))
    rows: list[list[Any]] = []
    for first, last in itertools.pairwise(edges):
        inside = [loss for loss in losses[first:last] if loss is not None]
        if inside:
            step = steps[last - 1]
            mean = smoothed[(first + last - 1) // 2]
            rows.append([step.step, step.tokens, totals[last], step.wall_seconds, mean, min(inside), max(inside)])
    return rows


def traffic(steps: Sequence[Step], most_rows: int = TRAFFIC_ROWS) -> list[list[Any]]:
    """Rows of [first step, last step, most bytes sent in one step, mean bytes a step], over all islands.

    Step by step where that takes few enough rows (neighbours that are alike share one), else by the shortest stretch.
    """
    width = 1
    while True:
        rows: list[list[Any]] = []
        for first in range(0, len(steps), width):
            part = steps[first : first + width]
            sent = [step.bytes_sent for step in part]
            peak, mean = max(sent), sum(sent) / len(sent)
            if rows and rows[-1][2:] == [peak, mean]:
                rows[-1][1] = part[-1].step
            else:
                rows.append([part[0].step, part[-1].step, peak, mean])
        if len(rows) <= most_rows:
            return rows
        width *= 2


def utilization(run: Run) -> list[list[Any]]:
    """Rows of [first step, last step, share of the time spent computing]; a bucket is at least one period long."""
    steps = run.steps
    period = int(run.method.get("sync_every") or 1)
    width = max(period, -(-len(steps) // UTILIZATION_BUCKETS))
    rows: list[list[Any]] = []
    for first in range(0, len(steps), width):
        part = steps[first : first + width]
        if rows and len(part) < width:
            break  # a part of a period would show noise
        seconds = sum(step.step_seconds for step in part)
        if seconds:
            rows.append([part[0].step, part[-1].step, 1 - sum(step.wait_seconds for step in part) / seconds])
    return rows


def flights(run: Run, most: int = 40_000) -> list[list[Any]]:
    """Rows of [island, fragment, round, step sent, step applied or None, bytes, seconds waited, seconds in flight].

    Of a run with more rounds than `most`, the latest are kept.
    """
    rounds = sorted(run.rounds, key=lambda each: each.sent_step)[-most:]
    return [
        [
            each.island,
            each.fragment,
            each.round,
            each.sent_step,
            each.applied_step,
            each.num_bytes,
            each.wait_seconds,
            each.flight_seconds,
        ]
        for each in rounds
    ]
