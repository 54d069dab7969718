"""A run in an object store, watched by whoever may read there: no access to the machines is needed.

Of the run's objects (`isles.elastic.objects`) it reads `run.json`, who joined and left, the seals, and
`events/NNNN/KKKKKKKK.jsonl`: the K-th piece, from 1, of what island N did, JSON lines as in a run's `events.jsonl`.
A piece is written once and never changed, and names can be computed. So after a first listing a look at the store is
one listing of `islands/`, one request for the next seal and one for the next piece of each island that is still there;
more only where something new has been found. Nothing is asked while nobody watches.

The store itself is anything with `list(prefix)` and `get(name)`.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol

from isles.view import events, sources
from isles.view.events import Event
from isles.view.runs import Run

ISLANDS, SEALS, EVENTS = "islands/", "seals/", "events/"
SEALS_AT_FIRST = 500
"""How many of the latest seals are read of a run that has been going on for long."""
PIECES_AT_ONCE = 64
MOST_BYTES = 1 << 30
ISLAND_NAME = re.compile(r"islands/(\d{4,9})(\.left)?\.json")
SEAL_NAME = re.compile(r"seals/(\d{8,15})\.json")


class Reader(Protocol):
    """What watching needs of an object store."""

    def list(self, prefix: str) -> Iterable[str]:
        """All names that begin like this, in any order."""
        ...

    def get(self, name: str) -> bytes | None:
        """An object; None, KeyError or FileNotFoundError if there is none of this name."""
        ...


def open_store(url: str) -> Reader:
    """A reader of the store at this address: a bucket, a folder. Of a folder that is not there yet, too: it is not
    made.
    """
    try:
        stores = importlib.import_module("isles.elastic.store")
    except ImportError as error:
        raise ValueError(f"--store {url} needs {error.name}, which is missing: pip install 'isles[store]'") from error
    opener: Callable[[], Reader] = functools.partial(stores.open_store, url, create=False)
    try:
        return opener()
    except stores.NoFolderError as error:
        return Awaited(opener, type(error))


class Awaited:
    """A store that is empty as long as opening it fails in this way."""

    def __init__(self, opener: Callable[[], Reader], failure: type[Exception]) -> None:
        self._opener, self._failure = opener, failure
        self._opened: Reader | None = None

    def list(self, prefix: str) -> Iterable[str]:
        return opened.list(prefix) if (opened := self._open()) else ()

    def get(self, name: str) -> bytes | None:
        return opened.get(name) if (opened := self._open()) else None

    def _open(self) -> Reader | None:
        with suppress(self._failure):
            self._opened = self._opened or self._opener()
        return self._opened


def load(url: str) -> Run:
    """A run in a store, all of it, for a report."""
    name = url.rstrip("/").rpartition("/")[2]
    store = open_store(url)
    if not any(map(_piece, store.list(EVENTS))):
        raise ValueError(f"--store {url} has no events of a run: check the address; isles train writes them")
    found = Store(store, name).everything(MOST_BYTES)
    if found is None:
        raise ValueError(f"--store {url} has more than {MOST_BYTES >> 20} MB of events: too many for a report")
    return Run(found, name)


class Store:
    """A run in a store; it need not have begun yet."""

    poll_seconds = 2.0
    lag_seconds = 10.0  # pieces are written every few seconds

    def __init__(self, reader: Reader, name: str = "store") -> None:
        self._reader, self.name = reader, name
        self.behind = self.exists = False
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="isles-store")
        self._found: list[Event] = []
        """Kept here until `read` returns: a request that fails must not lose what others have brought."""
        self._joined: set[int] = set()
        self._left: set[int] = set()
        self._silent: set[int] = set()
        """Islands that have left, and whose last piece has been read."""
        self._pieces: dict[int, int] = {}
        """The last piece that was read of each island."""
        self._lines: dict[int, int] = {}
        self._seal: int | None = None

    def read(self) -> list[Event]:
        if not self.exists:
            if self._get("run.json") is None:
                return []
            self.exists = True
        self._read_memberships()
        more = [self._read_seals(), self._read_pieces()]
        self.behind = any(more)
        found, self._found = self._found, []
        return found

    def everything(self, most_bytes: int) -> list[Event] | None:
        """A second, complete reading."""
        names = {name: piece[0] for name in self._reader.list(EVENTS) if (piece := _piece(name))}
        found: list[Event] = []
        self._lines.clear()
        for island, data in zip(names.values(), self._pool.map(self._get, names), strict=True):
            most_bytes -= len(data or b"")
            if most_bytes < 0:
                return None
            found += [event for event in self._events(island, data or b"") if event["event"] != "torn"]
        return events.latest(sorted(found, key=_time)) or None

    def _read_memberships(self) -> None:
        from isles.elastic.objects import Announcement

        found = [match for name in self._reader.list(ISLANDS) if (match := ISLAND_NAME.fullmatch(name))]
        fresh = sorted(match[0] for match in found if int(match[1]) not in (self._left if match[2] else self._joined))
        for name, data in zip(fresh, self._pool.map(self._get, fresh), strict=True):
            match = ISLAND_NAME.fullmatch(name)
            if data is None or match is None:
                continue
            island, told = int(match[1]), self._left if match[2] else self._joined
            told.add(island)
            with self._strictly():
                number = Announcement.parse(data, name).round
                self._found.append(
                    {"event": "departed" if match[2] else "announced", "island": island, "round": number}
                )

    def _read_seals(self) -> bool:
        """The next ones: one is asked for, then more at a time while there are some. Whether more are left."""
        from isles.elastic.objects import seal_name

        if self._seal is None:
            numbers = [int(match[1]) for name in self._reader.list(SEALS) if (match := SEAL_NAME.fullmatch(name))]
            self._seal = max(0, max(numbers, default=0) - SEALS_AT_FIRST)
        batch = 1
        while batch <= SEALS_AT_FIRST:
            names = [seal_name(self._seal + ahead) for ahead in range(1, batch + 1)]
            for name, data in zip(names, list(self._pool.map(self._get, names)), strict=True):
                if data is None:
                    return False
                self._seal += 1
                self._take_seal(name, data)
            batch *= 2
        return True

    def _take_seal(self, name: str, data: bytes) -> None:
        from isles.elastic.objects import Seal

        with self._strictly():
            seal = Seal.parse(data, name)
            sizes = {str(each.island): each.num_bytes for each in seal.contributions}
            places = {"round": seal.round, "fragment": seal.fragment, "clock": seal.clock}
            who = {"islands": list(seal.islands), "missing": list(seal.missing), "num_bytes": sizes}
            self._found.append({"event": "sealed", **places, **who})

    def _read_pieces(self) -> bool:
        """The next ones of every island that may have some, at most so many at once. Whether more are left."""
        for name in [] if self._pieces else self._reader.list(EVENTS):
            if piece := _piece(name):
                self._pieces.setdefault(piece[0], 0)
        asked = sorted((self._joined | set(self._pieces)) - self._silent)
        fresh, left = [], PIECES_AT_ONCE
        while asked and left > 0:
            names = [f"{EVENTS}{island:04d}/{self._pieces.get(island, 0) + 1:08d}.jsonl" for island in asked]
            answers = list(zip(asked, self._pool.map(self._get, names), strict=True))
            for island, data in answers:
                if data is not None:
                    self._pieces[island] = self._pieces.get(island, 0) + 1
                    fresh += self._events(island, data)
                elif island in self._left:
                    self._silent.add(island)
            asked = [island for island, data in answers if data is not None]
            left -= len(asked)
        self._found += sorted(fresh, key=_time)
        return bool(asked)

    @contextmanager
    def _strictly(self) -> Iterator[None]:
        """A damaged object is told, and left out."""
        try:
            yield
        except ValueError as error:
            self._found.append({"event": "torn", "line": 0, "text": str(error)[:200]})

    def _events(self, island: int, data: bytes) -> list[Event]:
        """The events of a piece, as those of the island whose piece it is. The run has the name of the store."""
        found = []
        for line in data.split(b"\n"):
            self._lines[island] = self._lines.get(island, 0) + 1
            event = sources.parse(line, self._lines[island])
            if event is not None:
                found.append({**event, "island": island})
                if event["event"] == "config":
                    found[-1]["name"] = self.name
        return found

    def _get(self, name: str) -> bytes | None:
        try:
            return self._reader.get(name)
        except (KeyError, FileNotFoundError):
            return None


def _piece(name: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"events/(\d{4,9})/(\d{8,15})\.jsonl", name)
    return (int(match[1]), int(match[2])) if match else None


def _time(event: Event) -> float:
    return float(event.get("time") or 0.0)
