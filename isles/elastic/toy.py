"""A model of one integer per fragment: what simulated islands train.

Its arithmetic is exact, so that what was learned can be compared, to the last unit, with what was counted and with what
an island still holds. It does what the engine does (`isles.core.rounds`), with an apply that loses nothing: an island
keeps what it has learned since it sent.

    send      delta  = anchor - theta - (deltas of this fragment that are in flight)
    apply     anchor, velocity = outer_step(anchor, velocity, contributions)
              theta += anchor_new - anchor_old, and + delta if it was counted
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isles.elastic.numbering import Numbering
from isles.elastic.objects import CLOSING_FORM, FORM
from isles.wire.message import HEADER_BYTES, Header

Weighted = tuple[float, int]
NUMBER = struct.Struct("<q")


@dataclass(frozen=True)
class State:
    """Anchors and velocities, by fragment: what all islands share."""

    anchors: tuple[int, ...]
    velocities: tuple[int, ...]

    @classmethod
    def initial(cls, fragments: int) -> State:
        return cls(tuple(range(1000, 1000 + fragments)), (0,) * fragments)

    def step(self, fragment: int, contributions: Sequence[Weighted]) -> State:
        """The outer step of one fragment. As in floating point, the order of the contributions matters."""
        total = int(sum(weight for weight, _ in contributions))
        if total == 0:
            return self
        mean = 0
        for weight, delta in contributions:
            mean += int(weight) * delta - (mean >> 6)
        mean //= total
        velocity = self.velocities[fragment] // 2 + mean
        anchor = self.anchors[fragment] - mean - velocity // 2
        return State(_with(self.anchors, fragment, anchor), _with(self.velocities, fragment, velocity))

    def pack(self) -> bytes:
        return b"".join(map(NUMBER.pack, (*self.anchors, *self.velocities)))

    @classmethod
    def parse(cls, data: bytes) -> State:
        numbers = tuple(number for (number,) in NUMBER.iter_unpack(data))
        return cls(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])


class Toy:
    """One island's replica."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self.state: State | None = None
        self.theta: list[int] = []
        self.learned: list[int] = []
        """All that was ever learned, by fragment, with the sign of an outer gradient."""
        self.steps = 0
        self.counted_steps: list[int] = []
        self.in_flight: dict[int, tuple[int, int]] = {}
        """Delta and steps of rounds that are sent and not decided."""

    def learn(self, stream: int) -> None:
        """One inner step. What it learns is a function of the stream and of the step."""
        self.steps += 1
        for fragment in range(len(self.theta)):
            gradient = (stream * 7919 + self.steps * 104729 + fragment * 31) % 1009 - 400
            self.theta[fragment] -= gradient
            self.learned[fragment] += gradient

    def send(self, number: int, *, closing: bool = False) -> bytes:
        """The payload of a round; `closing`: sent before its time, by an island that ends."""
        assert self.state is not None
        fragment, round, *_ = self._numbering.place(number)
        flying = [sent for k, sent in self.in_flight.items() if self._numbering.place(k).fragment == fragment]
        delta = self.held(fragment) - sum(each for each, _ in flying)
        steps = self.steps - self.counted_steps[fragment] - sum(each for _, each in flying)
        self.in_flight[number] = delta, steps
        body = NUMBER.pack(delta)
        where = (fragment, round, 1, len(body), float(steps), steps, zlib.crc32(body))
        return Header(CLOSING_FORM if closing else FORM, "integer", *where).pack() + body

    def apply(self, number: int, contributions: Sequence[Weighted], included: bool) -> None:
        """A round has been decided."""
        assert self.state is not None
        self._move(self.state.step(self._numbering.place(number).fragment, contributions), [number] * included, number)

    def load(self, state: State, counted: Iterable[int], number: int) -> None:
        """A snapshot takes the place of all rounds up to `number`."""
        if self.state is None:
            self.theta, self.learned = list(state.anchors), [0] * len(state.anchors)
            self.counted_steps = [0] * len(state.anchors)
            self.state = state
        self._move(state, counted, number)

    def held(self, fragment: int) -> int:
        """What has been learned and not been counted."""
        assert self.state is not None
        return self.state.anchors[fragment] - self.theta[fragment]

    def _move(self, new: State, counted: Iterable[int], number: int) -> None:
        assert self.state is not None
        for fragment, (anchor, old) in enumerate(zip(new.anchors, self.state.anchors, strict=True)):
            self.theta[fragment] += anchor - old
        self.state = new
        for k in counted:
            delta, steps = self.in_flight[k]
            fragment = self._numbering.place(k).fragment
            self.theta[fragment] += delta
            self.counted_steps[fragment] += steps
        self.in_flight = {k: sent for k, sent in self.in_flight.items() if k > number}


def read_payload(data: bytes) -> Weighted:
    """Weight and delta."""
    return Header.unpack(data[:HEADER_BYTES], 0).weight, NUMBER.unpack(data[HEADER_BYTES:])[0]


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
