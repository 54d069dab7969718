"""isles as it is, put into the simulator: exact payloads, real messages, whole fragments, coding that takes time.

After an inner step the engine sends the fragments that are due, then applies those that are due (waiting stops the
loop). So a fragment is queued at the end of one step and waited for at the end of
another, `lateness` steps later: with overlap 0 that is at once.

Data-parallel training is torch's DistributedDataParallel: gradients are collected into buckets (the first of 1 MiB,
the others of 25 MiB) in the order in which the backward pass makes them, a bucket is queued when it is full, and
the optimizer waits for all of them at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isles.core.schedule import Schedule
from isles.plan.anatomy import backward_end
from isles.plan.coding import Coding
from isles.plan.exchange import GRADIENT_BYTES, Round, fragment_round, gradient_round
from isles.plan.fleet import Island, longest_latency_seconds, slowest_bits_per_second
from isles.plan.simulate import Array, Part, run, steady_state
from isles.plan.workload import Workload, fragment_sizes

if TYPE_CHECKING:
    from isles.core.method import Method
    from isles.wire.reduction import Reduction

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
GLOO_THREADS = 2
"""All-reduces that torch has under way at a time."""


@dataclass(frozen=True)
class Prediction:
    """What a method will do on these links."""

    utilisation: Array
    """Compute time over total time, on average over islands; one for each bandwidth that was asked for."""
    step_seconds: Array
    """Time of a step, communication included, on average over a period."""
    bytes_per_step: float
    """Sent by one island, on average over a period; as much is received."""
    peak_bytes: int
    """The most that one island sends after one step."""
    exact_to: Array
    """How far the bounds on `step_seconds` are apart."""
    start: DenseStart

    def seconds(self, steps: int) -> Array:
        """Of a run of so many steps."""
        return self._total(steps, self.start.seconds, self.step_seconds)

    def bytes_sent(self, steps: int) -> float:
        """By one island in a run of so many steps, without the closing round."""
        return float(self._total(steps, np.asarray(self.start.num_bytes), np.asarray(self.bytes_per_step)))

    def _total(self, steps: int, in_start: Array, per_step: Array) -> Array:
        share = min(1.0, steps / self.start.steps) if self.start.steps else 0.0
        return np.asarray(share * in_start + max(0, steps - self.start.steps) * per_step)


@dataclass(frozen=True)
class DenseStart:
    """What the first steps of a run are, if they have a period of their own; it does not enter the steady state."""

    steps: int
    seconds: Array
    """They take so long, on the slowest island; one for each bandwidth that was asked for."""
    num_bytes: int
    """Sent by one island in all of them."""
    peak_bytes: int
    """The most that one island sends after one of them."""


def predict(
    workload: Workload,
    fleet: Sequence[Island],
    method: Method | None,
    *,
    reduction: Reduction = "auto",
    coding: Coding | None = None,
    bits_per_second: Array | None = None,
    fragments: Sequence[int] | None = None,
) -> Prediction:
    """The steady state of a method, or of data-parallel training (None), on a fleet.

    `coding`: the codec's speed; None: it takes no time. `bits_per_second`: bandwidths to try instead of the links'.
    `fragments`: parameters of each fragment, where the cut is known; None: as the engine would cut the workload.

    >>> from isles.plan.fleet import Link, alike
    >>> fleet = alike(2, 0.5, Link.symmetric(100e6))
    >>> work = Workload(name="small", parameters=30_000_000, layers=8, step_seconds=0.5)
    >>> float(predict(work, fleet, None).utilisation.round(2))
    0.05
    """
    bandwidths = np.asarray(slowest_bits_per_second(fleet) if bits_per_second is None else bits_per_second)
    schedule, rounds = rounds_of(workload, len(fleet), method, reduction, coding, fragments)
    latency = longest_latency_seconds(fleet)
    parts = [
        Part(
            fragment=due.fragment,
            ready=due.ready,
            link_seconds=np.asarray(due.round.link_seconds(bandwidths))[..., None],
            agree_seconds=due.round.agree_seconds + due.round.agree_hops * latency,
            delay_seconds=due.round.hops * latency,
            encode_seconds=due.round.encode_seconds,
            before_seconds=due.round.before_seconds,
            decode_seconds=due.round.talk_seconds,
            after_seconds=due.round.after_seconds,
            apply_seconds=due.round.apply_seconds,
        )
        for due in rounds
    ]
    length, pace = schedule.sync_every, [island.step_seconds for island in fleet]
    if len(set(pace)) == 1:
        pace = pace[:1]  # islands that are alike do the same at the same time
    steady = steady_state(schedule.steady, parts, pace, _room(method))
    sent = _bytes_after(schedule, rounds, range(schedule.start_steps + 1, schedule.start_steps + length + 1))
    start = range(1, schedule.start_steps + 1)
    dense = _bytes_after(schedule, rounds, start)
    return Prediction(
        utilisation=steady.utilisation,
        step_seconds=steady.period_seconds / length,
        bytes_per_step=sum(sent) / length,
        peak_bytes=max(sent),
        exact_to=steady.error_seconds / length,
        start=DenseStart(
            steps=len(start),
            seconds=run(schedule, parts, pace, len(start), _room(method)).max(axis=-1),
            num_bytes=sum(dense),
            peak_bytes=max(dense, default=0),
        ),
    )


@dataclass(frozen=True)
class DueRound:
    """A round that happens once in each period."""

    fragment: int
    round: Round
    ready: float = 0.0


def rounds_of(
    workload: Workload,
    islands: int,
    method: Method | None,
    reduction: Reduction = "auto",
    coding: Coding | None = None,
    fragments: Sequence[int] | None = None,
) -> tuple[Schedule, list[DueRound]]:
    """When things are due, and what they cost."""
    if method is None:
        return Schedule(sync_every=1, offsets=(0,), lateness=0), buckets(workload, islands)
    speed = coding or Coding.free()
    sizes = fragments or fragment_sizes(workload, method)
    return Schedule.of(method, len(sizes)), [
        DueRound(
            index,
            fragment_round(
                numel,
                method.codec,
                islands,
                ranks=workload.ranks,
                reduction=reduction,
                update=method.update,
                coding=speed,
            ),
        )
        for index, numel in enumerate(sizes)
    ]


def buckets(workload: Workload, islands: int) -> list[DueRound]:
    """The all-reduces of one data-parallel step. What is outside the layers (embeddings) has its gradient last."""
    layers = workload.layer_parameters()
    gradients = [(backward_end(layer, len(layers)), layers[layer]) for layer in reversed(range(len(layers)))]
    gradients.append((1.0, workload.outside_parameters))
    found: list[DueRound] = []
    waiting, limit = 0, FIRST_BUCKET_BYTES
    for position, (when, numel) in enumerate(gradients, start=1):
        waiting += numel
        if waiting and (waiting * GRADIENT_BYTES >= limit or position == len(gradients)):
            found.append(DueRound(0, gradient_round(waiting, islands), ready=when - 1))
            waiting, limit = 0, BUCKET_BYTES
    return found


def _room(method: Method | None) -> int:
    """How many exchanges may be under way at a time."""
    from isles.wire.reduction import MAX_IN_FLIGHT

    return GLOO_THREADS if method is None else MAX_IN_FLIGHT


def _bytes_after(schedule: Schedule, rounds: Sequence[DueRound], steps: range) -> list[int]:
    """What one island sends after each of these steps."""
    sizes: dict[int, int] = {}
    for due in rounds:
        sizes[due.fragment] = sizes.get(due.fragment, 0) + due.round.num_bytes
    return [sum(sizes.get(due.fragment, 0) for due in schedule.sends(step)) for step in steps]
