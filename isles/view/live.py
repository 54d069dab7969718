"""A run while it goes on: events in, what a page, a terminal or a monitoring system shows out.

`Live.feed` takes one event in constant time; memory does not grow with the length of the run (`isles.view.rows`). What
comes out has the form of the report's data (`isles.view.report.contents`) where both show the same thing, so that both
are drawn by the same code.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from isles.view.events import Event
from isles.view.live_island import LiveIsland
from isles.view.live_rounds import LiveRounds
from isles.view.rows import BYTES, PEAK, SECONDS, WAIT, WALL, Rows, StepRows, TimeRows
from isles.view.runs import lateness_of, of_the_whole
from isles.view.scalars import SCALARS

MOST_EVALS = 1000
MOST_ISLANDS = 4096
PACE_MARKS = 200


class Live:
    """What is known of one run so far."""

    def __init__(self, name: str, versions: itertools.count[int] | None = None) -> None:
        self._versions = versions or itertools.count(1)
        self._fallback = name
        self.lag_seconds = 0.0
        """How old the newest events may be."""
        self.version = 0
        self.clear()

    def clear(self) -> None:
        """Begins anew: another run has taken the place."""
        self.born = self.version = next(self._versions)
        self.config: Event = {}
        self.config_version = self.version
        self.islands: dict[int, LiveIsland] = {}
        self.steps, self.evals, self.rates = StepRows(), Rows(), TimeRows()
        self.rounds = LiveRounds(self.islands)
        self.latest: dict[tuple[str, int | None], Event] = {}
        """Of each island the last event of every kind that has numbers."""
        self.sample: Event | None = None
        self.end: Event | None = None
        self.torn, self.first_torn = 0, ""
        self.last_time = 0.0
        self.last_step = 0
        self._wall = 0.0
        self._before: float | None = None
        self._marks: deque[tuple[float, int]] = deque(maxlen=PACE_MARKS)
        self.tokens = 0

    def feed_all(self, events: list[Event]) -> None:
        """Takes in what a source has read, as one new version."""
        if events:
            self.version = next(self._versions)
        for event in events:
            try:
                self.feed(event)
            except (KeyError, TypeError, ValueError, AttributeError):  # an event that is not as it should be
                self._tear(0, str(event))

    def feed(self, event: Event) -> None:
        """Takes in one event. Unknown kinds are passed over."""
        kind = event["event"]
        take = getattr(self, f"_take_{kind}", None) if kind.isalpha() or kind == "catch_up" else None
        if kind in ("reset", "torn"):
            assert take is not None
            take(event)
            return
        self._tick(event)
        number = event.get("island")
        island = self._island(int(number)) if number is not None else None
        if island is not None and kind != "gone":
            island.take(event)
        if take is not None:
            take(event)
        if kind in SCALARS:
            self.latest[kind, None if kind == "eval" else number] = event

    # ---- what is asked

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self._fallback)

    @property
    def method(self) -> dict[str, Any]:
        return self.config.get("method") or {}

    @property
    def total_steps(self) -> int | None:
        steps = (self.config.get("config") or {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def tokens_per_island_step(self) -> float | None:
        tokens = self.config.get("tokens_per_step")
        return float(tokens) / (1 if self.elastic else max(1, int(self.config.get("islands") or 1))) if tokens else None

    @property
    def elastic(self) -> bool:
        """Whether islands come and go."""
        return any(island.joined is not None for island in self.islands.values())

    @property
    def island_count(self) -> int:
        """Of islands that take part, or did when the run ended."""
        present = [island for island in self.islands.values() if island.left is None or island.ended]
        return max(len(present), 0 if self.elastic else int(self.config.get("islands") or 1), 1)

    @property
    def finished(self) -> bool:
        """Whether it has come to its end. All islands come to it together, or soon after the first."""
        return self.end is not None

    @property
    def seconds_per_step(self) -> float | None:
        """By the wall clock, over the last steps: evaluations and checkpoints included."""
        if len(self._marks) < 2:
            return None
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        return (end - begin) / (last - first) if last > first and end > begin else None

    def summary(self) -> dict[str, Any]:
        """The fields of the report's summary, so far; those of the end event win."""
        rows, evals = self.steps.rows, self.evals.rows
        seconds, waited = (sum(row[column] for row in rows) for column in (SECONDS, WAIT))
        wall = rows[-1][WALL] if rows else 0.0
        so_far = {
            "val_loss": evals[-1][4] if evals else None,
            "val_bits_per_byte": evals[-1][5] if evals else None,
            "bytes_sent": sum(row[BYTES] for row in rows),
            "peak_bytes_per_step": max((row[PEAK] for row in rows), default=0),
            "compute_utilization": 1 - waited / seconds if seconds else None,
            "tokens_per_second": self.tokens / wall if wall else None,
            "wall_seconds": wall,
            "steps": self.last_step,
            "tokens": self.tokens,
        }
        end = of_the_whole(self.end or {}, self.elastic)
        known = {name: value if end.get(name) is None else end[name] for name, value in so_far.items()}
        return {"finished": self.finished, "byte_ratio": None, "worth": None, **known}

    def about(self) -> dict[str, Any]:
        """What does not change from step to step, in the words of the report."""
        return {
            "name": self.name,
            "method": str(self.config.get("method_name") or "unknown"),
            "dataParallel": bool(self.config) and self.config.get("method") is None,
            "alone": bool(self.config) and self.island_count == 1 and not self.method,
            "parameters": self.config.get("parameters"),
            "layers": self.config.get("layers"),
            "fragments": self.config.get("fragments") or [],
            "syncEvery": self.method.get("sync_every"),
            "lateness": lateness_of(self.method),
            "knobs": self.method,
            "sample": self.sample,
            "config": self.config.get("config") or {},
        }

    # ---- taking in events

    def _island(self, number: int) -> LiveIsland | None:
        if number not in self.islands and len(self.islands) < MOST_ISLANDS and number >= 0:
            self.islands[number] = LiveIsland(number)
        return self.islands.get(number)

    def _tick(self, event: Event) -> None:
        """The wall clock, as `Run.wall_clock` counts it: time between a crash and its resume does not count."""
        time = float(event.get("time") or 0.0)
        self.last_time = max(self.last_time, time)
        if not time or event["event"] == "gone":
            return
        if self._before is None:
            if event["event"] == "step":
                self._wall, self._before = float(event.get("seconds") or 0.0), time
        else:
            restarted = event["event"] in ("config", "resume")
            self._wall += 0.0 if restarted else max(0.0, time - self._before)
            self._before = time if restarted else max(self._before, time)

    def _take_config(self, event: Event) -> None:
        if not self.config or not self.elastic:  # where islands come and go, all say the same: the first counts
            self.config, self.config_version = event, self.version

    def _take_step(self, event: Event) -> None:
        island, place = self.islands[int(event.get("island") or 0)], int(event["step"])
        island.take_step(event)
        self.last_step = max(self.last_step, place) if self.steps.rows else place
        self.tokens = max(self.tokens, int(event.get("tokens") or 0))
        sent, received = int(event.get("bytes_sent") or 0), int(event.get("bytes_received") or 0)
        values = {"tokens": int(event.get("tokens") or 0), "wall": self._wall, "sent": sent}
        values.update(seconds=island.seconds[-1], waited=island.waits[-1])
        loss = event.get("loss")
        self.steps.add(place, values, None if loss is None else float(loss), self.version)
        if event.get("time"):
            self.rates.add(island.number, float(event["time"]), (1, sent, received), self.version)
            if not self._marks or place > self._marks[-1][1]:
                self._marks.append((float(event["time"]), place))

    def _take_send(self, event: Event) -> None:
        self.rounds.sent(event, self.version)

    def _take_apply(self, event: Event) -> None:
        self.rounds.applied(event, self.version)
        if event.get("slack_seconds") is not None:
            self.islands[int(event.get("island") or 0)].slacks.append(float(event["slack_seconds"]))

    def _take_excluded(self, event: Event) -> None:
        self.rounds.excluded(event, self.version)

    def _take_catch_up(self, event: Event) -> None:
        self.rounds.caught_up(event, self.version)

    def _take_nonfinite(self, event: Event) -> None:
        island = self.islands[int(event.get("island") or 0)]
        island.nonfinite_round, island.rounds_at_nonfinite = int(event["round"]), island.rounds_in
        self.rounds.mark(event, "n", self.version)

    def _take_sealed(self, event: Event) -> None:
        for number in (*event["islands"], *event["missing"]):
            self._island(int(number))
        self.rounds.sealed(event, self.version)
        if not self.steps.rows:  # nothing else to go by
            self.last_step = max(self.last_step, int(event["clock"]))

    def _take_announced(self, event: Event) -> None:
        self.rounds.has_seals = True
        self.islands[int(event["island"])].joined = int(event["round"])

    def _take_departed(self, event: Event) -> None:
        self.islands[int(event["island"])].left = int(event["round"])

    def _take_join(self, event: Event) -> None:
        """What an island's own log says; the store knows the round."""
        island = self.islands[int(event["island"])]
        island.joined = 0 if island.joined is None else island.joined

    def _take_leave(self, event: Event) -> None:
        island = self.islands[int(event["island"])]
        island.left = 0 if island.left is None else island.left

    def _take_island(self, event: Event) -> None:
        self.islands[int(event["island"])].host = str(event.get("host") or "")

    def _take_gone(self, event: Event) -> None:
        island = self.islands[int(event["island"])]
        if island.gone is None and not self.finished:
            island.gone = event

    def _take_eval(self, event: Event) -> None:
        if event.get("val_loss") is None:
            return
        row = [event.get(name) for name in ("step", "tokens", "bytes_sent")]
        self.evals.append([*row, self._wall, event["val_loss"], event.get("val_bits_per_byte")], self.version)
        if len(self.evals.rows) > MOST_EVALS:
            self.evals.replace([*self.evals.rows[:-1:2], self.evals.rows[-1]], self.version)

    def _take_sample(self, event: Event) -> None:
        self.sample, self.config_version = event, self.version

    def _take_resume(self, event: Event) -> None:
        step = int(event["step"])
        self.steps.cut(step, self.version)
        self.evals.replace([row for row in self.evals.rows if (row[0] or 0) <= step], self.version)
        self.rounds.clear()
        self._marks.clear()
        self.end, self.last_step, self.tokens = None, step, max((row[2] for row in self.steps.rows), default=0)
        for number in list(self.islands):
            self.islands[number] = LiveIsland(number, step=step, host=self.islands[number].host)
        self.rounds.islands = self.islands

    def _take_end(self, event: Event) -> None:
        self.end = event
        island = self.islands.get(int(event.get("island") or 0))
        if island is not None:
            island.ended = True

    def _take_reset(self, event: Event) -> None:
        self.clear()

    def _take_torn(self, event: Event) -> None:
        self._tear(int(event["line"]), str(event["text"]))

    def _tear(self, line: int, text: str) -> None:
        self.torn += 1
        self.first_torn = self.first_torn or (f"line {line}: {text}" if line else text)[:200]
