"""Runs that are watched: their sources, what is known of each so far, and what is new to whoever asks.

Reading is lazy. Nothing is read while nobody looks, and whoever looks makes the source read what is new, a limited
amount at a time. So watching costs a run nothing, and a store a few requests while somebody watches.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from isles.view import report, store_source
from isles.view.events import Event
from isles.view.live import Live
from isles.view.problems import Problem, problems
from isles.view.runs import Run
from isles.view.sources import Folder, Source

READ_SECONDS = 0.15
"""A look at a long log takes no longer; the rest is read at the next look."""
REPORT_BYTES = 64 << 20
"""Of a log that is longer a finished run keeps its live charts, which are coarser than a report's."""


class Watched:
    """One run that is watched."""

    def __init__(self, source: Source, place: str, versions: itertools.count[int]) -> None:
        self.source, self.place = source, place
        self.live = Live(source.name, versions)
        self.live.lag_seconds = source.lag_seconds
        self.trouble = ""
        """Why the source could not be read the last time."""
        self._read_at = -float("inf")

    def look(self) -> None:
        """Reads what is new, if it is time to."""
        begin = time.monotonic()
        if not self.source.behind and begin < self._read_at + self.source.poll_seconds:
            return
        self._read_at = begin
        while True:
            try:
                self.live.feed_all(self.source.read())
                self.trouble = ""
            except Exception as error:  # a store that does not answer, a file without rights: it may pass
                self.trouble = f"{type(error).__name__}: {error}"[:300]
                return
            if not self.source.behind or time.monotonic() > begin + READ_SECONDS:
                return

    def now(self) -> float:
        """The time, for whoever asks how long ago things were. Of a log that is not read to its end yet: its own."""
        return self.live.last_time if self.source.behind and self.live.last_time else time.time()

    def problems(self, now: float) -> list[Problem]:
        place = self.place if isinstance(self.source, Folder) else ""
        found = problems(self.live, now, place)
        if self.trouble:
            found.insert(0, Problem(f"{self.place} cannot be read: {self.trouble}.", "Trying again.", severe=True))
        return found

    def state(self, now: float, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The run in one line."""
        live, total = self.live, self.live.total_steps
        rows = self.islands(now) if rows is None else rows
        active = [row for row in rows if row["state"] in ("in", "out", "joined")]
        losses = [row["loss"] for row in active or rows if row["loss"] is not None]
        speeds = [row["tokensPerSecond"] for row in active if row["tokensPerSecond"]]
        pace, sent, parameters = live.seconds_per_step, live.summary()["bytes_sent"], live.config.get("parameters")
        count = live.island_count
        dense = 8 * int(parameters) * (count - 1) if parameters else None
        left = (total - live.last_step) * pace if total and pace and live.last_step <= total else None
        return {
            "phase": self._phase(rows),
            "place": self.place,
            "step": live.last_step,
            "steps": total,
            "elastic": live.elastic,
            "loss": sum(losses) / len(losses) if losses else None,
            "tokensPerSecond": sum(speeds) if speeds else None,
            "bytesPerStep": sent / live.last_step if live.last_step else None,
            "denseBytes": dense or None,
            "secondsLeft": None if live.finished else left,
            "islands": count,
            "islandsIn": sum(row["state"] in ("in", "done") for row in rows),
            "lastTime": live.last_time or None,
        }

    def islands(self, now: float) -> list[dict[str, Any]]:
        """Those that are there first; of those that have left the latest."""
        live = self.live
        tokens, total = live.tokens_per_island_step, live.total_steps
        heard = now - self.source.lag_seconds
        rows = [island.row(heard, live.finished, total, tokens) for island in live.islands.values()]
        return sorted(rows, key=lambda row: (row["state"] == "left", row["island"]))

    def update(self, since: int) -> dict[str, Any]:
        """What is new to somebody who has seen a version of this run."""
        live, now = self.live, self.now()
        reset = since < live.born
        since = 0 if reset else since
        rows = self.islands(now)
        result: dict[str, Any] = {"reset": reset, "state": self.state(now, rows), "summary": live.summary()}
        result["islandRows"] = rows
        result["problems"] = [vars(problem) for problem in self.problems(now)]
        if live.config_version > since:
            result["about"] = live.about()
        if live.version > since:
            result.update(steps=live.steps.since(since), evals=live.evals.since(since), rates=live.rates.since(since))
            rounds = live.rounds
            result.update(flights=rounds.flights.since(since), rounds=rounds.rounds.since(since))
        return result

    def events(self, most_bytes: int) -> list[Event]:
        """All of them, for a report; none if they are too many, or not to be read now."""
        try:
            return (self.source.everything(most_bytes) or []) if self.source.exists else []
        except (ValueError, OSError):
            return []

    def _phase(self, rows: list[dict[str, Any]]) -> str:
        if self.live.finished:
            return "finished"
        if not rows:
            return "starting" if self.source.exists else "absent"
        if all(row["state"] in ("gone", "left", "done") for row in rows) and any(
            row["state"] in ("gone", "left") for row in rows
        ):
            return "stopped"
        return "running" if self.live.last_step else "starting"


class Watcher:
    """Some runs that are watched together. Any number of threads may ask."""

    def __init__(self, places: Sequence[tuple[Source, str]]) -> None:
        self.boot = secrets.token_hex(8)
        """Versions of another process mean nothing here: whoever asks says whose version it has seen."""
        self._versions = itertools.count(1)
        self.runs = [Watched(source, place, self._versions) for source, place in places]
        self._lock = threading.Lock()
        self._report: tuple[int, dict[str, Any]] | None = None

    def update(self, boot: str = "", since: int = 0) -> dict[str, Any]:
        """What is new since a version of this watcher; everything to a stranger."""
        with self._lock:
            self._look()
            seen = since if boot == self.boot else 0
            result = {
                "boot": self.boot,
                "version": max(run.live.version for run in self.runs),
                "behind": any(run.source.behind for run in self.runs),
                "poll": min(1.0, 2 * max(run.source.poll_seconds for run in self.runs)),
                "time": max(run.now() for run in self.runs),
                "runs": [run.update(seen) for run in self.runs],
            }
            if not seen:
                result["links"] = report.bandwidths()
            final = self._final_report()
            if final is not None and final[0] > seen:
                result["report"] = final[1]
            return result

    def page(self) -> str:
        """The report of all runs as it is now, in one file."""
        with self._lock:
            self._look()
            found = [Run(events, run.live.name) for run in self.runs if (events := run.events(4 * REPORT_BYTES))]
        if not found:
            raise ValueError("there is nothing to report yet")
        return report.page(found)

    def _final_report(self) -> tuple[int, dict[str, Any]] | None:
        """The report's data once all runs are finished, and the version that it is of."""
        version = max(run.live.version for run in self.runs)
        if not all(run.live.finished and not run.source.behind for run in self.runs):
            self._report = None
        elif self._report is None or self._report[0] < version:
            events = [run.events(REPORT_BYTES) for run in self.runs]
            pairs = zip(events, self.runs, strict=True)
            contents = report.contents([Run(found, run.live.name) for found, run in pairs]) if all(events) else {}
            self._report = (version, contents)
        return self._report

    def looked_at(self) -> list[Watched]:
        """The runs, with what is new read."""
        with self._lock:
            self._look()
            return self.runs

    def _look(self) -> None:
        for run in self.runs:
            run.look()


def watcher_of(runs: Sequence[str], store: str | None = None) -> Watcher:
    """A watcher of run folders, or of a run in an object store."""
    if bool(runs) == bool(store):
        raise ValueError("give the folders of runs, or --store URL, one of both")
    if store:
        name = store.rstrip("/").rpartition("/")[2]
        return Watcher([(store_source.Store(store_source.open_store(store), name), store)])
    return Watcher([(Folder(run), run) for run in runs])
