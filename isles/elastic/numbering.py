"""The rounds of all fragments as one sequence: round K is the K-th send of the schedule.

Seals form one log, so rounds need one order, whatever fragment they belong to. The schedule sends every fragment once
in each of its periods, in an order that does not change within a stage (a dense start has several stages). Hence K and
(fragment, round) are computed from each other without counting through the schedule.

Results are applied in the order of sends too: at the step of the send in a dense start, `lateness` steps after it later
on. So "all rounds up to K" describes the state of the global model, with any number of fragments in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from isles.core.schedule import Schedule


class Place(NamedTuple):
    """Where a round is in the schedule."""

    fragment: int
    round: int
    """Of this fragment, from 1, as the engine counts them."""
    send_clock: int
    apply_clock: int


class Numbering:
    """Numbers from 1 for the rounds of a schedule.

    >>> numbering = Numbering(Schedule(sync_every=100, offsets=(0, 50), lateness=7))
    >>> numbering.place(1), numbering.place(2)
    (Place(fragment=1, round=1, send_clock=50, apply_clock=57), Place(fragment=0, round=1, send_clock=100, apply_clock=107))
    >>> numbering.number(0, 1), list(numbering.sent_at(100)), list(numbering.applied_at(57)), numbering.last_sent(149)
    (2, [2], [1], 2)
    """  # noqa: E501

    def __init__(self, schedule: Schedule, empty: Iterable[int] = ()) -> None:
        """`empty`: fragments with nothing in them, which are never sent."""
        self.schedule, left_out = schedule, set(empty)
        stages, begin, earlier = [], 0, 0
        for rounds, every in (*schedule.start, (None, schedule.sync_every)):
            sends = [(step, due.fragment) for step in range(1, every + 1) for due in schedule.sends(begin + step)]
            turns = [(step, fragment) for step, fragment in sends if fragment not in left_out]
            lateness = schedule.lateness if rounds is None else 0
            stages.append(_Stage(begin, every, earlier, tuple(turns), lateness))
            begin, earlier = begin + (rounds or 0) * every, earlier + (rounds or 0)
        self._stages = stages
        self._fragments = len(schedule.offsets) - len(left_out)
        clocks = range(begin + schedule.lateness + 1, begin + schedule.lateness + schedule.sync_every + 1)
        self.most_in_flight = max(self.last_sent(clock) - self.last_applied(clock - 1) for clock in clocks)
        """Of all fragments together, after the dense start."""

    def place(self, number: int) -> Place:
        """Fragment, round, and clocks of send and apply of round `number`."""
        assert number >= 1
        period, turn = divmod(number - 1, self._fragments)
        stage = self._stage_of(period)
        step, fragment = stage.turns[turn]
        clock = stage.begin + (period - stage.earlier) * stage.every + step
        return Place(fragment, period + 1, clock, clock + stage.lateness)

    def number(self, fragment: int, round: int) -> int:
        """The inverse of `place`."""
        turns = self._stage_of(round - 1).turns
        return (round - 1) * self._fragments + [each for _, each in turns].index(fragment) + 1

    def sent_at(self, clock: int) -> range:
        """The rounds to send after this step, in order."""
        return range(self.last_sent(clock - 1) + 1, self.last_sent(clock) + 1)

    def applied_at(self, clock: int) -> range:
        """The rounds to apply after this step, after its sends."""
        return range(self.last_applied(clock - 1) + 1, self.last_applied(clock) + 1)

    def last_sent(self, clock: int) -> int:
        """How many rounds have been sent when the clock shows this."""
        stage = next((stage for stage in reversed(self._stages) if clock > stage.begin), self._stages[0])
        periods, steps = divmod(max(0, clock - stage.begin), stage.every)
        turns = bisect_left(stage.turns, (steps + 1,))
        return (stage.earlier + periods) * self._fragments + turns

    def last_applied(self, clock: int) -> int:
        """How many rounds have been applied when the clock shows this."""
        at_once = self.last_sent(min(clock, self._stages[-1].begin))
        return max(at_once, self.last_sent(clock - self.schedule.lateness))

    def clock_after(self, number: int) -> int:
        """The least clock of an island that knows that round `number` is sealed: others have sent it.

        One step less where the next round is sent at the same step: an island that starts here is in time for that.
        """
        return min(self.place(number).send_clock, self.place(number + 1).send_clock - 1) if number else 0

    def _stage_of(self, period: int) -> _Stage:
        return next(stage for stage in reversed(self._stages) if period >= stage.earlier)


@dataclass(frozen=True)
class _Stage:
    """Periods of one length, after step `begin` and `earlier` other periods."""

    begin: int
    every: int
    earlier: int
    turns: tuple[tuple[int, int], ...]
    """(step of the period, fragment), in the order of sends."""
    lateness: int
