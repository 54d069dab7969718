"""A training step with isles against the bare loop, and where the time goes.

Two equal trainings live in one process, one bare and one with isles (H = 100, streaming in e3m0), and take turns in
blocks of a few steps, so that both see the same machine. Blocks end where no fragment is in flight: what another thread
does for isles falls on the steps with isles.

Four readings, from the most exact to the most complete:

    overhead            time between two hooks of the optimizer, one before and one after isles' own, against the rest
                        of the step
    overhead_cpu        the same in CPU time, which does not count what other programs took
    overhead_threads    steps with isles against bare steps, in CPU time, all threads together
    overhead_wall       the same in wall time: everything, and the noise of the machine

The longest stall is that of the step of the period at which isles takes the longest every time: at each of the H steps
the shortest of all periods counts, and of these the longest. What happens only once at a step was caused by another
program.

One island alone exchanges with nobody, so the link is of unlimited speed; it still decodes its own payload, in the
training loop, where with two islands another thread does it (see `isles.bench.islands`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import isles
from isles.bench.clock import Marks
from isles.bench.training import Training
from isles.view import units
from isles.wire.world import World

LAYERS = 24


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much to train."""

    parameters: int
    rows: int
    """In a batch: decides how long a bare step takes."""
    periods: int
    """Of H steps with isles."""
    bare_steps: int
    """Bare steps between two blocks of about H/10 steps with isles."""
    outer_device: str | None = None
    """Where the outer state is kept; on a CPU, "cpu" copies as from and to a GPU, at the speed of memory."""


@dataclass
class Timings:
    """Seconds of every step."""

    bare: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """With isles, in whole."""
    inside: list[float] = field(default_factory=list)
    """In isles."""
    steps_cpu: list[float] = field(default_factory=list)
    """CPU time of the training thread."""
    inside_cpu: list[float] = field(default_factory=list)
    bare_threads: list[float] = field(default_factory=list)
    """CPU time of all threads."""
    steps_threads: list[float] = field(default_factory=list)


def measure(load: Load, sync_every: int = 100, world: World | None = None) -> dict[str, Any]:
    """The cost of isles in a training step."""
    bare, ours = Training(load.parameters, LAYERS, load.rows), Training(load.parameters, LAYERS, load.rows)
    bare.step()
    ours.step()  # the first step allocates
    world = isles.LocalWorld.alone() if world is None else world
    method = isles.Method.streaming(sync_every=sync_every)
    before = Marks(ours.optimizer)
    timings, block = Timings(), max(1, sync_every // 10)
    with isles.DiLoCo(ours.model, ours.optimizer, method, world=world, outer_device=load.outer_device) as diloco:
        after = Marks(ours.optimizer)
        since = 0
        for _ in range(load.periods * sync_every):
            _timed_step(ours, before, after, timings)
            since += 1
            if since >= block and diloco.stats.sends == diloco.stats.applies:
                since = 0
                for _ in range(load.bare_steps):
                    begin, begin_threads = time.perf_counter(), time.process_time()
                    bare.step()
                    timings.bare.append(time.perf_counter() - begin)
                    timings.bare_threads.append(time.process_time() - begin_threads)
        waited = diloco.stats.wait_seconds
        fragments = len(diloco.fragments)
        before.remove()
        after.remove()
    about = {"parameters": ours.parameters, "rows": load.rows, "outer_device": load.outer_device}
    about |= {"fragments": fragments, "sync_every": sync_every}
    return {**about, **summary(timings, sync_every), "wait_share": waited / sum(timings.steps)}


def summary(timings: Timings, sync_every: int) -> dict[str, float]:
    """The readings described above.

    >>> inside = [0.0, 0.5, 0.0, 0.3]
    >>> seconds = Timings([1.0] * 2, [1.0, 1.5, 1.0, 1.3], inside, [1.0] * 4, [0.0] * 4, [1.0] * 2, [1.0] * 4)
    >>> values = summary(seconds, 2)
    >>> round(values["overhead"], 3), round(values["overhead_wall"], 3), round(values["longest_step"], 3)
    (0.2, 0.2, 1.3)
    """
    alone = [whole - inside for whole, inside in zip(timings.steps, timings.inside, strict=True)]
    bare = statistics.median(timings.bare)
    positions = [timings.inside[first::sync_every] for first in range(sync_every)]
    stall = max(min(seconds) for seconds in positions)
    spent_cpu = sum(timings.inside_cpu)
    return {
        "bare_seconds": bare,
        "isles_seconds": statistics.fmean(timings.inside),
        "stall_seconds": stall,
        "overhead": sum(timings.inside) / sum(alone),
        "overhead_cpu": spent_cpu / (sum(timings.steps_cpu) - spent_cpu),
        "overhead_threads": statistics.fmean(timings.steps_threads) / statistics.fmean(timings.bare_threads) - 1,
        "overhead_wall": statistics.fmean(timings.steps) / statistics.fmean(timings.bare) - 1,
        "longest_step": (bare + stall) / bare,
        "longest_step_seen": max(timings.steps) / statistics.median(timings.steps),
        "longest_bare_step_seen": max(timings.bare) / bare,
    }


def label(row: Mapping[str, Any]) -> str:
    """Which training a row is about.

    >>> label({"parameters": 9_830_400, "outer_device": "cpu"})
    '9.83M, outer state on the host'
    """
    return units.count(row["parameters"]) + (", outer state on the host" if row["outer_device"] else "")


def phases(parameters: int, sync_every: int = 100) -> dict[str, float]:
    """Which part of isles' time goes into which of its profiler ranges; "rest" is in none of them."""
    training = Training(parameters, LAYERS, rows=1)
    training.step()
    before, timings = Marks(training.optimizer), Timings()
    method = isles.Method.streaming(sync_every=sync_every)
    with isles.DiLoCo(training.model, training.optimizer, method, world=isles.LocalWorld.alone()) as diloco:
        after = Marks(training.optimizer)
        for _ in range(sync_every):
            training.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(sync_every):
                _timed_step(training, before, after, timings)
        diloco.finish()
    total = sum(timings.inside)
    shares: dict[str, float] = {}
    for event in profile.events():
        if event.name.startswith("isles."):
            share = event.cpu_time_total / 1e6 / total
            shares[event.name] = shares.get(event.name, 0.0) + share
            if event.cpu_parent is not None and event.cpu_parent.name in shares:  # one range in the other
                shares[event.cpu_parent.name] -= share
    return {**shares, "rest": max(0.0, 1 - sum(shares.values()))}


def _timed_step(training: Training, before: Marks, after: Marks, timings: Timings) -> None:
    begin, begin_cpu, begin_threads = time.perf_counter(), time.thread_time(), time.process_time()
    training.step()
    timings.steps.append(time.perf_counter() - begin)
    timings.steps_cpu.append(time.thread_time() - begin_cpu)
    timings.steps_threads.append(time.process_time() - begin_threads)
    timings.inside.append(after.seconds - before.seconds)
    timings.inside_cpu.append(after.cpu_seconds - before.cpu_seconds)
