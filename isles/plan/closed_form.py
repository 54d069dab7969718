"""The length of a period by formula, where there is one. The tests compare every formula with the simulator.

Whole fragments at step ends (isles as it is), all islands alike, T the time of a step, and for fragment p: e_p to
encode, a_p to apply, s_p from agreement to decoding, with room for one part on its way at a time:

    lateness 0 (DiLoCo, streaming)      H T + sum (e_p + s_p + a_p)               everybody waits for everything
    lateness tau, one in flight         H T + sum (e_p + a_p + max(0, s_p - tau T))
    lateness k H (delayed, eager)       max(H T + sum (e_p + a_p), sum s_p)       compute and link work side by side

With s_p the link's time alone the last one is the best that any schedule can do: the larger of what the island and what
the link has to do. With several fragments in flight and less than a round of slack there is no formula here; simulate.

The papers' layers (see `anatomy`), s = time of one layer on the link, L layers, the whole model at once: gradients
come last layer first, and the first layer is needed first, so the next step starts when the link is done with
everything. What keeps it is the last thing queued, or something queued earlier and all that piled up behind it; since
gradients come at even distances but for the last, only three can be the one:

    data-parallel    max(T + s,  r_1 T + 2 s,  r_(L-1) T + L s)    r_l: where in the step layer l's gradient is there
    DiLoCo           (H - 1) T + the same
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isles.core.schedule import Schedule
from isles.plan.anatomy import backward_end
from isles.plan.simulate import Array, Part, Seconds


def whole_model(sync_every: int, layers: int, step_seconds: float, layer_seconds: Seconds) -> Array:
    """The papers' data-parallel (sync_every 1) and DiLoCo.

    >>> float(whole_model(1, 10, 1.0, 0.2))
    2.4037037037037035
    """
    period = np.asarray(step_seconds + layer_seconds)
    for layer in {1, layers - 1} - {0, layers}:
        period = np.maximum(period, backward_end(layer, layers) * step_seconds + (layer + 1) * layer_seconds)
    return (sync_every - 1) * step_seconds + period


def whole_fragments(schedule: Schedule, parts: Sequence[Part], step_seconds: float) -> Array | None:
    """One part per fragment, at step ends, all islands alike, room for one: the period, [..., 1]; None if no formula
    applies.
    """
    if any(part.ready or part.needed for part in parts):
        return None
    loop = schedule.sync_every * step_seconds + sum(_loop_seconds(part) for part in parts)
    link = [_way_seconds(part) for part in parts]
    if schedule.lateness >= schedule.sync_every:
        return np.asarray(np.maximum(loop, sum(link)))
    if _shortest_gap(schedule) > schedule.lateness:
        return np.asarray(loop + sum(np.maximum(0, seconds - schedule.lateness * step_seconds) for seconds in link))
    return None


def least_period(schedule: Schedule, parts: Sequence[Part], step_seconds: float) -> Array:
    """What no schedule can beat: the largest of what an island, its link, and its background threads have to do. At a
    utilisation of one this is the average rate: bits of a period over the time of a period.
    """
    loop = schedule.sync_every * step_seconds + sum(_loop_seconds(part) for part in parts)
    link, decode = (
        sum(np.asarray(seconds) for seconds in column)
        for column in zip(*((part.link_seconds, part.decode_seconds) for part in parts), strict=True)
    )
    return np.asarray(np.maximum(np.maximum(loop, link), decode))


def _loop_seconds(part: Part) -> Array:
    return np.asarray(part.encode_seconds) + np.asarray(part.apply_seconds)


def _way_seconds(part: Part) -> Array:
    on_the_way = part.agree_seconds, part.link_seconds, part.delay_seconds, part.decode_seconds
    return np.asarray(sum(np.asarray(seconds) for seconds in on_the_way))


def _shortest_gap(schedule: Schedule) -> int:
    """Steps between two sends, at least; 0 if two fragments are sent after the same step."""
    steps = sorted(schedule.offsets)
    return min(
        after - before for before, after in zip(steps, [*steps[1:], steps[0] + schedule.sync_every], strict=True)
    )
