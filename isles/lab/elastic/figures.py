"""Figures of an elastic run from what its islands and its store have recorded. Pure: events and seals in, numbers out.

in a round     an island is in a round if the seal lists it, which is what counts; being alive does not
waited         what the training loop waited for rounds, by its `apply` events, beyond what an undisturbed run waits;
               and the part of it for rounds whose seal says that somebody was waited for in vain
lost rounds    that others sealed without a survivor: its steps are in a later one
skipped steps  by which the clock of a survivor jumped forward
joiner         from the start of a process until the first round that lists it: seconds, rounds, bytes it got by then
identical      whoever has applied the same rounds has the same global model, by digest, to the last bit
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from isles.lab.elastic.faults import Injected
from isles.view.events import Event


class Lived(Protocol):
    """A process that has been (`isles.lab.elastic.fleet.Life`)."""

    slot: int
    started: float
    ended: float
    killed: bool

    def of(self, kind: str) -> list[Event]: ...


def of_run(
    lives: Sequence[Lived],
    injected: Sequence[Injected],
    audit: dict[str, Any],
    waiting: float | None,
    patience: float,
) -> dict[str, Any]:
    """All of them. `waiting` is what an apply waits in an undisturbed run, on average; None: this is one."""
    seals = audit["seals"]
    in_vain = _in_vain(seals)
    survivors = [each for fault in injected for each in _survivors(lives, fault, waiting or 0.0, patience, in_vain)]
    joiners = [each for life in lives if (each := _joiner(life, injected))]
    waits = [each["waited_seconds"] for each in survivors]
    vain = [each["waited_in_vain_seconds"] for each in survivors]
    return {
        "rounds": len(seals),
        "islands_in_a_round": _mean([len(seal["islands"]) for seal in seals]),
        "islands_alive": _alive(lives, seals),
        "counted_steps": counted_steps(seals),
        "wait_seconds_per_apply": _mean([event["seconds"] for life in lives for event in life.of("apply")]),
        "utilization": utilisation(lives),
        "survivors": survivors,
        "survivor_waited_seconds": _mean(waits),
        "survivor_waited_seconds_most": max(waits, default=None),
        "survivor_waited_in_vain_seconds": _mean(vain),
        "survivor_waited_in_vain_seconds_most": max(vain, default=None),
        "survivor_lost_rounds": sum(each["lost_rounds"] for each in survivors),
        "survivor_skipped_steps": sum(each["skipped_steps"] for each in survivors),
        "joiners": joiners,
        "joiner_seconds": _mean([each["seconds_until_in"] for each in joiners]),
        "joiner_seconds_after_joining": _mean([each["seconds_after_joining"] for each in joiners]),
        "joiner_rounds": max((each["rounds_until_in"] for each in joiners), default=None),
        "joiner_bytes": _mean([each["bytes_received"] for each in joiners]),
        **identity(lives, audit),
    }


def counted_steps(seals: Sequence[dict[str, Any]]) -> float:
    """Steps that are in the global model: of all islands, as the mean over fragments."""
    total: dict[int, int] = defaultdict(int)
    for seal in seals:
        total[seal["fragment"]] += sum(seal["steps"])
    return statistics.fmean(total.values()) if total else 0.0


def identity(lives: Sequence[Lived], audit: dict[str, Any]) -> dict[str, Any]:
    """Whether all who have seen a round have the same global model after it."""
    seen: dict[int, list[str]] = defaultdict(list)
    for life in lives:
        for event in (*life.of("round"), *life.of("final")):
            seen[event["number"]].append(event["digest"])
    if audit.get("digest"):
        seen[audit["number"]].append(audit["digest"])
    common = [digests for digests in seen.values() if len(digests) > 1]
    differing = sorted(number for number, digests in seen.items() if len(set(digests)) > 1)
    last = audit.get("number")
    replayed = last is not None and len(seen[last]) > 1 and last not in differing
    return {
        "identical": bool(common) and not differing,
        "rounds_compared": len(common),
        "rounds_differing": differing[:20],
        "replay_is_the_final_model": replayed,
    }


def utilisation(lives: Sequence[Lived]) -> dict[int, float]:
    """By slot: the share of the time of steps that was not spent in isles, waiting included."""
    found: dict[int, float] = {}
    for slot in sorted({life.slot for life in lives}):
        steps = [event for life in lives if life.slot == slot for event in life.of("step")]
        seconds = sum(event["seconds"] for event in steps)
        if seconds:
            found[slot] = 1 - sum(event["engine_seconds"] for event in steps) / seconds
    return found


def presence(lives: Sequence[Lived], seals: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By slot: the share of rounds, from the first one that an island was in until its end, that list it."""
    found: dict[int, float] = {}
    for slot in sorted({life.slot for life in lives}):
        own = [life for life in lives if life.slot == slot]
        ranks = {event["island"] for life in own for event in life.of("round")}
        within = [seal["number"] for seal in seals if ranks & set(seal["islands"])]
        if within:
            found[slot] = len(within) / (within[-1] - within[0] + 1)
    return found


def _in_vain(seals: Sequence[dict[str, Any]]) -> set[tuple[int, int]]:
    """Fragment and round of the seals that name somebody who was missing. Rounds of a fragment count from 1."""
    found, rounds = set(), defaultdict[int, int](int)
    for seal in seals:
        rounds[seal["fragment"]] += 1
        if seal["missing"]:
            found.add((seal["fragment"], rounds[seal["fragment"]]))
    return found


def _survivors(
    lives: Sequence[Lived], fault: Injected, waiting: float, patience: float, in_vain: set[tuple[int, int]]
) -> list[dict[str, Any]]:
    """What a fault cost each island that it did not hit."""
    found = []
    end = fault.end + patience
    for life in lives:
        was_in = any(event["own"] and event["time"] < fault.begin for event in life.of("round"))
        if life.slot in fault.victims or not was_in or life.ended < fault.end:
            continue
        applies, steps = (_between(life.of(kind), fault.begin, end) for kind in ("apply", "step"))
        lost = [event for kind in ("excluded", "catch_up") for event in _between(life.of(kind), fault.begin, end)]
        jumps = [later["step"] - earlier["step"] - 1 for earlier, later in itertools.pairwise(steps)]
        waited = sum(event["seconds"] for event in applies)
        found.append(
            {
                "slot": life.slot,
                "fault": fault.kind,
                "seconds": end - fault.begin,
                "waited_seconds": max(0.0, waited - waiting * len(applies)),
                "waited_in_vain_seconds": sum(
                    event["seconds"] for event in applies if (event["fragment"], event["round"]) in in_vain
                ),
                "longest_wait_seconds": max((event["seconds"] for event in applies), default=0.0),
                "lost_rounds": len(lost),
                "skipped_steps": sum(max(0, jump) for jump in jumps),
            }
        )
    return found


def _between(events: Sequence[Event], begin: float, end: float) -> list[Event]:
    return [event for event in events if begin <= event["time"] <= end]


def _joiner(life: Lived, injected: Sequence[Injected]) -> dict[str, Any] | None:
    """How an island that came later got in; None for one of the first, and for one that never got in."""
    if not injected or life.started < min(fault.begin for fault in injected):
        return None
    rounds = life.of("round")
    first = next((event for event in rounds if event["own"]), None)
    if first is None:
        return None
    return {
        "slot": life.slot,
        "seconds_until_in": first["time"] - life.started,
        "seconds_after_joining": first["time"] - rounds[0]["time"],
        "rounds_until_in": first["number"] - rounds[0]["number"],
        "bytes_received": first["bytes_received"],
    }


def _alive(lives: Sequence[Lived], seals: Sequence[dict[str, Any]]) -> float | None:
    """How many islands had joined and not ended, on average over rounds."""
    when: dict[int, float] = {}
    for life in lives:
        for event in life.of("round"):
            when[event["number"]] = min(event["time"], when.get(event["number"], float("inf")))
    joined = [(life.of("join")[0]["time"], life.ended) for life in lives if life.of("join")]
    times = [when[seal["number"]] for seal in seals if seal["number"] in when]
    return _mean([sum(begin <= time <= end for begin, end in joined) for time in times])


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
