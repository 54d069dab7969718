"""The rounds of a run that goes on: which fragments are in flight, and who was in each round.

A round is known by fragment and number. Of each of the latest ones there is a letter for every island, by its number:

    s   it has sent its payload       i   it was in the round          x   the round was completed without it
    n   its weights were not finite   c   it applied the round later   .   it had no part in it

Where islands come and go, seals say who was in. Else everybody who applies a round was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isles.view.rows import Ring

if TYPE_CHECKING:
    from isles.view.events import Event
    from isles.view.live_island import LiveIsland

MOST_ROUNDS = 240
MOST_FLIGHTS = 4000


class LiveRounds:
    """The latest rounds, and the latest flights: one island's part in a round, from its send to its use."""

    def __init__(self, islands: dict[int, LiveIsland]) -> None:
        self.islands = islands
        self.has_seals = False
        """Whether a store tells who is in a round."""
        self.rounds = Ring(MOST_ROUNDS)
        """Rows of [fragment, round, step or clock, letters], by fragment and round; with seals by the seal's number."""
        self.flights = Ring(MOST_FLIGHTS)
        """Rows of [island, fragment, round, step sent, step applied or None, bytes, seconds waited, in flight]."""
        self._sent_times: dict[tuple[int, ...], float] = {}
        self._fragments = 1

    def clear(self) -> None:
        """What comes next may have been there before: a run has resumed."""
        self.rounds.clear()
        self.flights.clear()
        self._sent_times.clear()

    def sent(self, event: Event, version: int) -> None:
        key = _key(event)
        place = [int(event["step"]), None, int(event.get("num_bytes") or 0), None, None]
        self.flights.put(key, [*key, *place], version)
        self._sent_times[key] = float(event.get("time") or 0.0)
        if len(self._sent_times) > MOST_FLIGHTS:
            del self._sent_times[next(iter(self._sent_times))]
        self.mark(event, "s", version)

    def applied(self, event: Event, version: int) -> None:
        key = _key(event)
        flight, sent = self.flights.get(key), self._sent_times.pop(key, None)
        if flight is None or sent is None:
            return  # early delayed and eager rounds apply what was never sent
        aloft = float(event.get("time") or 0.0) - sent
        self.flights.put(key, [*flight[:4], int(event["step"]), flight[5], event.get("seconds"), aloft], version)
        island = self.islands.get(key[0])
        if not self.has_seals and self._letter(key) == "s":
            self.mark(event, "i", version)
            if island is not None:
                island.was_in(key[2])

    def excluded(self, event: Event, version: int) -> None:
        """The others completed the round without this island. A fixed world has no seals: its log says so alone."""
        key, island = _key(event), self.islands[int(event.get("island") or 0)]
        if not self.has_seals:
            if self._letter(key) == "i":
                island.was_not_in()
            self.mark(event, "x", version)
            island.was_out(key[2])
        if event.get("late_seconds") is not None:
            island.lateness.append(float(event["late_seconds"]))

    def caught_up(self, event: Event, version: int) -> None:
        island = self.islands.get(int(event.get("island") or 0))
        if island is not None:
            island.rounds_caught_up += 1
        self.mark(event, "c", version)

    def sealed(self, event: Event, version: int) -> None:
        """Who is in a round, once and for all."""
        number, fragment = int(event["round"]), int(event["fragment"])
        self.has_seals, self._fragments = True, max(self._fragments, fragment + 1)
        inside, missing = ({int(each) for each in event[name]} for name in ("islands", "missing"))
        last = max((*inside, *missing), default=-1)
        letters = "".join("i" if n in inside else "x" if n in missing else "." for n in range(last + 1))
        self.rounds.put(number, [fragment, number, int(event["clock"]), letters], version)
        for island in self.islands.values():
            if island.number in inside:
                island.was_in(number)
                island.bytes_sealed += int(event["num_bytes"].get(str(island.number), 0))
            elif island.left is None and (island.joined or 0) <= number and (island.joined or island.rounds_in):
                island.was_out(number)

    def mark(self, event: Event, letter: str, version: int) -> None:
        """Sets the letter of an island in a round. With seals, sends and applies say nothing about who was in."""
        if self.has_seals and letter in "si":
            return
        island, fragment, number = _key(event)
        key = self._key(fragment, number)
        row = self.rounds.get(key)
        if row is None:
            if self.has_seals:
                return
            row = [fragment, number, int(event["step"]), ""]
        letters = row[3].ljust(island + 1, ".")
        self.rounds.put(key, [*row[:3], letters[:island] + letter + letters[island + 1 :]], version)

    def _letter(self, key: tuple[int, int, int]) -> str:
        row = self.rounds.get(self._key(*key[1:]))
        return letter_of(row, key[0]) if row is not None else "."

    def _key(self, fragment: int, number: int) -> Any:
        """Seals number the rounds of all fragments in one sequence: each period has one of each fragment."""
        if not self.has_seals:
            return (fragment, number)
        period = range((number - 1) * self._fragments + 1, number * self._fragments + 1)
        rows = ((seal, self.rounds.get(seal)) for seal in period)
        return next((seal for seal, row in rows if row is not None and row[0] == fragment), None)


def _key(event: Event) -> tuple[int, int, int]:
    return int(event.get("island") or 0), int(event["fragment"]), int(event["round"])


def letter_of(row: list[Any], island: int) -> str:
    """The letter of an island in a row of rounds.

    >>> letter_of([0, 7, 90, "ix"], 1), letter_of([0, 7, 90, "ix"], 5)
    ('x', '.')
    """
    return row[3][island] if len(row[3]) > island else "."
