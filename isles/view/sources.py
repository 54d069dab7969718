"""Where the events of a run come from, for whoever watches it while it goes on.

A *source* is one method. `read()` returns the events that are new since the last call, a limited number of them, and
never waits for any. What a source finds out by itself comes as events too, so that everything that looks at a run is
fed in one way:

    reset   what was read so far is void: another run has taken the place of this one
    torn    line, text                       a line that is no event
    gone    island, rank, pid, said          the process of an island has ended; the last line that it printed

and of object stores, whose rounds have one numbering for all fragments

    announced   island, round                the island exists, and may be in rounds from this one on
    departed    island, round                nobody waits for the island from this round on
    sealed      round, fragment, clock, islands, missing, num_bytes       who is in a round

`Folder` reads `events.jsonl` of a run's folder from where it stopped last time. The other source, an object store, is
in `isles.view.store_source`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from isles.view import events
from isles.view.events import Event

CHUNK_BYTES = 1 << 18
LONGEST_LINE = 1 << 22
"""A line without an end that is longer is no event: it is dropped, not kept in memory."""


class Source(Protocol):
    """A run that may still be going on, or may not have begun."""

    name: str
    """What to call the run as long as it does not say so itself."""
    poll_seconds: float
    """How often it makes sense to read."""
    behind: bool
    """Whether the last `read` left something that is there already."""
    exists: bool
    """Whether anything has been found yet."""
    lag_seconds: float
    """How old events are, at most, when they can be read."""

    def read(self) -> list[Event]:
        """What is new."""
        ...

    def everything(self, most_bytes: int) -> list[Event] | None:
        """All events from the beginning, as a report wants them; None if they take more bytes than that."""
        ...


@dataclass
class Process:
    """A process of a run that was started on some host."""

    island: int
    rank: int
    pid: int
    host: str
    time: float


class Folder:
    """A run's folder, or its event file; it need not exist yet."""

    poll_seconds = 0.25
    lag_seconds = 0.0

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        whole = self.path.resolve()
        self.name = (whole.parent if self.path.suffix == ".jsonl" else whole).name
        self.behind = self.exists = False
        self._start()

    def _start(self) -> None:
        self._file: tuple[int, int] | None = None
        self._position, self._line, self._rest = 0, 0, b""
        self._processes: dict[tuple[int, int], Process] = {}

    def read(self) -> list[Event]:
        """The events of at most `CHUNK_BYTES` of the log; when all of it is read, who has died."""
        try:
            with self._locate().open("rb") as stream:
                found = self._read(stream)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            found = self._vanished()
        return found if self.behind else [*found, *self._deaths()]

    def everything(self, most_bytes: int) -> list[Event] | None:
        file = self._locate()
        return None if file.stat().st_size > most_bytes else events.read(file)

    def _locate(self) -> Path:
        """Also of a path that does not exist yet."""
        return self.path if self.path.suffix == ".jsonl" and not self.path.is_dir() else self.path / events.FILE_NAME

    def _vanished(self) -> list[Event]:
        found: list[Event] = [_event("reset")] if self.exists else []
        self.exists = self.behind = False
        self._start()
        return found

    def _read(self, stream: BinaryIO) -> list[Event]:
        status = os.fstat(stream.fileno())
        found: list[Event] = []
        if self._file not in (None, (status.st_dev, status.st_ino)) or status.st_size < self._position:
            self._start()  # removed and made anew, or cut off: `isles train --overwrite`
            found.append(_event("reset"))
        self._file, self.exists = (status.st_dev, status.st_ino), True
        stream.seek(self._position)
        data = stream.read(CHUNK_BYTES)
        self._position += len(data)
        self.behind = self._position < status.st_size
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line += 1
            event = parse(line, self._line)
            if event is not None:
                found.append(event)
                self._note(event)
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""
        return found

    def _note(self, event: Event) -> None:
        if event["event"] == "island" and all(type(event.get(name)) is int for name in ("island", "rank", "pid")):
            place = (event["island"], event["rank"], event["pid"])
            process = Process(*place, str(event.get("host")), float(event.get("time") or 0.0))
            self._processes[process.island, process.rank] = process
        elif event["event"] == "end":
            self._processes.clear()  # from now on processes may end

    def _deaths(self) -> Iterable[Event]:
        here = socket.gethostname()
        for key, process in list(self._processes.items()):
            if process.host == here and not is_alive(process.pid, process.time):
                del self._processes[key]
                said = _last_line(self._locate().parent / f"island-{process.rank}.log")
                yield _event("gone", island=process.island, rank=process.rank, pid=process.pid, said=said)


def parse(line: bytes, number: int) -> Event | None:
    """The event in a line; None for a blank one. A line that is none becomes a `torn` event.

    >>> parse(b'{"event": "step", "step": 1}', 1), parse(b" ", 2)
    ({'event': 'step', 'step': 1}, None)
    >>> parse(b'{"event": "st', 3)["line"]
    3
    """
    if not line.strip():
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        return event
    return _event("torn", line=number, text=line[:80].decode(errors="replace"))


def is_alive(pid: int, since: float) -> bool:
    """Whether a process of this host that ran at that time still runs: not ended, not another one with its number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return _exists(pid) if not Path("/proc/self/stat").exists() else False
    began = time.time() - _uptime() + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] not in "ZX" and began < since + 2.0


def _exists(pid: int) -> bool:
    """Where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _uptime() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 4096))
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:500] if lines else ""


def _event(kind: str, **fields: Any) -> Event:
    return {"event": kind, "time": time.time(), **fields}
