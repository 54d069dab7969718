"""When each fragment is sent, and when its result is applied: a pure function of the step.

Fragment p of P has an offset t_p in its period of H = `sync_every` steps. With steps counted from 1:

    sent     at every step t with (t - t_p) mod H = 0
    applied  `lateness` steps after it was sent: overlap (tau) for fresh updates, k periods for delayed and eager ones

A fragment with offset 0 is first sent at step H, one with offset t_p > 0 already at step t_p: a short first round. The
rounds of a fragment are numbered from 1. A delayed or eager outer step happens at *every* send; in the first k rounds
the mean that it would use does not exist yet, which shows as an apply of round 0 or below.

A dense start puts stages with shorter periods before that. Each is a schedule of its own for so many rounds, with h
for H and offsets floor(t_p * h / H), in which every round is applied at the step at which it is sent, whatever the
method. After it all begins as at step 0.

All islands run the same schedule, hence start the same exchanges in the same order: nothing can deadlock, however many
fragments are in flight.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from isles.core.method import Method


class Due(NamedTuple):
    """One thing to do after an inner step: send, or apply, this round of this fragment."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Schedule:
    """What is due after each step.

    >>> schedule = Schedule(sync_every=100, offsets=(0, 50), lateness=1)
    >>> schedule.sends(50), schedule.applies(51), schedule.sends(100)
    ((Due(fragment=1, round=1),), (Due(fragment=1, round=1),), (Due(fragment=0, round=1),))
    >>> dense = Schedule(sync_every=100, offsets=(0, 50), lateness=1, start=((5, 10),))
    >>> dense.sends(5), dense.sends(50), dense.sends(100), dense.start_steps
    ((Due(fragment=1, round=1),), (Due(fragment=0, round=5),), (Due(fragment=1, round=6),), 50)
    """

    sync_every: int
    offsets: tuple[int, ...]
    lateness: int
    start: tuple[tuple[int, int], ...] = ()
    """The stages of a dense start: rounds, and steps of each."""

    @classmethod
    def of(cls, method: Method, fragments: int) -> Schedule:
        """The schedule of a method for a model cut into this many fragments."""
        method.check_offset_count(fragments)
        even = tuple(p * method.sync_every // fragments for p in range(fragments))
        offsets = even if method.offsets is None else tuple(method.offsets)
        return cls(method.sync_every, offsets, method.lateness, tuple(method.dense_start))

    def sends(self, step: int) -> tuple[Due, ...]:
        """The rounds to send after this step, in the order in which every island sends them."""
        steady = self._steady
        return (steady if step > steady.begin else self._dense(step)).sends(step)

    def applies(self, step: int) -> tuple[Due, ...]:
        """The rounds whose results are to be applied after this step (after this step's sends)."""
        steady = self._steady
        if step <= steady.begin:
            return self.sends(step)
        late_by_rounds, overlap = divmod(self.lateness, self.sync_every)
        sent = steady.sends(step - overlap)
        return tuple([Due(p, number - late_by_rounds) for p, number in sent]) if late_by_rounds else sent

    @property
    def start_steps(self) -> int:
        """Where the dense start ends."""
        return self._steady.begin

    @property
    def steady(self) -> Schedule:
        """The same without a dense start."""
        return replace(self, start=())

    def _dense(self, step: int) -> _Stage:
        """The stage of the dense start that a step is in."""
        return next((stage for stage in reversed(self._stages) if step > stage.begin), self._stages[0])

    @functools.cached_property
    def _steady(self) -> _Stage:
        return self._stages[-1]

    @functools.cached_property
    def _stages(self) -> list[_Stage]:
        """The dense start, and the ordinary schedule, which has no end."""
        stages, begin, number = [], 0, 0
        for rounds, every in self.start:
            offsets = tuple(offset * every // self.sync_every for offset in self.offsets)
            stages.append(_Stage(every, offsets, begin, number))
            begin, number = begin + rounds * every, number + rounds
        return [*stages, _Stage(self.sync_every, self.offsets, begin, number)]


@dataclass(frozen=True)
class _Stage:
    """Periods of one length, after step `begin` and so many earlier rounds."""

    every: int
    offsets: tuple[int, ...]
    begin: int
    earlier_rounds: int

    def sends(self, step: int) -> tuple[Due, ...]:
        periods, place = divmod(step - self.begin, self.every)
        if step <= self.begin or place not in self._turns:
            return ()
        number = self.earlier_rounds + periods + (1 if place > 0 else 0)
        return tuple([Due(fragment, number) for fragment in self._turns[place]])

    @functools.cached_property
    def _turns(self) -> dict[int, list[int]]:
        """The fragments that have their turn at each place of the period: most steps have nothing to do."""
        turns: dict[int, list[int]] = {}
        for fragment, offset in enumerate(self.offsets):
            turns.setdefault(offset, []).append(fragment)
        return turns
