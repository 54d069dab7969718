"""`isles lab` as a user calls it: the record of a run, any command, mistakes, Ctrl-C.

Links are verified before anything runs on them. Here they are so slow that a machine whose host takes its cores away
for tens of milliseconds still carries all that they should.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from isles.cli import main
from isles.lab import turns
from isles.view import events
from tests import lab_networks, ranks
from tests.lab_networks import alive

TINY = ["--data", "synthetic:0.1", "--vocabulary", "300", "--model", "micro", "--threads", "1", "--batch-size", "1"]
SLOW = ["--bandwidth", "2Mbit"]


@pytest.fixture(autouse=True)
def possible():
    lab_networks.require()


@pytest.mark.timeout(900)  # two starts of torchrun on every island, one after the other
def test_a_run_is_measured_counted_and_predicted(tmp_path, monkeypatch, capsys):
    """Two islands on 4 Mbit/s, more than 1 MB of payload each."""
    monkeypatch.setenv("ISLES_CACHE", str(tmp_path / "cache"))
    method = ["--method", "diloco", "--sync-every", "8", "--steps", "32"]
    arguments = ["--islands", "2", "--bandwidth", "4Mbit", "--reference-steps", "10", "--run", str(tmp_path / "lab")]
    assert main(["lab", *arguments, "--json", "--", *TINY, *method]) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out.strip().splitlines()[-1])
    assert record == json.loads((tmp_path / "lab" / "lab.json").read_text())
    assert record["bandwidth_measured"] == pytest.approx(record["bandwidth_expected"], rel=0.1)
    assert record["method"] == "diloco"
    assert record["steps"] == 32
    assert record["val_loss"] > 0
    assert record["bytes_sent"] == record["planned_bytes_sent"], "the planner knows every byte"
    assert min(record["bytes_sent_by_island"]) > 1e6
    for sent, counted in zip(record["bytes_sent_by_island"], record["kernel_bytes_by_island"], strict=True):
        assert 1.0 < counted / sent < 1.05
    assert record["wait_seconds"] > 0
    assert 0 < record["planned_utilization"] < 1
    assert 0 < record["compute_utilization"] < 1.5, "a share, and the noise of a busy machine"
    assert record["step_seconds"] > 0.2 * record["wall_seconds"] / record["steps"]
    assert "verified: the links carry" in printed.err
    assert "utilisation" in printed.out


@pytest.mark.timeout(900)  # as above
def test_a_run_in_turns_with_its_reference_is_the_same_run(tmp_path, monkeypatch, capsys):
    """Stopped again and again: nothing is lost, and no byte is sent twice."""
    monkeypatch.setenv("ISLES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.5)
    method = ["--method", "streaming", "--sync-every", "50", "--overlap", "25", "--steps", "150"]
    folder = tmp_path / "lab"
    arguments = ["--islands", "2", "--bandwidth", "8Mbit", "--reference-steps", "30", "--run", str(folder)]
    assert main(["lab", *arguments, "--reference-turns", "--json", "--", *TINY, *method]) == 0
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert record["paused_seconds"] > 0.5
    assert record["bytes_while_paused"] < 0.1 * record["bytes_sent"], "no more than what torchrun itself has to say"
    assert record["steps"] == 150
    assert 0 < record["steady_utilization"] < 1.5, "a share, and the noise of a busy machine"
    assert len(record["reference_step_seconds_each"]) >= 2
    logged = [event for event in events.read(folder / "run") if event["event"] == "step" and event["island"] == 0]
    wall = logged[-1]["time"] - logged[0]["time"] + logged[0]["seconds"]
    assert record["wall_seconds"] < wall, "pauses do not count"
    done = ranks.run(["train", *TINY, *method, "--run-dir", str(tmp_path / "undisturbed"), "--json"], 2, tmp_path)
    assert done.returncode == 0, done.stderr
    undisturbed = json.loads(done.stdout.splitlines()[-1])
    for name in ("val_loss", "bytes_sent"):
        assert record[name] == undisturbed[name], name


def test_any_command_runs_on_every_island(tmp_path, capfd):
    folder = tmp_path / "lab"
    say = ["sh", "-c", "echo {island} of {islands}, $(hostname), {address} {host} {interface}"]
    assert main(["lab", "--islands", "3", *SLOW, "--run", str(folder), "--command", "--json", "--", *say]) == 0
    record = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert record["islands"] == 3
    assert len(record["kernel_bytes_by_island"]) == 3
    said = [(folder / f"node-{island}.log").read_text().strip() for island in range(3)]
    assert said[2] == "2 of 3, island-2, 10.77.0.103 10.77.0.101 eth0"


def test_a_command_that_fails_is_told_with_its_last_words(tmp_path):
    fails = ["sh", "-c", "echo the disk is full; exit {island}"]
    with pytest.raises(SystemExit) as caught:
        main(["lab", *SLOW, "--run", str(tmp_path / "lab"), "--command", "--", *fails])
    assert "island 1: the disk is full" in str(caught.value.code)
    assert "island 0" not in str(caught.value.code)


MISTAKES = {
    "bandwidth": (["--bandwidth", "fast"], "--bandwidth 'fast' is not understood"),
    "no bandwidth": (["--bandwidth", "0"], "greater than 0"),
    "islands": (["--islands", "0"], "islands=0"),
    "too many islands": (["--islands", "1000"], "islands=1000"),
    "loss": (["--loss", "much"], "--loss 'much'"),
    "mtu": (["--mtu", "1"], "mtu 1 must be"),
    "processes": (["--nproc", "0"], "--nproc 0 must be at least 1"),
    "reference": (["--reference-steps", "-1"], "--reference-steps -1"),
    "turns of sleeps": (["--timed", "--reference-turns"], "--reference-turns is for real compute"),
    "flag of train": (["--", "--stepps", "3"], "after `--`: unrecognized arguments: --stepps 3"),
    "value of train": (["--", "--steps", "0"], "--steps 0 must be at least 1"),
    "method": (["--", "--overlap", "1000"], "overlap=1000"),
    "islands of train": (["--", "--islands", "3"], "--islands is set by the laboratory"),
    "flag of timed": (["--timed", "--", "--layers", "0"], "--layers 0"),
    "no command": (["--command"], "--command needs a command"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(name, tmp_path, capsys):
    arguments, words = MISTAKES[name]
    assert main(["lab", "--run", str(tmp_path / "lab"), *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "lab").exists(), "nothing is left behind"


def test_a_folder_that_exists_is_not_touched(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep me")
    for more, words in (([], "--overwrite"), (["--overwrite"], "is none")):
        assert main(["lab", "--run", str(tmp_path), *more, "--command", "--", "true"]) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_ctrl_c_ends_everything_with_exit_code_130(tmp_path):
    marker = f"2{os.getpid():08d}"
    command = [sys.executable, "-m", "isles.cli", "lab", *SLOW, "--run", str(tmp_path / "lab"), "--command", "--"]
    lab = subprocess.Popen([*command, "setsid", "--wait", "sleep", marker], stderr=subprocess.PIPE)
    try:
        lab_networks.wait_until(lambda: alive(marker), "the command runs")
        lab.send_signal(signal.SIGINT)
        assert b"isles lab: interrupted" in lab.communicate(timeout=120)[1]
    finally:
        lab.kill()
    assert lab.returncode == 130
    lab_networks.wait_until(lambda: not alive(marker), "the command is gone")
