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
from isles.elastic.requests import Answer, Requests, Then
from isles.elastic.snapshots import put_all


def open_run(
    requests: Requests, own: Run, start: Mapping[str, Any], now: float, then: Callable[[Run, str, float], None]
) -> None:
    """Reads run.json, or makes it: `own`, with the parts of its state, by name. Calls back with its digest.

    Who brings no state has seen the run before, and never makes one.
    """

    def read(answer: Answer, later: float) -> str | None:
        if answer.status == "ok":
            join(answer.value, later)
        elif start:
            put_all(requests, start, later, make)
        else:
            return "it was there, and is missing"
        return None

    def make(later: float) -> None:
        created: Then = lambda answer, last: join(answer.value or own.pack(), last)
        requests.start(later, "create", RUN, created, own.pack())

    def join(data: bytes, later: float) -> None:
        run = Run.parse(data, RUN)
        run.check(own)
        then(run, digest(data), later)

    requests.start(now, "get", RUN, read)


def claim(looks: Looks, island: int, own: Announcement, now: float, then: Callable[[int, float], None]) -> None:
    """Takes the number `island`, or the next one that is free; calls back with it."""

    name = island_name(island)

    def created(answer: Answer, later: float) -> None:
        if answer.status == "exists" and Announcement.parse(answer.value, name).token != own.token:
            claim(looks, island + 1, own, later, then)
        else:
            then(island, later)

    looks.ask(now, name, created, "create", own.pack())
