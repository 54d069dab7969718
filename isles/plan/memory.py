"""What each method keeps in memory, counted as the papers count it: weights and state that lives as long as the run.

In fp32, per parameter, all ranks of an island together:

    data-parallel      weights and two moments of Adam                                          3 x 4 bytes
    isles              + anchor + outer momentum                                                5 x 4 bytes
    outer state in host memory: on the device only the fragment that is being applied           3 x 4 bytes + a little
    eager              + the own outer gradient, encoded, for each round in flight (host)

Gradients, activations and working memory are not counted; the first two do not depend on the method. In host memory
are the payload and the mean (fp32) of every round in flight. With `update="delayed"` or "eager" that is the whole
model.
"""

from __future__ import annotations

from dataclasses import dataclass

from isles.core.schedule import Schedule

WEIGHTS_AND_ADAM, OUTER_STATE = 3 * 4, 2 * 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one island."""

    device_bytes: float
    host_bytes: float


def data_parallel(parameters: int) -> Memory:
    """The baseline."""
    return Memory(WEIGHTS_AND_ADAM * parameters, 0)


def of_fragments(
    schedule: Schedule, sizes: tuple[int, ...], payload_bytes: tuple[float, ...], *, on_host: bool = False
) -> Memory:
    """`sizes` in parameters. `on_host`: anchor and momentum live in host memory.

    >>> half = Memory(12 * 100 + 8 * 50, 8 * 100 + 50 * 4 + 26)
    >>> of_fragments(Schedule(10, (0, 5), 1), (50, 50), (26, 26), on_host=True) == half
    True
    """
    parameters = sum(sizes)
    in_flight = max(
        sum(4 * sizes[fragment] + payload_bytes[fragment] for fragment in _in_flight(schedule, step))
        for step in range(schedule.sync_every)
    )
    if on_host:
        device = WEIGHTS_AND_ADAM * parameters + OUTER_STATE * max(sizes)
        return Memory(device, OUTER_STATE * parameters + in_flight)
    return Memory((WEIGHTS_AND_ADAM + OUTER_STATE) * parameters, in_flight)


def _in_flight(schedule: Schedule, step: int) -> list[int]:
    """Fragments between sending and applying just after a step's sends; one entry per round."""
    found = []
    for fragment, offset in enumerate(schedule.offsets):
        age = (step - offset) % schedule.sync_every  # of its newest round
        found += [fragment] * len(range(age, schedule.lateness + 1, schedule.sync_every))
    return found
