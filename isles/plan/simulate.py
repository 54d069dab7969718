"""The simulator: islands that compute, and one queue of reductions to the link.

An island computes along a line. Positions on it are counted in steps: 3.0 is the end of the third step. At some
positions it *queues* a part of the model for reduction, at others it *waits* until the result of an earlier one is
there. Which fragment is due after which step is decided by `isles.core.schedule.Schedule`, the same object that drives
the engine. A `Part` is what one reduction carries: a fragment (isles), a layer (the papers), a bucket (data-parallel).
For the time t at which things happen on island m:

    queue   t_m += encode                            in the training loop
            ready_m = max(t_m, ready_m) + before     in the background, one part after the other
            agreed = max(agreed, max over islands of max(ready_m, done_m of the one so many before)) + agree
                                                     everybody must be there, and there must be room
            free = max(agreed, free) + link          first in, first out
            done_m = max(free + delay, done_m) + decode_m        what holds up the exchange, but not the link
            there_m = max(done_m, there_m) + after   in the background, after the exchange
    wait    t_m = max(t_m, there_m of that round) + apply

`room` is how many parts may be in flight at a time, until they are done. While one of them is held up, the link
carries the next one; with room for one it stands still instead.

Only maxima and sums: a max-plus linear system, with one more round in each period of H steps. Such a system settles
into a rhythm, and the length of a period in that rhythm has bounds that are true at *any* state: over one period no
time can fall behind the rhythm for ever nor outrun it, so

    smallest growth of any time in the state  <=  period  <=  largest growth of any time in the state

and of course period >= what one island computes, and >= what the link has to carry. The simulation goes on until
the bounds meet: then the answer is not an average over a long run but exact. A run that starts from nothing and
stops after some steps is simulated by `run`.

Times are arrays whose last axis is the islands; axes before it (bandwidths) are simulated all at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from isles.core.schedule import Schedule

Array: TypeAlias = NDArray[np.float64]
Seconds: TypeAlias = "float | Array"

MOST_PERIODS = 2000
TOLERANCE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one reduction carries. Seconds may be arrays that broadcast against [..., islands]."""

    fragment: int
    link_seconds: Seconds
    ready: float = 0.0
    """Where it is queued, in steps from the *end* of the step after which its fragment is sent: 0, or less if its
    gradient is complete before the step is."""
    needed: float = 0.0
    """Where it is waited for, in steps from the end of the step after which its fragment is applied: 0 or more."""
    encode_seconds: Seconds = 0.0
    before_seconds: Seconds = 0.0
    agree_seconds: Seconds = 0.0
    delay_seconds: Seconds = 0.0
    decode_seconds: Seconds = 0.0
    after_seconds: Seconds = 0.0
    apply_seconds: Seconds = 0.0


@dataclass(frozen=True)
class SteadyState:
    """The rhythm into which the islands settle."""

    period_seconds: Array
    """[...]: time of `sync_every` steps."""
    error_seconds: Array
    """[...]: how far the bounds on it are apart; next to nothing unless the simulation gave up."""
    compute_seconds: Array
    """[islands]: what of the period each island computes."""

    @property
    def utilisation(self) -> Array:
        """[...]: compute time over total time, on average over islands."""
        shares = np.mean(self.compute_seconds / self.period_seconds[..., None], axis=-1)
        return np.asarray(np.minimum(shares, 1.0))  # never above one, not even by a rounding error


class Action(NamedTuple):
    """One thing that happens on the line; the order of the fields is the order in which things happen."""

    position: float
    is_wait: bool
    part: int


def actions(schedule: Schedule, parts: Sequence[Part], steps: int) -> list[Action]:
    """What happens in the first so many steps of a run, in order; at the same position first what is queued.

    >>> one = Part(fragment=0, link_seconds=1.0)
    >>> [(action.position, action.is_wait) for action in actions(Schedule(2, (0,), 1), [one], 5)]
    [(2.0, False), (3.0, True), (4.0, False), (5.0, True)]
    """
    of_fragment: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        of_fragment.setdefault(part.fragment, []).append(index)
    found = []
    for step in range(1, steps + 1):
        for due in schedule.sends(step):
            for index in of_fragment.get(due.fragment, ()):
                found.append((step + parts[index].ready, False, index))
        for due in schedule.applies(step):
            if due.round >= 1:  # in the first rounds of a delayed method there is nothing to wait for yet
                for index in of_fragment.get(due.fragment, ()):
                    found.append((step + parts[index].needed, True, index))
    rounded = [Action(round(position, 9), is_wait, index) for position, is_wait, index in found]
    return sorted(rounded, key=lambda action: action[:2])  # stable: parts stay in their order


def steady_state(
    schedule: Schedule, parts: Sequence[Part], step_seconds: Sequence[float], room: int = 1
) -> SteadyState:
    """The length of a period when the run has gone on for long. `step_seconds`: one per island.

    >>> late = Part(fragment=0, link_seconds=np.array([[0.5], [7.0]]))
    >>> steady_state(Schedule(4, (0,), 2), [late], [1.0]).period_seconds
    array([4., 9.])
    """
    assert parts, "without parts there is nothing that islands could wait for"
    length = schedule.sync_every
    before = schedule.lateness // length + 2  # periods after which every wait has something to wait for
    everything = actions(schedule, parts, (before + 2) * length)  # one more: a part may be needed in the step after
    period = [action for action in everything if before * length < action.position <= (before + 1) * length]
    in_flight = [0] * len(parts)
    for action in everything:
        if action.position <= before * length:
            in_flight[action.part] += -1 if action.is_wait else 1
    islands = _Islands(parts, step_seconds, in_flight, room)
    compute = length * islands.step_seconds
    at_least = islands.least_period(compute)
    low, high = at_least, np.full_like(at_least, np.inf)
    first = previous = islands.times()
    for _ in range(MOST_PERIODS):
        islands.go(period, before * length, (before + 1) * length)
        times = islands.times()
        growth = times - previous
        low = np.maximum(low, growth.min(axis=(0, -1)))
        high = np.minimum(high, growth.max(axis=(0, -1)))
        if np.all(high - low <= TOLERANCE * high):
            break
        previous = times
    else:
        average = (times - first).max(axis=(0, -1)) / MOST_PERIODS
        high, low = np.clip(average, low, high), np.minimum(low, average)
    return SteadyState(high, high - low, compute)


def run(schedule: Schedule, parts: Sequence[Part], step_seconds: Sequence[float], steps: int, room: int = 1) -> Array:
    """[..., islands]: when each island is done with so many steps, starting with nothing in flight.

    What is still in flight at the end is not waited for.

    >>> run(Schedule(2, (0,), 0), [Part(fragment=0, link_seconds=0.5)], [1.0, 1.5], 4)
    array([7., 7.])
    """
    islands = _Islands(parts, step_seconds, [0] * len(parts), room)
    todo = [action for action in actions(schedule, parts, steps) if action.position <= steps]
    islands.go(todo, 0, steps)
    return islands.clock


class _Islands:
    """The state: the time on every island, when its background threads are free, and when each round in flight is
    there.
    """

    def __init__(
        self, parts: Sequence[Part], step_seconds: Sequence[float], in_flight: Sequence[int], room: int
    ) -> None:
        self.step_seconds = np.asarray(step_seconds, dtype=np.float64)
        self._costs = [_Costs.of(part) for part in parts]
        shape = np.broadcast_shapes(self.step_seconds.shape, *(cost.shape for costs in self._costs for cost in costs))
        self.clock, self.ready, self.agreed, self.free, self.there = np.zeros((5, *shape))
        self.done = deque(np.zeros((room, *shape)))
        self.arrivals = [deque(np.zeros((count, *shape))) for count in in_flight]

    def go(self, todo: Iterable[Action], position: float, end: float) -> None:
        """Moves every island from one position to another."""
        clock, ready, agreed, free, there = self.clock, self.ready, self.agreed, self.free, self.there
        done = self.done
        for action in todo:
            costs = self._costs[action.part]
            if action.position > position:
                clock = clock + (action.position - position) * self.step_seconds
                position = action.position
            if action.is_wait:
                clock = np.maximum(clock, self.arrivals[action.part].popleft()) + costs.apply
            else:
                clock = clock + costs.encode
                ready = np.maximum(clock, ready) + costs.before
                last = done[-1]
                begin = np.maximum(ready, done.popleft()).max(axis=-1, keepdims=True)
                agreed = (np.maximum(agreed, begin) + costs.agree).max(axis=-1, keepdims=True)
                free = np.maximum(agreed, free) + costs.link
                done.append(np.maximum(free + costs.delay, last) + costs.decode)
                there = np.maximum(done[-1], there) + costs.after
                self.arrivals[action.part].append(there)
        self.clock = clock + (end - position) * self.step_seconds
        self.ready, self.agreed, self.free, self.there = ready, agreed, free, there

    def times(self) -> Array:
        """[times, ..., islands]: everything that what comes next depends on."""
        own = self.clock, self.ready, self.agreed, self.free, self.there
        times = [*own, *self.done, *(time for queue in self.arrivals for time in queue)]
        return np.stack(np.broadcast_arrays(*times))

    def least_period(self, compute: Array) -> Array:
        """[...]: no period is shorter than what an island computes, nor than its work in the background."""
        encode, before, agree, link, delay, decode, after, apply = (
            sum(costs) for costs in zip(*self._costs, strict=True)
        )
        on_the_way = (agree + link + delay + decode) / len(self.done)
        longest = np.stack(
            np.broadcast_arrays(compute + encode + apply, before, agree, link, decode, on_the_way, after)
        )
        return np.asarray(longest.max(axis=(0, -1)))


class _Costs(NamedTuple):
    """Seconds of a part, in the order in which it meets them."""

    encode: Array
    before: Array
    agree: Array
    link: Array
    delay: Array
    decode: Array
    after: Array
    apply: Array

    @classmethod
    def of(cls, part: Part) -> _Costs:
        return cls(*(np.asarray(getattr(part, f"{name}_seconds"), dtype=np.float64) for name in cls._fields))
