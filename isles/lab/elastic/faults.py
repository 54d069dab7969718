"""What can go wrong, each as a function that does it once and returns when it is over.

A fault happens to a fleet that trains (`isles.lab.elastic.fleet`). Whom it hits, when within a round, and for how long
is chosen by a generator with a seed; what follows from it is measured from events and seals afterwards
(`isles.lab.elastic.figures`). Where an island is started again, or a new one joins, the fault is over when that island
is in a round.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isles.lab.elastic.fleet import STARTING_SECONDS, Fleet, Life

SLOWER = 10.0
SLOW_ROUNDS = 15
"""For which a slow island is looked at."""


@dataclass(frozen=True)
class Injected:
    """One fault, as it happened. Times are seconds since the epoch."""

    kind: str
    begin: float
    end: float
    victims: tuple[int, ...]
    """Slots; all others are survivors."""
    detail: str = ""
    over: bool = True
    """Whether all was well again in the end."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    what: str
    inject: Callable[[Fleet, random.Random], Injected]
    store: str = ""
    """The only kind of store for which it makes sense."""


def kill(fleet: Fleet, rng: random.Random) -> Injected:
    """One island is killed, and started again after a while."""
    life = rng.choice(fleet.alive())
    begin = time.time()
    fleet.kill(life)
    fleet.wait(rng.uniform(0.0, 2 * fleet.options.patience))
    over = _started(fleet, [life.slot])
    return Injected("kill", begin, time.time(), (life.slot,), f"island {life.slot}", over)


def all_killed(fleet: Fleet, rng: random.Random) -> Injected:
    """All islands are killed, and started again in another order."""
    slots = [life.slot for life in fleet.alive()]
    begin = time.time()
    for life in fleet.alive():
        fleet.kill(life)
    rng.shuffle(slots)
    over = _started(fleet, slots)
    return Injected("all-killed", begin, time.time(), tuple(slots), "everybody", over)


def join(fleet: Fleet, rng: random.Random) -> Injected:
    """A new island joins."""
    used = {life.slot for life in fleet.alive()}
    slot = min(slot for slot in range(fleet.slots) if slot not in used)
    begin = time.time()
    over = _started(fleet, [slot])
    return Injected("join", begin, time.time(), (slot,), f"island {slot}", over)


def _started(fleet: Fleet, slots: Sequence[int]) -> bool:
    lives = [fleet.start(slot) for slot in slots]
    return fleet.wait_until(lambda: all(life.is_in() for life in lives), STARTING_SECONDS)


def stop(fleet: Fleet, rng: random.Random) -> Injected:
    """One island stands still for longer than patience."""
    life, seconds = rng.choice(fleet.alive()), rng.uniform(1.5, 3.0) * fleet.options.patience
    begin = time.time()
    fleet.signal(life, signal.SIGSTOP)
    fleet.wait(seconds)
    fleet.signal(life, signal.SIGCONT)
    return _back(fleet, "stop", begin, life, f"island {life.slot} for {seconds:.1f} s")


def link_down(fleet: Fleet, rng: random.Random) -> Injected:
    """One island's link is down for longer than patience."""
    life, seconds = rng.choice(fleet.alive()), rng.uniform(1.5, 3.0) * fleet.options.patience
    begin = time.time()
    fleet.network.link_down(life.slot)
    fleet.wait(seconds)
    fleet.network.link_up(life.slot)
    return _back(fleet, "link-down", begin, life, f"island {life.slot} for {seconds:.1f} s")


def link_slow(fleet: Fleet, rng: random.Random) -> Injected:
    """One island's link has a tenth of its bandwidth for a while."""
    life, seconds = rng.choice(fleet.alive()), rng.uniform(3.0, 5.0) * fleet.options.patience
    begin = time.time()
    fleet.network.set_bandwidth(fleet.options.bandwidth / 10, life.slot)
    fleet.wait(seconds)
    fleet.network.set_bandwidth(fleet.options.bandwidth, life.slot)
    return _back(fleet, "link-slow", begin, life, f"island {life.slot} for {seconds:.1f} s")


def _back(fleet: Fleet, kind: str, begin: float, life: Life, detail: str) -> Injected:
    """Over when the island is in a round again."""
    end = time.time()
    again = lambda: any(event["own"] and event["time"] > end for event in life.of("round"))
    over = fleet.wait_until(again, STARTING_SECONDS)
    return Injected(kind, begin, time.time(), (life.slot,), detail, over)


def store_down(fleet: Fleet, rng: random.Random) -> Injected:
    """The store hangs, or refuses every connection."""
    hangs, seconds = rng.random() < 0.5, rng.uniform(1.0, 3.0) * fleet.options.patience
    begin = time.time()
    if hangs:
        fleet.signal_store(signal.SIGSTOP)
    else:
        fleet.set_mood(refuses=True)
    fleet.wait(seconds)
    if hangs:
        fleet.signal_store(signal.SIGCONT)
    else:
        fleet.set_mood()
    return _goes_on(fleet, "store-down", begin, f"{'hangs' if hangs else 'refuses'} for {seconds:.1f} s")


def store_errors(fleet: Fleet, rng: random.Random) -> Injected:
    """A part of all requests fails: 409, 412, 429, 500, 503, or with an answer that is lost."""
    share, seconds = rng.uniform(0.1, 0.4), rng.uniform(3.0, 5.0) * fleet.options.patience
    begin = time.time()
    fleet.set_mood(errors=share, seed=rng.randrange(1 << 30))
    fleet.wait(seconds)
    fleet.set_mood()
    return _goes_on(fleet, "store-errors", begin, f"{share:.0%} of requests for {seconds:.1f} s")


def disk_full(fleet: Fleet, rng: random.Random) -> Injected:
    """The disk of the folder is full for a while."""
    assert fleet.disk is not None
    seconds = rng.uniform(1.0, 3.0) * fleet.options.patience
    begin = time.time()
    fleet.disk.fill()
    fleet.wait(seconds)
    fleet.disk.free()
    return _goes_on(fleet, "disk-full", begin, f"for {seconds:.1f} s")


def _goes_on(fleet: Fleet, kind: str, begin: float, detail: str) -> Injected:
    """Over when everybody is in a round again."""
    end, lives = time.time(), fleet.alive()
    again = lambda life: any(event["own"] and event["time"] > end for event in life.of("round"))
    over = fleet.wait_until(lambda: all(map(again, lives)), STARTING_SECONDS)
    return Injected(kind, begin, time.time(), (), detail, over)


def slow_island(fleet: Fleet, rng: random.Random) -> Injected:
    """The island on machine 0 has been slow from its start; this is how long it is looked at."""
    begin = time.time()
    fleet.wait(SLOW_ROUNDS * fleet.options.round_seconds)
    return Injected("slow-island", begin, time.time(), (0,), f"island 0, {SLOWER:g} times slower")


FAULTS = {
    "kill": Fault("kill -9 of one island, which starts again", kill),
    "stop": Fault("SIGSTOP of one island for longer than patience, then SIGCONT", stop),
    "link-down": Fault("one link down for longer than patience, and up again", link_down, "s3"),
    "link-slow": Fault("one link 10 times slower for a while", link_slow, "s3"),
    "store-down": Fault("the store hangs or refuses, and comes back", store_down, "s3"),
    "store-errors": Fault("409, 412, 429, 500, 503 and lost answers", store_errors, "s3"),
    "disk-full": Fault("the disk of a folder is full, and has room again", disk_full, "folder"),
    "all-killed": Fault("kill -9 of all islands, which start again", all_killed),
    "join": Fault("a new island joins", join),
    "slow-island": Fault(f"one island is {SLOWER:g} times slower than the others", slow_island),
}


def parse_faults(text: str) -> list[str]:
    """
    >>> parse_faults("kill,join"), parse_faults("none")
    (['kill', 'join'], [])
    """
    if text in ("all", "none"):
        return list(FAULTS) if text == "all" else []
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    for word in wanted:
        if word not in FAULTS:
            raise ValueError(f"--faults {word!r} is unknown: all, none, or a list of {', '.join(FAULTS)}")
    return wanted
