from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from isles.view.events import EventLog, follow, read
from tests.test_view_synthetic import save, synthetic


def test_what_is_written_is_read(tmp_path: Path):
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        log.write("step", island=0, step=1, loss=2.5, path=Path("x"), names=("a", "b"))
        log.write("end", steps=1)
    first, last = read(tmp_path / "run")
    assert first["event"] == "step"
    assert first["time"] <= last["time"]
    assert (first["loss"], first["path"], first["names"]) == (2.5, "x", ["a", "b"])
    assert read(tmp_path / "run" / "events.jsonl") == [first, last]


def test_numbers_that_are_not_finite_are_null_so_that_every_json_reader_can_read(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("step", island=0, step=1, loss=float("nan"), config={"deep": [float("inf"), 1.0]})
    text = (tmp_path / "events.jsonl").read_text()
    event = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert event["loss"] is None
    assert event["config"] == {"deep": [None, 1.0]}


WRITER = """
import sys
from isles.view.events import EventLog
assert "torch" not in sys.modules, "isles.view.events must not import torch"
with EventLog(sys.argv[1]) as log:
    for step in range(1, 301):
        log.write("step", island=int(sys.argv[2]), step=step, filler="x" * 300)
"""


def test_several_processes_append_to_one_file(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(island)]) for island in range(3)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    lines = path.read_text().splitlines()
    assert len(lines) == 900
    for island in range(3):
        steps = [event["step"] for event in map(json.loads, lines) if event["island"] == island]
        assert steps == list(range(1, 301))


def test_a_torn_last_line_is_left_out_and_the_next_event_is_not_glued_to_it(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("step", island=0, step=1)
        log.write("step", island=0, step=2)
    os.truncate(path, path.stat().st_size - 9)
    assert [event["step"] for event in read(path)] == [1]
    with EventLog(path) as log:
        log.write("step", island=0, step=2, again=True)
    assert [event["step"] for event in read(path)] == [1, 2]
    assert read(path)[-1]["again"]


def test_after_a_resume_the_last_record_of_a_step_counts(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl") as log:
        for attempt, steps in (("first", range(1, 13)), ("second", range(9, 11))):
            if attempt == "second":
                log.write("resume", step=8)
            for step in steps:
                for island in range(2):
                    log.write("send", island=island, step=step, fragment=0, round=step, num_bytes=1, attempt=attempt)
                    log.write("step", island=island, step=step, attempt=attempt)
            if attempt == "first":
                log.write("eval", island=0, step=12)
                log.write("end", steps=12)
    events = read(tmp_path)
    for kind in ("step", "send"):
        for island in range(2):
            found = [event for event in events if event["event"] == kind and event["island"] == island]
            assert [event["step"] for event in found] == list(range(1, 11))
            assert [event["attempt"] for event in found] == ["first"] * 8 + ["second"] * 2
    assert not [event for event in events if event["event"] in ("eval", "end")]


def test_reading_a_log_without_a_resume_leaves_nothing_out(tmp_path: Path):
    events = synthetic("eager", steps=120, eval_every=30)
    assert read(save(events, tmp_path)) == events


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file or folder"),
        (b"", "is empty"),
        (b"step,loss\n1,2.0\n", "has no events"),
        (b'{"loss": 3}\n', "line 1 is no event"),
        (b"[1, 2]\n", "line 1 is no event"),
        (b"\x93\x80\xff\n", "not text"),
    ],
)
def test_what_is_no_event_log_is_said_in_one_sentence(tmp_path: Path, content: bytes | None, complaint: str):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_without_events_is_said_so(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no events\.jsonl"):
        read(tmp_path)


def test_follow_yields_what_another_thread_writes_and_ends(tmp_path: Path):
    path, over = tmp_path / "run" / "events.jsonl", threading.Event()

    def train() -> None:
        with EventLog(path) as log:
            for step in range(1, 51):
                log.write("step", island=step % 2, step=step)
                if step == 25:
                    os.write(log._descriptor, b'{"event": "torn\n\n')
        over.set()

    thread = threading.Thread(target=train)
    stream = follow(path, over.is_set, poll_seconds=0.01)
    thread.start()
    assert [event["step"] for event in stream] == list(range(1, 51))
    thread.join()


def test_follow_ends_when_there_is_nothing_to_follow(tmp_path: Path):
    assert list(follow(tmp_path / "nothing", lambda: True)) == []
