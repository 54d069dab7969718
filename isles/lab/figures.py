"""Figures of a run from its event log and from the kernel's counters. Pure: events and samples in, numbers out.

utilisation   steps x time of a step without communication / time from the first step to the last
steady        the same over the last periods, eight at most, without the steps in which nothing can be due yet
kernel bytes  what left the islands' interfaces from the first step until the run was over, whole frames
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isles.core.method import Method
from isles.lab.network import Counters
from isles.view.events import Event

STEADY_PERIODS = 8
"""The most that count as steady: what was before them may be a backlog that is still growing."""

Sample = tuple[float, list[Counters]]
"""Seconds since the epoch, and each island's counters at that time."""


@dataclass(frozen=True)
class Loop:
    """The training loop of one island."""

    begin: float
    end: float
    steps: int
    bytes_sent: int
    wait_seconds: float
    drain_seconds: float
    """From the last step until what was in flight had been applied."""

    @property
    def wall_seconds(self) -> float:
        return self.end - self.begin


def loops(log: Sequence[Event], islands: int, skip: int = 0) -> list[Loop]:
    """The training loop of each island, from the event log, without its first steps if there are others."""
    found = []
    for island in range(islands):
        steps = [event for event in log if event["event"] == "step" and event["island"] == island]
        if not steps:
            raise ValueError(f"the event log has no step of island {island}: the run did not get that far")
        steps = steps[skip:] or steps
        applied = [event["time"] for event in log if event["event"] == "apply" and event["island"] == island]
        end = steps[-1]["time"]
        found.append(
            Loop(
                begin=steps[0]["time"] - steps[0]["seconds"],
                end=end,
                steps=len(steps),
                bytes_sent=sum(event["bytes_sent"] for event in steps),
                wait_seconds=sum(event["wait_seconds"] for event in steps),
                drain_seconds=max(0.0, max(applied, default=end) - end),
            )
        )
    return found


def warm_up_steps(method: Mapping[str, Any] | None) -> int:
    """The steps of a run in which nothing can be due, from the fields of its method; None: data-parallel.

    >>> warm_up_steps(None), warm_up_steps(Method.eager(sync_every=30).as_dict())
    (1, 30)
    """
    return max(1, Method(**method).lateness) if method else 1


def steps_before_steady(method: Mapping[str, Any] | None, steps: int) -> int:
    """How many of so many steps come before those that count as steady.

    >>> eager = Method.eager(sync_every=30).as_dict()
    >>> steps_before_steady(eager, 100), steps_before_steady(eager, 1000)
    (30, 760)
    """
    last = STEADY_PERIODS * Method(**method).sync_every if method else steps
    return max(warm_up_steps(method), steps - last)


def steady_time(log: Sequence[Event]) -> tuple[float, float]:
    """From when to when all islands of a run were in the steady state."""
    found = steady_loops(log)
    return max(loop.begin for loop in found), min(loop.end for loop in found)


def steady_loops(log: Sequence[Event]) -> list[Loop]:
    """As `loops`, of the steps that count as steady."""
    config = next(event for event in log if event["event"] == "config")
    islands, method = int(config["islands"]), config.get("method")
    return loops(log, islands, skip=steps_before_steady(method, loops(log, islands)[0].steps))


def utilisation(found: Sequence[Loop], reference_step_seconds: Sequence[float]) -> float:
    """The mean over islands.

    >>> utilisation([Loop(begin=0, end=10, steps=8, bytes_sent=0, wait_seconds=0, drain_seconds=0)], [1.0])
    0.8
    """
    each = [loop.steps * alone / loop.wall_seconds for loop, alone in zip(found, reference_step_seconds, strict=True)]
    return statistics.fmean(each)


def share_outside(log: Sequence[Event]) -> float:
    """The share of the steps' own time that was not spent in isles, waiting included."""
    steps = [event for event in log if event["event"] == "step"]
    return 1 - sum(event["engine_seconds"] for event in steps) / sum(event["seconds"] for event in steps)


def between(samples: Sequence[Sample], begin: float, end: float) -> list[Counters]:
    """What each island's interface counted from one time to another: from the last sample before to the first after."""
    times = [when for when, _ in samples]
    first = samples[max(0, bisect_right(times, begin) - 1)][1]
    last = samples[min(len(samples) - 1, bisect_left(times, end))][1]
    return [later - earlier for later, earlier in zip(last, first, strict=True)]


def of_run(log: Sequence[Event], samples: Sequence[Sample], reference: Sequence[float] | None) -> dict[str, Any]:
    """All figures of a run that has ended well."""
    config = next(event for event in log if event["event"] == "config")
    end = next((event for event in reversed(log) if event["event"] == "end"), {})
    found = loops(log, int(config["islands"]))
    steady = steady_loops(log)
    during = between(samples, config["time"], end.get("time", max(loop.end for loop in found)))
    sent = end.get("bytes_sent", sum(loop.bytes_sent for loop in found))
    kernel = sum(each.sent_bytes for each in during)
    wall = statistics.fmean(loop.wall_seconds for loop in found)
    return {
        "method": config["method_name"],
        "parameters": config["parameters"],
        "steps": found[0].steps,
        "val_loss": end.get("val_loss"),
        "val_bits_per_byte": end.get("val_bits_per_byte"),
        "compute_utilization": utilisation(found, reference) if reference else None,
        "steady_utilization": utilisation(steady, reference) if reference else None,
        "reference_step_seconds": statistics.fmean(reference) if reference else None,
        "step_seconds": wall / found[0].steps,
        "wall_seconds": wall,
        "wait_seconds": statistics.fmean(loop.wait_seconds for loop in found),
        "drain_seconds": max(loop.drain_seconds for loop in found),
        "event_log_utilization": share_outside(log),
        "late_seconds_per_step": end.get("late_seconds_per_step"),
        "bytes_sent": sent,
        "bytes_sent_by_island": [loop.bytes_sent for loop in found],
        "kernel_bytes": kernel,
        "kernel_bytes_by_island": [each.sent_bytes for each in during],
        "kernel_bytes_received_by_island": [each.received_bytes for each in during],
        "peak_bits_per_second": peak_rate(samples),
        "kernel_frames": sum(each.sent_frames for each in during),
        "kernel_bytes_per_byte_sent": kernel / sent if sent else None,
        "kernel_bytes_with_start": sum(each.sent_bytes for each in between(samples, 0.0, float("inf"))),
    }


def peak_rate(samples: Sequence[Sample], window_seconds: float = 1.0) -> float | None:
    """The most bits per second that one island sent, over windows of about a second; None if it was shorter."""
    rates = []
    for first, (begin, before) in enumerate(samples):
        later = next(((when, after) for when, after in samples[first + 1 :] if when - begin >= window_seconds), None)
        if later is not None:
            most = max((now - then).sent_bytes for now, then in zip(later[1], before, strict=True))
            rates.append(8 * most / (later[0] - begin))
    return max(rates, default=None)
