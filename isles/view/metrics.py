"""`/metrics`: the numbers of watched runs as Prometheus text, for those who have Grafana already.

The curves of TensorBoard and Weights & Biases (`isles.view.scalars`) under the same names, with `_` for `/`, and what
only somebody who watches knows: who is in, how many rounds, how many problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from isles.view.scalars import scalars
from isles.view.watcher import Watched, Watcher

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[str, str, dict[str, str], float]
"""Name, kind, labels, value."""


def text(watcher: Watcher) -> str:
    """All metrics, those of one name together."""
    groups: dict[str, list[str]] = {}
    runs = watcher.looked_at()
    names = [run.live.name for run in runs]
    for run in runs:
        own = run.live.name if names.count(run.live.name) == 1 else f"{run.live.name} ({run.place})"
        for name, kind, labels, value in _samples(run, {"run": own}):
            lines = groups.setdefault(name, [f"# TYPE {name} {kind}"])
            inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            lines.append(f"{name}{{{inside}}} {_number(value)}")
    return "".join(f"{line}\n" for lines in groups.values() for line in lines)


def _samples(run: Watched, own: dict[str, str]) -> Iterable[Sample]:
    now = run.now()
    state = run.state(now)
    for event in run.live.latest.values():
        for name, island, value in scalars(event):
            of_island = {} if island is None else {"island": str(island)}
            yield f"isles_{name.replace('/', '_')}", "gauge", own | of_island, value
    yield "isles_finished", "gauge", own, float(run.live.finished)
    yield "isles_problems", "gauge", own, float(len(run.problems(now)))
    gauges = {"step": "step", "steps": "steps_total", "tokensPerSecond": "tokens_per_second", "islands": "islands"}
    gauges["secondsLeft"] = "seconds_left"
    for field, name in gauges.items():
        if state[field] is not None:
            yield f"isles_run_{name}", "gauge", own, float(state[field])
    yield from _islands(run, now, own)


def _islands(run: Watched, now: float, own: dict[str, str]) -> Iterator[Sample]:
    counters = {"sent": "network_bytes_sent", "received": "network_bytes_received", "roundsIn": "rounds_in"}
    counters |= {"roundsOut": "rounds_out", "caughtUp": "rounds_caught_up"}
    for row in run.islands(now):
        labels = own | {"island": str(row["island"])}
        yield "isles_island_up", "gauge", labels, float(row["state"] in ("in", "out", "joined", "done"))
        yield "isles_island_in", "gauge", labels, float(row["state"] in ("in", "done"))
        yield "isles_island_step", "gauge", labels, float(row["step"])
        for field, name in counters.items():
            yield f"isles_{name}_total", "counter", labels, float(row[field])


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(label: str) -> str:
    r"""
    >>> print(_escaped('a"b\n'))
    a\"b\n
    """
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
