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
from isles.plan.simulate import Array, Part, SteadyState, steady_state
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


def predict(
    workload: Workload,
    fleet: Sequence[Island],
    method: Method | None,
    *,
    reduction: Reduction = "auto",
    coding: Coding | None = None,
    bits_per_second: Array | None = None,
) -> Prediction:
    """The steady state of a method, or of data-parallel training (None), on a fleet.

    `coding`: the codec's speed; None: it takes no time. `bits_per_second`: bandwidths to try instead of the links'.

    >>> from isles.plan.fleet import Link, alike
    >>> fleet = alike(2, 0.5, Link.symmetric(100e6))
    >>> work = Workload(name="small", parameters=30_000_000, layers=8, step_seconds=0.5)
    >>> float(predict(work, fleet, None).utilisation.round(2))
    0.05
    """
    bandwidths = np.asarray(slowest_bits_per_second(fleet) if bits_per_second is None else bits_per_second)
    schedule, rounds = rounds_of(workload, len(fleet), method, reduction, coding)
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
    steady = _steady(schedule, parts, fleet, _room(method))
    sent = [
        sum(due.round.num_bytes for due in rounds if due.fragment in _sent(schedule, step))
        for step in _period(schedule)
    ]
    return Prediction(
        utilisation=steady.utilisation,
        step_seconds=steady.period_seconds / schedule.sync_every,
        bytes_per_step=sum(sent) / schedule.sync_every,
        peak_bytes=max(sent),
        exact_to=steady.error_seconds / schedule.sync_every,
    )


@dataclass(frozen=True)
class DueRound:
    """A round that happens once in each period."""

    fragment: int
    round: Round
    ready: float = 0.0


def rounds_of(
    workload: Workload, islands: int, method: Method | None, reduction: Reduction = "auto", coding: Coding | None = None
) -> tuple[Schedule, list[DueRound]]:
    """When things are due, and what they cost."""
    if method is None:
        return Schedule(sync_every=1, offsets=(0,), lateness=0), buckets(workload, islands)
    speed = coding or Coding.free()
    sizes = fragment_sizes(workload, method)
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


def _steady(schedule: Schedule, parts: list[Part], fleet: Sequence[Island], room: int) -> SteadyState:
    step_seconds = [island.step_seconds for island in fleet]
    if len(set(step_seconds)) == 1:
        step_seconds = step_seconds[:1]  # islands that are alike do the same at the same time
    return steady_state(schedule, parts, step_seconds, room)


def _period(schedule: Schedule) -> range:
    return range(schedule.sync_every, 2 * schedule.sync_every)


def _sent(schedule: Schedule, step: int) -> set[int]:
    return {due.fragment for due in schedule.sends(step)}
