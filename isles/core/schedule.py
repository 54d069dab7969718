"""When each fragment is sent, and when its result is applied: a pure function of the step.

Fragment p of P has an offset t_p in its period of H = `sync_every` steps. With steps counted from 1:

    sent     at every step t with (t - t_p) mod H = 0
    applied  `lateness` steps after it was sent: overlap (tau) for fresh updates, k periods for delayed and eager ones

A fragment with offset 0 is first sent at step H, one with offset t_p > 0 already at step t_p: a short first round. The
rounds of a fragment are numbered from 1. A delayed or eager outer step happens at *every* send; in the first k rounds
the mean that it would use does not exist yet, which shows as an apply of round 0 or below.

All islands run the same schedule, hence start the same exchanges in the same order: nothing can deadlock, however many
fragments are in flight.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
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
    """

    sync_every: int
    offsets: tuple[int, ...]
    lateness: int

    @classmethod
    def of(cls, method: Method, fragments: int) -> Schedule:
        """The schedule of a method for a model cut into this many fragments."""
        method.check_offset_count(fragments)
        even = tuple(p * method.sync_every // fragments for p in range(fragments))
        offsets = even if method.offsets is None else tuple(method.offsets)
        return cls(sync_every=method.sync_every, offsets=offsets, lateness=method.lateness)

    def sends(self, step: int) -> tuple[Due, ...]:
        """The rounds to send after this step, in the order in which every island sends them."""
        turns = self._turns.get(step % self.sync_every) if step > 0 else None
        return () if turns is None else tuple([Due(p, self._round(p, step)) for p in turns])

    @functools.cached_property
    def _turns(self) -> dict[int, list[int]]:
        """The fragments that have their turn at each place of the period: most steps have nothing to do."""
        turns: dict[int, list[int]] = {}
        for fragment, offset in enumerate(self.offsets):
            turns.setdefault(offset % self.sync_every, []).append(fragment)
        return turns

    def applies(self, step: int) -> tuple[Due, ...]:
        """The rounds whose results are to be applied after this step (after this step's sends)."""
        late_by_rounds, overlap = divmod(self.lateness, self.sync_every)
        sent = self.sends(step - overlap)
        return tuple([Due(p, number - late_by_rounds) for p, number in sent]) if late_by_rounds else sent

    def _round(self, fragment: int, step: int) -> int:
        offset = self.offsets[fragment]
        return (step - offset) // self.sync_every + (1 if offset > 0 else 0)
