"""What is wrong with a run that goes on, in words, with what to do about it.

Each problem is one sentence of fact and one of advice. Only what needs somebody's attention is told: a run that goes
well has no problems.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from isles.view import units
from isles.view.live import Live
from isles.view.live_island import LiveIsland

OUT_ROUNDS = 2
"""So many rounds in a row without an island are told."""
TOLD_ROUNDS = 8
"""How long weights that were not finite are told."""
WAITING_SHARE = 0.05
NARROW_SLACK = 0.1
"""Of the overlap: results that arrive so shortly before they are due are told."""
SLOW_PACE = 0.5
LEAST_SAMPLES = 20
MOST_ALIKE = 3
LOST_ANOTHER = ("lost another", " lost it")
"""In the last words of islands that ended because another one did (`isles.wire`)."""


@dataclass(frozen=True)
class Problem:
    """One of them."""

    what: str
    todo: str
    island: int | None = None
    severe: bool = False
    """Whether the run, or an island, has come to a stop."""


def problems(run: Live, now: float, place: str = "") -> list[Problem]:
    """All that are there now, the worst first; `place` is how the command line calls the run."""
    if run.finished:
        return list(_torn(run))
    rules = (_ended(run, now, place), _silent(run, now), _out(run), _waiting(run), _slow(run), _losses(run), _torn(run))
    return [problem for rule in rules for problem in _few(list(rule))]


def _few(alike: list[Problem]) -> list[Problem]:
    """Many islands with the same problem are told by the first ones."""
    if len(alike) <= MOST_ALIKE:
        return alike
    others = len(alike) - MOST_ALIKE + 1
    more = Problem(f"It is the same with {others} more islands.", alike[-1].todo, severe=alike[0].severe)
    return [*alike[: MOST_ALIKE - 1], more]


def _active(run: Live) -> list[LiveIsland]:
    return [i for i in run.islands.values() if i.left is None and i.gone is None and not i.ended]


def _ended(run: Live, now: float, place: str) -> Iterator[Problem]:
    """Processes that have ended before their time."""
    total = run.total_steps
    dead = [i for i in run.islands.values() if i.gone is not None and not (total and i.place >= total)]
    if not dead:
        return
    dead = [island for island in dead if island.left is None]
    resume = f"Continue with: isles train --resume --run {place}" if place else "Continue from its last checkpoint."
    if len(dead) == len(run.islands) > 1 and len({str(i.gone and i.gone["said"]) for i in dead}) == 1:
        said = str(dead[0].gone and dead[0].gone["said"])
        yield Problem(f"All islands have ended at step {run.last_step}{_quoted(said)}", resume, severe=True)
        return
    if run.elastic:
        resume = "The others go on. Start the same command again to bring it back."
    consequences = [i for i in dead if any(words in str(i.gone and i.gone["said"]) for words in LOST_ANOTHER)]
    causes = [i for i in dead if i not in consequences] or dead
    for island in causes:
        gone = island.gone or {}
        ago = units.duration(max(0.0, now - float(gone.get("time") or now)))
        who = f"Island {island.number} (process {gone.get('pid')}) has ended at step {island.place}, {ago} ago"
        yield Problem(f"{who}{_quoted(str(gone.get('said') or ''))}", resume, island.number, severe=True)
    if consequences and causes is not dead:
        numbers = ", ".join(str(island.number) for island in consequences)
        yield Problem(f"The others ended when they lost it: {numbers}.", "Nothing is wrong with them.", severe=True)


def _silent(run: Live, now: float) -> Iterator[Problem]:
    active = _active(run)
    heard = now - run.lag_seconds
    silent = [island for island in active if island.state(heard, False, run.total_steps) == "silent"]
    evaluating = "It may be evaluating or saving; otherwise check its machine and its link."
    if len(silent) == len(active) > 1:
        quiet = units.duration(now - max(island.last_time for island in silent))
        what = f"No island has said anything for {quiet}."
        yield Problem(what, "They may be evaluating or saving; otherwise check whether the run still goes on.")
    else:
        for island in silent:
            quiet = units.duration(now - island.last_time)
            pace = f"; a step takes it {units.brief(island.step_seconds)}" if island.step_seconds else ""
            what = f"Island {island.number} has said nothing for {quiet}{pace}."
            yield Problem(what, evaluating, island.number)


def _out(run: Live) -> Iterator[Problem]:
    for island in _active(run):
        if island.out_in_a_row >= OUT_ROUNDS:
            what = f"Island {island.number} has been out of {island.out_in_a_row} rounds"
            if island.lateness:
                late = units.duration(statistics.median(island.lateness))
                what += f": its payloads arrive {late} too late"
            todo = "A larger overlap or patience would take it in; what it learns is kept meanwhile."
            yield Problem(what + ".", todo, island.number)
        if island.nonfinite_round is not None and island.rounds_in < island.rounds_at_nonfinite + TOLD_ROUNDS:
            yield Problem(
                f"The weights of island {island.number} were not finite in round {island.nonfinite_round}.",
                "It went back to the global weights and sat out the round. If that happens again, lower the learning "
                "rate.",
                island.number,
            )


def _waiting(run: Live) -> Iterator[Problem]:
    """Results that come after their step, or only just before it."""
    overlap = run.method.get("overlap")
    for island in _active(run):
        share, pace, slack = island.utilization, island.step_seconds, island.slack_seconds
        if share is None or pace is None or len(island.seconds) < LEAST_SAMPLES:
            continue
        if 1 - share > WAITING_SHARE:
            substantial = [wait for wait in island.waits if wait > WAITING_SHARE * pace]
            typical = statistics.median(substantial or [max(island.waits)])
            what = f"Island {island.number} waits {units.share(1 - share)} of its time for results"
            yield Problem(
                f"{what}: {units.brief(typical)} at a time.", _shorter_waits(run, island, typical), island.number
            )
        elif slack is not None and overlap and 0 <= slack < NARROW_SLACK * overlap * pace and len(island.slacks) > 4:
            longer = min(2 * int(overlap), int(run.method.get("sync_every") or 0) - 1)
            safer = f"an overlap of {longer}" if longer > overlap else "a longer period (--sync-every) and overlap"
            yield Problem(
                f"Results reach island {island.number} only {units.brief(slack)} before they are due, of "
                f"{units.brief(overlap * pace)} that an overlap of {overlap} gives.",
                f"A link that gets a little slower would make it wait: {safer} is safer.",
                island.number,
            )


def _shorter_waits(run: Live, island: LiveIsland, typical: float) -> str:
    """What would help against waits of so many seconds."""
    method = run.method
    if not method:
        return "Data-parallel training waits at every step: any method of isles waits less."
    computing = max(1e-9, sum(island.seconds) - sum(island.waits)) / len(island.seconds)
    overlap = int(method.get("overlap") or 0) + math.ceil(typical / computing)
    fits = method.get("update", "fresh") == "fresh" and overlap < int(method.get("sync_every") or 0)
    ways = [f"an overlap of {overlap} steps" if fits else "a longer period (--sync-every)"]
    if method.get("codec") != "e3m0":
        ways.append("fewer bits (--codec e3m0)")
    text = ", ".join([*ways, "a faster link, or other islands that are less behind it"])
    return f"{text[0].upper()}{text[1:]} would help."


def _slow(run: Live) -> Iterator[Problem]:
    """Where the set of islands is fixed, all go at the pace of the slowest."""
    busy = {i.number: i.step_seconds * (i.utilization or 0.0) for i in _active(run) if i.step_seconds}
    if run.elastic or len(busy) < 2:
        return
    middle = statistics.median(busy.values())
    for number, seconds in busy.items():
        if middle and seconds * SLOW_PACE > middle and len(run.islands[number].seconds) >= LEAST_SAMPLES:
            yield Problem(
                f"Island {number} computes {units.brief(seconds)} a step, the others {units.brief(middle)}.",
                "All go at the pace of the slowest: give it a smaller batch, or look at its machine.",
                number,
            )


def _losses(run: Live) -> Iterator[Problem]:
    for island in _active(run):
        if not island.loss_is_finite and run.evals.rows + run.steps.rows and any(row[9] for row in run.steps.rows):
            yield Problem(
                f"The loss of island {island.number} is not a finite number at step {island.step}.",
                "Lower the learning rate, or look at the data of this island.",
                island.number,
            )


def _torn(run: Live) -> Iterator[Problem]:
    if run.torn:
        lines = "1 line" if run.torn == 1 else f"{run.torn} lines"
        what = f"{lines} of the event log could not be read ({run.first_torn})."
        yield Problem(
            what, "Left out. A crash tears the line that is being written; if there are more, check the disk."
        )


def _quoted(said: str) -> str:
    return f": “{said}”." if said else "."
