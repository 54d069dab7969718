"""How an island gets into a run: run.json, then the global model, then a number.

Whoever finds no run makes one, from the state that it has. The parts of that state are stored first, so the state is
complete when run.json exists; of several who try, one has made the run, and all others join it. A newcomer then takes
the newest snapshot (`snapshots`) and replays the seals after it. Only then does it take a number: from its announcement
on the others wait for what it sends.

A number has one writer for ever. An island that comes back, be it as the same process, takes a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isles.elastic.looks import Looks
from isles.elastic.objects import RUN, Announcement, Run, digest, island_name
from isles.elastic.requests import Answer, Requests
from isles.elastic.snapshots import put_all


def open_run(
    requests: Requests, own: Run, start: Mapping[str, Any], now: float, then: Callable[[Run, str, float], None]
) -> None:
    """Reads run.json, or makes it: `own`, with the parts of its state, by name. Calls back with its digest."""

    def read(answer: Answer, later: float) -> None:
        if answer.status == "missing":
            put_all(requests, start, later, make)
            return
        run = Run.parse(answer.value, RUN)
        run.check(own)
        then(run, digest(answer.value), later)

    def make(later: float) -> None:
        requests.start(later, "create", RUN, lambda _, last: requests.start(last, "get", RUN, read), own.pack())

    requests.start(now, "get", RUN, read)


def claim(looks: Looks, island: int, own: Announcement, now: float, then: Callable[[int, float], None]) -> None:
    """Takes the number `island`, or the next one that is free; calls back with it."""

    def created(answer: Answer, later: float) -> None:
        if answer.status == "exists":
            looks.ask(later, island_name(island), compare)
        else:
            then(island, later)

    def compare(answer: Answer, later: float) -> None:
        if answer.status == "missing":  # a store that refused without having it: try again
            claim(looks, island, own, later, then)
        elif Announcement.parse(answer.value, island_name(island)).token == own.token:  # the answer had been lost
            then(island, later)
        else:
            claim(looks, island + 1, own, later, then)

    looks.ask(now, island_name(island), created, "create", own.pack())
