"""A run, read from its event log: curves over all islands, rounds in flight, and a one-line summary.

Report and table both start here, so they agree on every number. Numbers of the `end` event win; for a run that crashed
or is still going they are computed from its steps.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles.view.events import Event, read


@dataclass
class Step:
    """One inner step of all islands together: sums over islands, and the mean of their losses."""

    step: int
    tokens: int = 0
    wall_seconds: float = 0.0
    bytes_sent: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    engine_seconds: float = 0.0
    """Spent in isles, waiting included."""
    losses: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float | None:
        """The mean over islands; None if no island has a finite one."""
        return sum(self.losses) / len(self.losses) if self.losses else None


@dataclass
class Round:
    """One fragment's way from one island to all: sent after a step, applied after a later one (None: not yet)."""

    island: int
    fragment: int
    round: int
    sent_step: int
    num_bytes: int
    sent_time: float
    applied_step: int | None = None
    flight_seconds: float | None = None
    wait_seconds: float | None = None


@dataclass(frozen=True)
class Summary:
    """What a row of the summary table says. None: not known (yet)."""

    name: str
    method: str
    finished: bool
    val_loss: float | None
    val_bits_per_byte: float | None
    bytes_sent: int
    byte_ratio: float | None
    """How many times fewer bytes for the same number of tokens than the reference run; 1 for the reference itself."""
    worth: float | None
    """What the other islands add, as a share of what they add in data-parallel training."""
    peak_bytes_per_step: int
    compute_utilization: float | None
    tokens_per_second: float | None
    wall_seconds: float
    steps: int
    tokens: int


class Run:
    """One run, read from its folder or made of its events."""

    def __init__(self, events: list[Event], name: str = "run") -> None:
        self.events = events
        self.config: Event = self._last("config") or {}
        self.name = str(self.config.get("name") or name)
        self.islands = max(
            int(self.config.get("islands") or 1), 1 + max((e.get("island") or 0 for e in events), default=0)
        )
        self.method_name = str(self.config.get("method_name") or "unknown")
        self.data_parallel = bool(self.config) and self.config.get("method") is None
        self.steps = self._steps()
        self.evals = [event for event in events if event["event"] == "eval"]
        self.rounds = _rounds(events)
        self.sample = self._last("sample")
        self.end = self._last("end")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """Reads a run from its folder, or from its event file."""
        place, events = Path(path).resolve(), read(path)
        try:
            return cls(events, (place if place.is_dir() else place.parent).name)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} has an event that is not as isles.view.events describes it: {error!r}") from error

    @property
    def method(self) -> dict[str, Any]:
        """The fields of the run's Method; empty for data-parallel."""
        return self.config.get("method") or {}

    @property
    def alone(self) -> bool:
        """Whether it is one island without others: it sends nothing."""
        return bool(self.config) and self.islands == 1

    @property
    def lateness(self) -> int:
        """Steps between the send of a round and its use."""
        return lateness_of(self.method)

    def wall_clock(self) -> list[tuple[Event, float]]:
        """Every event with the seconds since training began; time between a crash and its resume does not count."""
        result: list[tuple[Event, float]] = []
        clock, before = 0.0, None
        for event in self.events:
            now, restarted = float(event.get("time") or 0.0), event["event"] in ("config", "resume")
            if before is None:
                if event["event"] == "step":  # training began when the first step did
                    clock, before = float(event.get("seconds") or 0.0), now
            else:
                clock += 0.0 if restarted else max(0.0, now - before)
                before = now if restarted else max(before, now)
            result.append((event, clock))
        return result

    def _last(self, kind: str) -> Event | None:
        return next((event for event in reversed(self.events) if event["event"] == kind), None)

    def _steps(self) -> list[Step]:
        steps: dict[int, Step] = {}
        for event, wall_seconds in self.wall_clock():
            if event["event"] != "step" or not isinstance(event.get("step"), int):
                continue
            step = steps.setdefault(event["step"], Step(event["step"]))
            step.tokens = max(step.tokens, int(event.get("tokens") or 0))
            step.wall_seconds = max(step.wall_seconds, wall_seconds)
            step.bytes_sent += int(event.get("bytes_sent") or 0)
            step.step_seconds += float(event.get("seconds") or 0.0)
            waited = float(event.get("wait_seconds") or 0.0)
            step.wait_seconds += waited
            step.engine_seconds += float(event.get("engine_seconds") or waited)
            if event.get("loss") is not None:
                step.losses.append(float(event["loss"]))
        return [steps[number] for number in sorted(steps)]


def lateness_of(method: dict[str, Any]) -> int:
    """Steps between the send of a round and its use, for the fields of a Method.

    >>> lateness_of({"overlap": 5}), lateness_of({"update": "eager", "delay_rounds": 2, "sync_every": 30})
    (5, 60)
    """
    if method.get("update", "fresh") == "fresh":
        return int(method.get("overlap") or 0)
    return int(method.get("delay_rounds") or 1) * int(method.get("sync_every") or 1)


def of_the_whole(end: Event, elastic: bool) -> Event:
    """What an end event says of the whole run: where islands come and go, an island counts for itself alone.

    >>> of_the_whole({"val_loss": 3.0, "steps": 60, "bytes_sent": 9}, elastic=True)
    {'val_loss': 3.0, 'steps': 60}
    """
    shared = ("val_loss", "val_bits_per_byte", "steps")
    return {name: value for name, value in end.items() if name in shared} if elastic else end


def summarize(runs: list[Run]) -> list[Summary]:
    """One summary per run. Bytes are compared with those of the `reference` run."""
    drafts = [_summary(run) for run in runs]
    index = reference(runs)
    base = _bytes_per_token(drafts[index]) if index is not None else 0.0
    return [
        dataclasses.replace(
            draft,
            byte_ratio=base / own if base and (own := _bytes_per_token(draft)) else None,
            worth=_worth(number, runs, drafts),
        )
        for number, draft in enumerate(drafts)
    ]


def reference(runs: list[Run]) -> int | None:
    """Which run the others are compared with; None if there is nothing to compare.

    The first data-parallel run, or else the run that sent most; never a run of one island, which sends nothing.
    """
    several = [index for index, run in enumerate(runs) if run.islands > 1]
    if len(runs) < 2 or not several:
        return None
    baseline = next((index for index in several if runs[index].data_parallel), None)
    return max(several, key=lambda index: _summary(runs[index]).bytes_sent) if baseline is None else baseline


def _worth(number: int, runs: list[Run], summaries: list[Summary]) -> float | None:
    """(alone - own) / (alone - data-parallel) in final validation loss: 0 is one island alone, 1 is data-parallel.

    All three are finished runs of the same model and length, the data-parallel one of as many islands.
    """
    own, islands = summaries[number], runs[number].islands
    alike = [
        index
        for index, (run, summary) in enumerate(zip(runs, summaries, strict=True))
        if summary.finished
        and summary.val_loss is not None
        and summary.steps == own.steps
        and run.config.get("parameters") == runs[number].config.get("parameters")
    ]
    if islands == 1 or number not in alike:
        return None
    alone = next((summaries[index].val_loss for index in alike if runs[index].alone), None)
    together = (index for index in alike if runs[index].data_parallel and runs[index].islands == islands)
    baseline = next((summaries[index].val_loss for index in together), None)
    if own.val_loss is None or alone is None or baseline is None or alone <= baseline:
        return None
    return (alone - own.val_loss) / (alone - baseline)


def _bytes_per_token(summary: Summary) -> float:
    return summary.bytes_sent / summary.tokens if summary.tokens else 0.0


def distinct_names(runs: list[Run]) -> list[str]:
    """A name for each run; runs of the same name are numbered.

    >>> distinct_names([Run([], "a"), Run([], "b"), Run([], "a")])
    ['a', 'b', 'a (2)']
    """
    names: list[str] = []
    for run in runs:
        name, number = run.name, 2
        while name in names:
            name, number = f"{run.name} ({number})", number + 1
        names.append(name)
    return names


def _summary(run: Run) -> Summary:
    elastic = any(event["event"] == "join" for event in run.events)
    end, last_eval = of_the_whole(run.end or {}, elastic), (run.evals or [{}])[-1]
    seconds = sum(step.step_seconds for step in run.steps)
    in_isles = sum(step.engine_seconds for step in run.steps)
    tokens = run.steps[-1].tokens if run.steps else 0
    wall = run.steps[-1].wall_seconds if run.steps else 0.0
    worked_out: dict[str, Any] = {
        "val_loss": last_eval.get("val_loss"),
        "val_bits_per_byte": last_eval.get("val_bits_per_byte"),
        "bytes_sent": sum(step.bytes_sent for step in run.steps),
        "peak_bytes_per_step": max((step.bytes_sent for step in run.steps), default=0),
        "compute_utilization": 1 - in_isles / seconds if seconds else None,
        "tokens_per_second": tokens / wall if wall else None,
        "wall_seconds": wall,
        "steps": run.steps[-1].step if run.steps else 0,
        "tokens": tokens,
    }
    known: dict[str, Any] = {name: value if end.get(name) is None else end[name] for name, value in worked_out.items()}
    method = "one island" if run.alone and run.data_parallel else run.method_name
    return Summary(name=run.name, method=method, finished=run.end is not None, byte_ratio=None, worth=None, **known)


def _rounds(events: list[Event]) -> list[Round]:
    """Sends paired with their applies. Early delayed and eager rounds apply what was never sent: those are left out."""
    rounds: dict[tuple[Any, ...], Round] = {}
    for event in events:
        key = (event.get("island", 0), event.get("fragment"), event.get("round"))
        if event["event"] == "send":
            rounds[key] = Round(
                island=int(key[0]),
                fragment=int(event["fragment"]),
                round=int(event["round"]),
                sent_step=int(event["step"]),
                num_bytes=int(event.get("num_bytes") or 0),
                sent_time=float(event.get("time") or 0.0),
            )
        elif event["event"] == "apply" and key in rounds:
            found = rounds[key]
            found.applied_step = int(event["step"])
            found.flight_seconds = float(event.get("time") or 0.0) - found.sent_time
            found.wait_seconds = float(event.get("seconds") or 0.0)
    return list(rounds.values())
