"""One run of elastic islands, from the bare machine to one record: undisturbed, under faults of a kind, or in churn.

All files are in one folder: `island-S.L/` is the L-th life of machine S, as `isles train --store` leaves it, with its
output beside it; `audit/` the replay of the log at the end, `lab.json` the record.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from isles.lab.elastic import figures
from isles.lab.elastic.faults import FAULTS, SLOWER, Injected
from isles.lab.elastic.fleet import ENDING_SECONDS, STARTING_SECONDS, Fleet, Life, Options

Say = Callable[[str], None]
RECORD = "lab.json"


def calm(options: Options, seconds: float, say: Say) -> dict[str, Any]:
    """Nothing happens for so long: what an undisturbed run waits, and who is in its rounds."""
    with options.build() as fleet:
        begin = _begin(fleet, say)
        fleet.wait(seconds)
        return _end(fleet, [], None, begin, say)


def faults(options: Options, kinds: Sequence[str], seed: int, waiting: float | None, say: Say) -> dict[str, Any]:
    """Faults of these kinds, one after the other, at points of rounds that the seed chooses."""
    rng, injected = random.Random(f"{' '.join(kinds)} {seed}"), list[Injected]()
    options = dataclasses.replace(options, spares=options.spares + kinds.count("join"))
    if "slow-island" in kinds:
        options = dataclasses.replace(options, slower={0: SLOWER})
    with options.build() as fleet:
        begin = _begin(fleet, say)
        for kind in kinds:
            fleet.wait(options.patience + rng.uniform(0.0, 2 * options.round_seconds))
            if fleet.failures():
                break
            injected.append(FAULTS[kind].inject(fleet, rng))
            say(f"{kind}: {injected[-1].detail}, over after {injected[-1].end - injected[-1].begin:.1f} s")
        fleet.wait(2 * options.patience)
        return {"fault": ", ".join(dict.fromkeys(kinds)), **_end(fleet, injected, waiting, begin, say)}


def churn(options: Options, every: float, least: int, seed: int, say: Say) -> dict[str, Any]:
    """A kill or a join every so many seconds, until nine tenths of the run are over; then the rest, and the loss."""
    rng, injected, steps = random.Random(f"churn {seed}"), list[Injected](), options.program.config.steps
    with options.build() as fleet:
        begin = _begin(fleet, say)
        clock = lambda: max((event["step"] for life in fleet.alive() for event in life.of("step")[-1:]), default=0)
        ends = lambda: any(life.of("end") for life in fleet.lives)
        while clock() < 0.9 * steps and not ends() and not fleet.failures():
            fleet.wait(every)
            injected.append(_kill_or_join(fleet, rng, least))
            say(f"clock {clock()} of {steps}: {injected[-1].kind} {injected[-1].detail}")
        over = fleet.wait_until(lambda: not fleet.alive(), STARTING_SECONDS + steps * options.step_seconds)
        return {"fault": "churn", "ended": over, **_end(fleet, injected, None, begin, say)}


def undisturbed(options: Options, say: Say) -> dict[str, Any]:
    """A run to its last step in which nothing happens."""
    with options.build() as fleet:
        begin, steps = _begin(fleet, say), options.program.config.steps
        over = fleet.wait_until(lambda: not fleet.alive(), STARTING_SECONDS + 3 * steps * options.step_seconds)
        return {"fault": "undisturbed", "ended": over, **_end(fleet, [], None, begin, say)}


def _kill_or_join(fleet: Fleet, rng: random.Random, least: int) -> Injected:
    alive, now = fleet.alive(), time.time()
    free = [slot for slot in range(fleet.slots) if slot not in {life.slot for life in alive}]
    if not free or (len(alive) > least and rng.random() < 0.5):
        life = rng.choice(alive)
        fleet.kill(life)
        return Injected("kill", now, time.time(), (life.slot,), f"island {life.slot}")
    slot = rng.choice(free)
    fleet.start(slot)
    return Injected("join", now, time.time(), (slot,), f"island {slot}")


def _begin(fleet: Fleet, say: Say) -> float:
    """Starts all islands; returns when all of them are in rounds."""
    lives = [fleet.start(slot) for slot in range(fleet.options.islands)]
    fleet.wait_until(lambda: all(life.is_in() for life in lives), STARTING_SECONDS)
    say(f"{sum(life.is_in() for life in lives)} islands are in rounds")
    return time.time()


def _end(fleet: Fleet, injected: list[Injected], waiting: float | None, begin: float, say: Say) -> dict[str, Any]:
    """Lets all islands leave, and writes the record."""
    wall, options = time.time() - begin, fleet.options
    for life in fleet.alive():
        life.read()
    fleet.ask_to_leave()
    left = fleet.wait_until(lambda: not fleet.alive(), ENDING_SECONDS)
    hanging = [life.folder.name for life in fleet.alive()]
    for life in fleet.alive():
        fleet.kill(life)
    audit = fleet.audit()
    (options.folder / "audit.json").write_text(json.dumps(audit))
    record = {
        **{"islands": options.islands, "bandwidth": options.bandwidth, "store": options.store},
        **{"step_seconds": options.step_seconds, "patience_seconds": options.patience},
        **{"flags": list(options.program.arguments), "wall_seconds": wall, "left_cleanly": left, "hanging": hanging},
        "injected": [dataclasses.asdict(each) for each in injected],
        "failures": fleet.failures(),
        "audit_failure": audit.get("failure"),
        "requests": fleet.served(),
        "val_loss": _loss(fleet.lives),
        "presence": figures.presence(fleet.lives, audit["seals"]),
        **figures.of_run(fleet.lives, injected, audit, waiting, options.patience),
    }
    (options.folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    say(f"{record['rounds']} rounds, {record['islands_in_a_round'] or 0:.2f} islands in one")
    return record


def _loss(lives: list[Life]) -> float | None:
    """Of the last island that came to the end."""
    ends = [event for life in lives for event in life.of("end")]
    return max(ends, key=lambda event: event["time"])["val_loss"] if ends else None
