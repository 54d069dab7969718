from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest

from isles.view.events import EventLog
from isles.view.progress import Progress, follow
from tests.test_view_synthetic import synthetic


def show(events: list[dict], **options) -> str:
    stream = io.StringIO()
    with Progress(stream=stream, **options) as progress:
        for event in events:
            progress.feed(event)
    return stream.getvalue()


def test_plain_lines_now_and_then_when_not_on_a_terminal():
    text = show(synthetic("streaming", steps=400, eval_every=100), every_seconds=5)
    assert "\x1b" not in text
    lines = text.splitlines()
    steps = [line for line in lines if re.match(r"step \d+/400  loss \d", line)]
    assert 4 <= len(steps) <= 8  # 22 seconds of training
    assert steps[-1].startswith("step 400/400")
    assert all(re.search(r"\d+k tok/s  \d+(\.\d+)? % busy  .* in flight$", line) for line in steps)
    assert sum("validation loss" in line for line in lines) == 4
    assert lines[-1].startswith("finished: 400 steps in ")


def test_a_line_per_island_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "140")
    text = show(synthetic("eager", steps=60, islands=3, eval_every=None), live=True)
    for island in range(3):
        assert re.search(rf"island {island}.*60/60.*loss \d\.\d+.*tok/s.*busy.*4 fragments in flight", text)


def test_what_is_in_flight_is_what_was_sent_and_not_applied():
    progress = Progress(stream=io.StringIO())
    flights = {"island": 1, "step": 5, "fragment": 2, "round": 1}
    progress.feed({"event": "send", **flights})
    assert progress.islands[1].in_flight == {(2, 1)}
    progress.feed({"event": "apply", **flights, "round": 0})  # an early eager round: nothing was sent
    assert progress.islands[1].in_flight == {(2, 1)}
    progress.feed({"event": "apply", **flights})
    assert not progress.islands[1].in_flight


def test_a_resume_starts_afresh_and_unknown_or_bare_events_are_passed_over():
    text = show(
        [
            {"event": "surprise"},
            {"event": "step", "step": 9, "time": 0.0, "loss": None},
            {"event": "resume", "step": 3, "time": 100.0},
            {"event": "step", "step": 4, "time": 200.0, "loss": 2.0},
        ]
    )
    assert text.splitlines() == [
        "step 9  loss -  - tok/s  - busy  nothing in flight",
        "resumed at step 3",
        "step 4  loss 2.000  - tok/s  - busy  nothing in flight",
    ]


def test_progress_of_several_islands_by_following_their_log(tmp_path: Path):
    over, stream = threading.Event(), io.StringIO()
    events = synthetic("streaming", steps=80, eval_every=40)

    def train() -> None:
        with EventLog(tmp_path / "events.jsonl") as log:
            for event in events:
                log.write(**event)
        over.set()

    thread = threading.Thread(target=train)
    thread.start()
    with Progress(stream=stream) as progress:
        for event in follow(tmp_path, over.is_set, poll_seconds=0.01):
            progress.feed(event)
    thread.join()
    assert [island.step for island in progress.islands.values()] == [80, 80]
    assert "step 80/80" in stream.getvalue()
