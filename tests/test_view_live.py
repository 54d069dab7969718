"""What is known of a run while it goes on: the same numbers as the report, in bounded memory, told in parts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from isles.view.live import Live
from isles.view.live_rounds import MOST_FLIGHTS, MOST_ROUNDS
from isles.view.problems import problems
from isles.view.rows import BYTES, FIRST, HEAD, LAST, MERGED, MOST, PEAK, TAIL, TIME_ROWS, StepRows
from isles.view.runs import Run, summarize
from tests.test_view_synthetic import METHODS, synthetic


def live(events: list[dict[str, Any]]) -> Live:
    run = Live("run")
    run.feed_all(events)
    return run


def absorb(seen: dict[str, Any], run: Live, version: int) -> None:
    """What a page does with an answer."""
    for name, rows in (("steps", run.steps), ("evals", run.evals)):
        index, fresh = rows.since(version)
        seen.setdefault(name, [])[index:] = [list(row) for row in fresh]
    for name, ring in (("flights", run.rounds.flights), ("rounds", run.rounds.rounds)):
        part, records = ring.since(version), seen.setdefault(name, {})
        records.update({number: list(row) for number, *row in part["rows"]})
        seen[name] = {number: row for number, row in records.items() if number >= part["from"]}
    rates = run.rates.since(version)
    for island, (index, fresh) in rates["islands"].items():
        seen.setdefault("rates", {}).setdefault(island, [])[index:] = [list(row) for row in fresh]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("finished", [True, False])
def test_the_summary_is_that_of_the_report(method: str, finished: bool):
    events = synthetic(method, steps=700, islands=3, finished=finished)
    [wanted], found = summarize([Run(events)]), live(events).summary()
    for name, value in found.items():
        expected = getattr(wanted, name)
        assert value == (pytest.approx(expected) if isinstance(expected, float) else expected), name


@pytest.mark.parametrize("seed", range(8))
def test_whoever_gets_the_news_piece_by_piece_has_what_a_newcomer_gets(seed: int):
    chance = random.Random(seed)
    events = synthetic(chance.choice(["streaming", "eager", "data-parallel"]), steps=1500, islands=2, eval_every=50)
    if seed % 2:
        back = next(index for index, event in enumerate(events) if event.get("step") == 900)
        resume = {"event": "resume", "step": 800, "time": events[back]["time"]}
        again = [event for event in events if event.get("step", 0) > 800]
        events = [*events[:back], resume, *again]
    run, seen, version = Live("run"), {}, 0
    while events:
        count = chance.choice([1, 7, 100, 1000])
        run.feed_all(events[:count])
        events = events[count:]
        if chance.random() < 0.5:
            absorb(seen, run, version)
            version = run.version
    absorb(seen, run, version)
    whole: dict[str, Any] = {}
    absorb(whole, run, 0)
    assert seen == whole
    assert len(whole["steps"]) > HEAD


def test_a_resumed_run_forgets_what_lies_ahead():
    events = synthetic("streaming", steps=300, eval_every=100, finished=False)
    run = live([*events, {"event": "resume", "step": 150, "time": events[-1]["time"] + 5000}])
    assert run.steps.rows[-1][LAST] == 150
    assert [row[0] for row in run.evals.rows] == [100]
    assert not run.rounds.flights.rows()
    assert run.summary()["wall_seconds"] < 100


def test_memory_does_not_grow_with_the_run_and_extremes_stay():
    rows = StepRows()
    for step in range(1, 60_001):
        for sent in (10, 20):
            values = {"tokens": step, "wall": 0.1 * step, "sent": sent, "seconds": 0.1, "waited": 0.0}
            rows.add(step, values, 42.0 if step == 33_333 else 3.0, step)
    assert len(rows.rows) <= HEAD + MERGED + TAIL + 1
    assert [row[FIRST] for row in rows.rows[:HEAD]] == list(range(1, HEAD + 1))
    assert all(before[LAST] + 1 == after[FIRST] for before, after in zip(rows.rows, rows.rows[1:], strict=False))
    assert sum(row[BYTES] for row in rows.rows) == 60_000 * 30
    assert {row[PEAK] for row in rows.rows} == {30}
    assert max(row[MOST] for row in rows.rows) == 42.0


def test_rings_and_stretches_of_time_are_bounded():
    run = live(synthetic("streaming", steps=9000, islands=4, eval_every=None))
    assert len(run.rounds.flights) == MOST_FLIGHTS
    assert len(run.rounds.rounds) == MOST_ROUNDS
    assert all(len(rows.rows) <= TIME_ROWS for rows in run.rates.islands.values())
    assert sum(row[1] for row in run.rates.islands[0].rows) == run.islands[0].bytes_sent


def test_an_event_that_is_not_as_it_should_be_is_counted_and_passed_over():
    run = live(
        [{"event": "step", "island": 0, "step": "x"}, {"event": "sealed"}, {"event": "step", "island": 0, "step": 3}]
    )
    assert run.torn == 2
    assert run.last_step == 3
    [problem] = [each for each in problems(run, now=0.0) if "could not be read" in each.what]
    assert "2 lines" in problem.what


# ---- problems in words


def steps(island: int, count: int = 20, **fields: Any) -> list[dict[str, Any]]:
    base = {"event": "step", "island": island, "loss": 3.0, "seconds": 1.0, "wait_seconds": 0.0}
    return [{**base, "step": step, "time": 1000.0 + step, **fields} for step in range(1, count + 1)]


METHOD = {"overlap": 5, "update": "fresh", "sync_every": 50, "codec": "fp32"}
CONFIG = {"event": "config", "island": 0, "islands": 2, "method": METHOD, "time": 1000.0}


def told(events: list[dict[str, Any]], now: float = 1021.0) -> list[str]:
    return [f"{each.what} {each.todo}" for each in problems(live([CONFIG, *events]), now, "runs/mine")]


def test_a_run_that_goes_well_has_no_problems():
    assert told([*steps(0), *steps(1)]) == []


def test_an_island_that_is_left_out_is_told_with_its_lateness():
    rounds = [
        {
            "event": kind,
            "island": 1,
            "step": 5 * k,
            "fragment": 0,
            "round": k,
            "time": 1000.0 + 5 * k,
            "late_seconds": 3.0,
        }
        for k in range(1, 7)
        for kind in ("send", "apply", "excluded")
    ]
    [text] = told([*steps(0), *steps(1, 30), *rounds], 1031.0)[:1]
    assert text.startswith("Island 1 has been out of 6 rounds: its payloads arrive 3.0 s too late.")
    assert "larger overlap or patience" in text


def test_an_island_that_waits_is_told_which_overlap_would_hide_it():
    [text] = told([*steps(0), *steps(1, seconds=4.0, wait_seconds=3.0)])
    assert text.startswith(
        "Island 1 waits 75 % of its time for results: 3 s at a time. An overlap of 8 steps, fewer bits"
    )
    tight = {**CONFIG, "method": {"overlap": 5, "update": "fresh", "sync_every": 7, "codec": "e3m0"}}
    [text] = told([tight, *steps(0), *steps(1, seconds=4.0, wait_seconds=3.0)])
    assert "A longer period (--sync-every), a faster link" in text


def test_results_that_come_just_in_time_are_told():
    applies = [
        {"event": "apply", "island": 0, "fragment": 0, "round": k, "step": k, "time": 1000.0 + k, "slack_seconds": 0.2}
        for k in range(1, 9)
    ]
    [text] = told([*steps(0), *steps(1), *applies])
    assert text.startswith("Results reach island 0 only 0.2 s before they are due, of 5 s")
    for period, advice in ((50, "an overlap of 10 is"), (9, "an overlap of 8 is"), (6, "a longer period")):
        config = {**CONFIG, "method": {**METHOD, "sync_every": period}}
        [text] = told([config, *steps(0), *steps(1), *applies])
        assert f"would make it wait: {advice}" in text


def test_a_slow_island_a_silent_one_and_a_loss_that_is_no_number():
    slow = told([*steps(0), *steps(1), *steps(2, seconds=3.0)])
    assert any(text.startswith("Island 2 computes 3 s a step, the others 1 s.") for text in slow)
    silent = told([*steps(0, 60), *steps(1, 20)], now=1061.0)
    assert any(text.startswith("Island 1 has said nothing for 41.0 s") for text in silent)
    lost = told([*steps(0), *steps(1), *steps(1, loss=None)])
    assert any("loss of island 1 is not a finite number" in text for text in lost)


def test_an_island_that_evaluates_is_not_silent_in_a_pause_of_the_usual_length():
    evaluated = [*steps(0, 20), *({**step, "time": step["time"] + 60.0} for step in steps(0, 40)[20:])]
    last = evaluated[-1]["time"]
    others = [{**step, "time": last + 199.0 - 40 + step["step"]} for step in steps(1, 40)]
    silent = [
        any("Island 0 has said nothing" in text for text in told([*evaluated, *others], last + s)) for s in (100, 200)
    ]
    assert silent == [False, True]


def test_a_dead_process_comes_first_and_says_how_to_go_on():
    gone = {"event": "gone", "island": 1, "rank": 1, "pid": 77, "said": "out of memory", "time": 1020.5}
    text = told([*steps(0), *steps(1), gone])[0]
    assert text.startswith("Island 1 (process 77) has ended at step 20, 0.5 s ago: “out of memory”.")
    assert text.endswith("isles train --resume --run runs/mine")


def test_islands_that_ended_because_of_another_come_after_it():
    words = {0: "island 0 lost another island (a connection broke); restart all islands", 1: "MemoryError"}
    gone = [
        {"event": "gone", "island": island, "rank": island, "pid": 70 + island, "said": said, "time": 1020.0 + island}
        for island, said in words.items()
    ]
    texts = told([*steps(0), *steps(1), *gone])
    assert texts[0].startswith("Island 1 (process 71) has ended at step 20, 0.0 s ago: “MemoryError”.")
    assert texts[1].startswith("The others ended when they lost it: 0.")


def test_a_process_that_ends_when_its_steps_are_done_is_no_problem():
    config = {**CONFIG, "config": {"steps": 20}}
    gone = {"event": "gone", "island": 1, "rank": 1, "pid": 77, "said": "", "time": 1020.5}
    assert told([config, *steps(0, 19), *steps(1), gone]) == []
