"""What must hold, checked after every operation on the store and after everything that an island does.

The checker sees the whole store and all islands. It computes the truth by itself, from the payloads that have been
written and the seals that list them, and compares. I6 and I7 have no code of their own: with faults of the store
allowed, I1 to I5 say that these change timing and never values, and an error that an island raises although nothing is
wrong but timing is a violation (`Simulation.failed`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from isles.elastic.numbering import Numbering
from isles.elastic.objects import (
    ISLANDS,
    ROUNDS,
    RUN,
    SEALS,
    SNAPSHOTS,
    Announcement,
    Run,
    Seal,
    digest,
    manifest_name,
    open_payload,
    payload_name,
    round_of,
    seal_name,
)
from isles.elastic.toy import State, Toy, Weighted, read_payload

INVARIANTS = {
    "I1": "one seal per round, never changed, in order, each with the digest of the one before it",
    "I2": "whoever has applied a round has the anchors and velocities that the log gives, to the last bit",
    "I3": "what was learned is what was counted, once, and what anchor - theta still holds; steps likewise",
    "I4": "nobody is waited for twice; without faults rounds go on, and every island is in half of them or more",
    "I5": "the last two snapshots, and all payloads after the earlier one, are there for whoever starts",
    "I6": "a name has one content; whatever the store does to requests changes timing only",
    "I7": "what is damaged is never used; no error without a reason",
}


class Violation(AssertionError):
    """An invariant does not hold."""


class Checker:
    """Sees every write and every decision, and raises `Violation`."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._written: dict[str, bytes] = {}
        """Everything that was ever in the store."""
        self.states: list[State] = []
        """The truth: anchors and velocities after every round."""
        self.seals: list[Seal | None] = [None]
        self.tail = 0
        """The last round that is sealed."""
        self._previous = ""
        self.contents: list[dict[int, tuple[int, int]]] = [{}]
        """Of every round: island -> delta and steps that were counted."""
        self.numbers: dict[str, list[int]] = defaultdict(list)
        """Of every process: the numbers it has had."""
        self._snapshots: list[int] = [0]
        self._ledgers: dict[str, _Ledger] = {}

    # ---- the store

    def wrote(self, name: str, data: bytes) -> None:
        """An object was written."""
        if name in self._written:
            if self._written[name] != data:
                raise Violation(f"I{1 if name.startswith(SEALS) else 6}: {name} was written with two contents")
            return
        self._written[name] = data
        if name.startswith(SEALS):
            self._sealed(name, data)
        elif name == RUN:
            run = Run.parse(data, RUN)
            self.states.append(State.parse(self._written[run.start.parts[0].name]))
            self._previous = digest(data)
        elif name.startswith(ISLANDS) and ".left" not in name:
            self.numbers[Announcement.parse(data, name).token].append(int(name[-9:-5]))
        elif name.startswith(SNAPSHOTS) and name == manifest_name(number := round_of(name) or 0):
            self._snapshots = sorted({*self._snapshots, number})

    def _sealed(self, name: str, data: bytes) -> None:
        seal, number = Seal.parse(data, name), self.tail + 1
        if name != seal_name(number) or seal.round != number:
            raise Violation(f"I1: {name} was written when the log ended with {self.tail}")
        if seal.previous != self._previous:
            raise Violation(f"I1: the digest of the seal before it is wrong in {name}")
        before = self.seals[-1]
        contributions: list[Weighted] = []
        contents = {}
        for each in seal.contributions:
            payload = self._written.get(payload_name(number, each.island))
            if payload is None or open_payload(payload_name(number, each.island), payload)[0] != each:
                raise Violation(f"I2: {name} lists a payload of island {each.island} that was never written")
            contributions.append(read_payload(payload))
            contents[each.island] = contributions[-1][1], each.steps
        for island in seal.missing:
            if before is not None and island < before.known and island not in before.islands:
                raise Violation(f"I4: {name} says that island {island} was waited for, after a round without it")
        self.states.append(self.states[-1].step(self._numbering.place(number).fragment, contributions))
        self.seals.append(seal)
        self.tail = number
        self.contents.append(contents)
        self._previous = digest(data)

    def deleted(self, name: str) -> None:
        """An island, not a fault, has deleted an object."""
        keep = self._snapshots[-2] if len(self._snapshots) > 1 else 0
        number = round_of(name)
        if number is None or number > (keep if name.startswith(ROUNDS) else keep - 1):
            raise Violation(f"I5: {name} was deleted, and the last snapshots are {self._snapshots[-2:]}")

    # ---- islands

    def observe(self, token: str, toy: Toy, taken: int) -> None:
        """A process has learned something, or has applied rounds, up to `taken`."""
        if toy.state != self.states[taken]:
            raise Violation(f"I2: {token} has {toy.state} after round {taken}, and the log gives {self.states[taken]}")
        ledger = self._ledgers.setdefault(token, _Ledger([0] * len(toy.theta), [0] * len(toy.theta)))
        for number in range(ledger.round + 1, taken + 1):
            fragment = self._numbering.place(number).fragment
            for island in self.numbers[token]:
                delta, steps = self.contents[number].get(island, (0, 0))
                ledger.deltas[fragment] += delta
                ledger.steps[fragment] += steps
        ledger.round = taken
        for fragment, learned in enumerate(toy.learned):
            counted, held = ledger.deltas[fragment], toy.held(fragment)
            if learned != counted + held:
                told = f"has learned {learned}; counted are {counted}, held {held}, after round {taken}"
                raise Violation(f"I3: {token} {told}, fragment {fragment}")
        if toy.counted_steps != ledger.steps:
            raise Violation(f"I3: {token} has {toy.counted_steps} steps counted, and the log has {ledger.steps}")

    def present(self, token: str, after: int) -> None:
        """A process that has been there, undisturbed, since round `after` has been in at least half of the rounds."""
        rounds = range(after + 1, self.tail + 1)
        present = [number for number in rounds if any(n in self.contents[number] for n in self.numbers[token])]
        if 2 * len(present) < len(rounds):
            raise Violation(f"I4: {token} is in {len(present)} of the {len(rounds)} rounds after {after}")


@dataclass
class _Ledger:
    """What the log has counted of one process."""

    deltas: list[int]
    steps: list[int]
    round: int = 0
