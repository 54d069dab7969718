"""`isles train --store`: the same command on every machine, at any time."""

import json
import os
import pathlib
import signal
import time

import pytest
from safetensors.torch import load_file

from isles.cli import main
from isles.elastic.objects import Seal
from isles.elastic.store import open_store
from isles.view.events import read
from tests.programs import Program

TINY = ["--model", "nano", "--batch-size", "2", "--sequence-length", "32", "--vocabulary", "300", "--threads", "1"]
TINY += ["--data", "synthetic:0.05", "--eval-tokens", "512", "--sample-tokens", "0"]
METHOD = ["--method", "streaming", "--sync-every", "8", "--overlap", "2", "--fragments", "2"]


@pytest.fixture
def machines():
    """Processes that a test starts; those that are left end with it, and what they have started ends by itself."""
    processes: list[Program] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(processes: list[Program], folder: pathlib.Path, name: str, *flags: str) -> Program:
    """`isles train --store` in a process of its own, as on a machine of its own."""
    processes.append(Program(["train", "--store", str(folder / "bucket"), "--run", name, *flags], folder))
    return processes[-1]


def until(condition, process: Program | None = None) -> None:
    while not condition():
        assert process is None or process.poll() is None, "it ended too early"
        time.sleep(0.05)


def last_seal(folder: pathlib.Path) -> Seal | None:
    store = open_store(str(folder / "bucket"))
    name = max(store.list("seals/"), default=None)
    return None if name is None else Seal.parse(store.get(name), name)


def rounds(folder: pathlib.Path) -> int:
    seal = last_seal(folder)
    return 0 if seal is None else seal.round


def islands(folder: pathlib.Path) -> tuple[int, ...]:
    seal = last_seal(folder)
    return () if seal is None else seal.islands


def island_of(folder: pathlib.Path, run: str) -> dict | None:
    """The last event of an island that has begun: its number, which is the second one if a slow machine had to join
    twice, and its process.
    """
    log = folder / run / "events.jsonl"
    whole = [line for line in log.read_text().splitlines(True) if line.endswith("\n")] if log.exists() else []
    begun = [line for line in whole if '"event": "island"' in line]
    return json.loads(begun[-1]) if begun else None


def test_islands_of_one_command_train_one_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--store", "bucket", "--islands", "2", "--steps", "24", *TINY, *METHOD, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["run_dir"] == "runs/bucket"
    assert summary["steps"] == 24
    events = read(tmp_path / "runs/bucket")
    assert {event["island"] for event in events if event["event"] == "step"} == {0, 1}
    assert {event["event"] for event in events} >= {"config", "island", "join", "send", "seal", "apply", "leave", "end"}
    store = open_store(str(tmp_path / "bucket"))
    for island in (0, 1):  # whoever can read the bucket can watch
        pieces = sorted(store.list(f"events/{island:04d}"))
        lines = b"".join(store.get(name) for name in pieces).splitlines()
        own = [event for event in map(json.loads, lines) if event["event"] == "step"]
        assert own == [event for event in events if event["event"] == "step" and event["island"] == island]
    assert main(["export", "--store", "bucket", "--out", "exported"]) == 0
    exported, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "runs/bucket"))
    assert all(bool((exported[name] == trained[name]).all()) for name in trained)
    # The run is over: whoever starts it again has nothing to do but to look at its end.
    assert main(["train", "--store", "bucket", "--run", "late", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["val_loss"] == pytest.approx(summary["val_loss"])
    assert main(["train", "--store", "bucket", "--run", "other", "--model", "micro", "--steps", "24"]) == 2
    wrong = f"the run in {tmp_path / 'bucket'} has --model nano, not micro: leave --model out to join it"
    assert capsys.readouterr().err.splitlines()[-1] == f"isles train: {wrong}"
    assert main(["train", "--store", "bucket", "--run", "other", "--sync-every", "9"]) == 2
    assert "has --sync-every 8, not 9" in capsys.readouterr().err


def test_islands_join_die_leave_and_come_back(tmp_path, machines):
    steps = ["--steps", "100000", "--eval-every", "0", "--patience-seconds", "2", *TINY, *METHOD]
    first = start(machines, tmp_path, "first", *steps)
    until(lambda: rounds(tmp_path) >= 2, first)
    second = start(machines, tmp_path, "second", "--patience-seconds", "2")
    until(lambda: (island := island_of(tmp_path, "second")) and islands(tmp_path) == (0, island["island"]), second)

    island = island_of(tmp_path, "second")
    os.kill(island["pid"], signal.SIGKILL)
    assert second.wait() != 0
    assert "start the same command again to go on" in second.err.read_text()
    until(lambda: islands(tmp_path) == (0,), first)  # the other one goes on

    again = start(machines, tmp_path, "second", "--patience-seconds", "2")
    until(lambda: island_of(tmp_path, "second")["pid"] != island["pid"], again)
    number = island_of(tmp_path, "second")["island"]
    assert number > island["island"]  # nobody ever has the number of another one
    until(lambda: islands(tmp_path) == (0, number), again)

    first.send_signal(signal.SIGINT)
    assert first.wait() == 130
    left = first.err.read_text().splitlines()[-1]
    assert left.startswith("isles train: island 0 has left at clock ")
    until(lambda: islands(tmp_path) == (number,), again)
    again.send_signal(signal.SIGINT)
    assert again.wait() == 130

    tail, clock = rounds(tmp_path), last_seal(tmp_path).clock
    last = start(machines, tmp_path, "third", "--patience-seconds", "2")
    until(lambda: rounds(tmp_path) > tail, last)  # all were gone: it goes on from the last seal
    learning_rates = [event for event in read(tmp_path / "third") if event["event"] == "step"]
    assert learning_rates[0]["step"] >= clock - 8
    last.send_signal(signal.SIGINT)
    last.wait()
    assert main(["export", "--store", str(tmp_path / "bucket"), "--out", str(tmp_path / "exported")]) == 0
    assert load_file(tmp_path / "exported" / "model.safetensors")


def test_what_cannot_be_is_one_line(tmp_path, capsys):
    bucket = ["train", "--store", str(tmp_path / "bucket"), "--run", str(tmp_path / "run")]
    assert main([*bucket, "--method", "data-parallel"]) == 2
    assert "--store joins islands" in capsys.readouterr().err
    assert main([*bucket, "--method", "eager"]) == 2
    assert "use --method distant" in capsys.readouterr().err
    assert main(["train", "--store", "ftp://somewhere/run"]) == 2
    assert "is no store that isles knows" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["train", "--store", str(tmp_path / "file")]) == 2
    assert "cannot use the folder" in capsys.readouterr().err
    assert main(["export", "--store", str(tmp_path / "empty")]) == 2
    assert "empty: there is no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["export", "--store", str(tmp_path / "empty")]) == 2
    assert "there is no run of isles train in" in capsys.readouterr().err
    assert main(["export"]) == 2
    assert "give the folder of a run, or --store URL" in capsys.readouterr().err
