"""Series of a run that goes on, in bounded memory, and what of them is new to somebody who has seen a part.

Everything that changes is stamped with the *version* of the run at that time. Whoever asks says which version it has
seen, and gets what is newer:

    Rows        a list that grows at its end. What is new: `[index, rows]`, to be put in the place of all rows from that
                index on.
    Ring        records with running numbers, of which the oldest are dropped and any may change. What is new:
                `{"from": number, "rows": [[number, ...], ...]}`; records below that number are gone.
    StepRows    `Rows` over inner steps. The first steps and the last ones have a row each; in between, neighbours are
                merged so that there are never more than `MERGED` rows. A row has sums and extremes: a spike of one step
                in a million is still seen.
    TimeRows    `Rows` over wall-clock time, for each island; the width of all of them doubles when there are too many.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

HEAD, MERGED, TAIL = 100, 600, 64
TIME_ROWS = 120

# Columns of a row of steps.
FIRST, LAST, TOKENS, WALL, BYTES, PEAK, SECONDS, WAIT, LOSS, LOSSES, LEAST, MOST = range(12)


class Rows:
    """A list that is changed at its end, mostly."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._stamps: list[int] = []

    def append(self, row: list[Any], version: int) -> None:
        self.rows.append(row)
        self._stamps.append(version)

    def insert(self, index: int, row: list[Any], version: int) -> None:
        self.rows.insert(index, row)
        self._stamps.insert(index, version)

    def touch(self, index: int, version: int) -> None:
        """Row `index` has changed."""
        self._stamps[index] = version

    def replace(self, rows: list[list[Any]], version: int) -> None:
        """All rows are others."""
        self.rows, self._stamps = rows, [version] * len(rows)

    def remove(self, index: int) -> None:
        """Whoever removes a row that is not the last changes the one before it."""
        del self.rows[index], self._stamps[index]

    def since(self, version: int) -> list[Any]:
        """What is new.

        >>> rows = Rows()
        >>> rows.append([1], 1), rows.append([2], 2), rows.since(1), rows.since(2)
        (None, None, [1, [[2]]], [2, []])
        """
        first = next((index for index, stamp in enumerate(self._stamps) if stamp > version), len(self.rows))
        return [first, self.rows[first:]]


class Ring:
    """The latest records, each under a key."""

    def __init__(self, most: int) -> None:
        self._most, self._next = most, 0
        self._records: dict[Any, list[Any]] = {}
        """By key, in the order of numbers; a record is [stamp, number, row]."""

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: Any) -> list[Any] | None:
        record = self._records.get(key)
        return record[2] if record else None

    def put(self, key: Any, row: list[Any], version: int) -> None:
        """A new record, or what has become of one."""
        if key in self._records:
            self._records[key][0], self._records[key][2] = version, row
            return
        self._records[key] = [version, self._next, row]
        self._next += 1
        if len(self._records) > self._most:
            del self._records[next(iter(self._records))]

    def rows(self) -> list[list[Any]]:
        return [record[2] for record in self._records.values()]

    def clear(self) -> None:
        """Numbers go on, so that whoever has seen records learns that they are gone."""
        self._records.clear()

    def since(self, version: int) -> dict[str, Any]:
        """What is new.

        >>> ring = Ring(2)
        >>> ring.put("a", ["first"], 1), ring.put("b", ["second"], 1), ring.put("b", ["changed"], 2)
        (None, None, None)
        >>> ring.since(1)
        {'from': 0, 'rows': [[1, 'changed']]}
        >>> ring.put("c", ["third"], 3)
        >>> ring.since(2)
        {'from': 1, 'rows': [[2, 'third']]}
        """
        oldest = next(iter(self._records.values()))[1] if self._records else self._next
        fresh = [[number, *row] for stamp, number, row in self._records.values() if stamp > version]
        return {"from": oldest, "rows": fresh}


class StepRows(Rows):
    """Inner steps of all islands together."""

    def __init__(self) -> None:
        super().__init__()
        self._firsts: list[int] = []
        self._width, self._tail = 1, 0
        """How many steps a merged row has at most; where the rows of the last steps begin."""

    def add(self, step: int, values: dict[str, float], loss: float | None, version: int) -> None:
        """One step of one island: `tokens`, `wall`, `sent`, `seconds`, `waited`."""
        index = bisect_right(self._firsts, step) - 1
        if index < 0 or self.rows[index][LAST] < step:
            index += 1
            self.insert(index, [step, step, 0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0, None, None], version)
            self._firsts.insert(index, step)
            self._tail += index < self._tail
        row = self.rows[index]
        row[TOKENS], row[WALL] = max(row[TOKENS], values["tokens"]), max(row[WALL], values["wall"])
        row[BYTES] += values["sent"]
        row[PEAK] = row[BYTES] if row[FIRST] == row[LAST] else max(row[PEAK], values["sent"])
        row[SECONDS] += values["seconds"]
        row[WAIT] += values["waited"]
        if loss is not None:
            row[LOSS], row[LOSSES] = row[LOSS] + loss, row[LOSSES] + 1
            row[LEAST] = loss if row[LEAST] is None else min(row[LEAST], loss)
            row[MOST] = loss if row[MOST] is None else max(row[MOST], loss)
        self.touch(index, version)
        self._compact(version)

    def cut(self, step: int, version: int) -> None:
        """Forgets what lies after a step: a run has resumed there."""
        kept = [row for row in self.rows if row[FIRST] <= step]
        self._firsts = [row[FIRST] for row in kept]
        self._tail = min(self._tail, len(kept))
        self.replace(kept, version)

    def _compact(self, version: int) -> None:
        self._tail = max(self._tail, min(HEAD, len(self.rows)))
        while len(self.rows) - self._tail > TAIL:
            before = self._tail - 1
            if before >= HEAD and self.rows[self._tail][LAST] - self.rows[before][FIRST] < self._width:
                self._merge(before, version)
            else:
                self._tail += 1
        if self._tail - HEAD > MERGED:
            self._width *= 2
            index = HEAD
            while index + 1 < self._tail:
                if self.rows[index + 1][LAST] - self.rows[index][FIRST] < self._width:
                    self._merge(index, version)
                    self._tail -= 1
                else:
                    index += 1

    def _merge(self, index: int, version: int) -> None:
        """A row and the next one."""
        row, later = self.rows[index], self.rows[index + 1]
        row[LAST] = later[LAST]
        for column in (TOKENS, WALL, PEAK):
            row[column] = max(row[column], later[column])
        for column in (BYTES, SECONDS, WAIT, LOSS, LOSSES):
            row[column] += later[column]
        for column, extreme in ((LEAST, min), (MOST, max)):
            there = [value for value in (row[column], later[column]) if value is not None]
            row[column] = extreme(there) if there else None
        self.remove(index + 1)
        del self._firsts[index + 1]
        self.touch(index, version)


class TimeRows:
    """For each island what happened in each stretch of time: [steps, bytes sent, bytes received]."""

    def __init__(self) -> None:
        self.origin: float | None = None
        self.width = 1.0
        self.islands: dict[int, Rows] = {}

    def add(self, island: int, time: float, values: tuple[int, int, int], version: int) -> None:
        if self.origin is None:
            self.origin = time
        while time - self.origin >= TIME_ROWS * self.width:
            self._double(version)
        rows = self.islands.setdefault(island, Rows())
        index = max(0, int((time - self.origin) / self.width))
        while len(rows.rows) <= index:
            rows.append([0, 0, 0], version)
        rows.rows[index] = [old + new for old, new in zip(rows.rows[index], values, strict=True)]
        rows.touch(index, version)

    def since(self, version: int) -> dict[str, Any]:
        parts = ((island, rows.since(version)) for island, rows in self.islands.items())
        fresh = {island: part for island, part in parts if part[1]}
        return {"origin": self.origin, "width": self.width, "islands": fresh}

    def _double(self, version: int) -> None:
        self.width *= 2
        for rows in self.islands.values():
            pairs = [rows.rows[index : index + 2] for index in range(0, len(rows.rows), 2)]
            rows.replace([[sum(column) for column in zip(*pair, strict=True)] for pair in pairs], version)
