"""`isles train` with real processes: every method, kill -9, Ctrl-C, torchrun; an interrupted run ends like any other.

One small run that nobody disturbs is the measure for all the others: same losses, step by step, to the last bit. Two
of them are started anew, as a user starts them, by itself and under torchrun; the rest is forked (`tests.programs`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from isles.train.launch import STOP_FILE
from isles.view.events import EventLog
from tests.programs import Program

STEPS = 30
TINY = ["--data", "synthetic:0.2", "--tokenizer", "bytes", "--model", "nano", "--batch-size", "2", "--json"]
TINY += ["--sequence-length", "32"]
SMALL = [
    *TINY,
    "--method",
    "streaming",
    *f"--steps {STEPS} --sync-every 6 --fragments 3 --overlap 2 --checkpoint-every 5".split(),
]
SMALL += ["--eval-every", "15", "--eval-tokens", "512", "--sample-tokens", "8", "--warmup-steps", "5"]
LIMIT_SECONDS = 240


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    own = {"ISLES_CACHE": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | own


def start(arguments: list[str], folder: Path, environment: dict[str, str], hold: Hold | None = None) -> Program:
    """`isles train`."""
    return Program(["train", *arguments], folder, environment, hold)


def finish(process: Program | subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def events(folder: Path, kind: str) -> list[dict]:
    """What is in the log by now; a last line that is still being written is not."""
    file = folder / "events.jsonl"
    whole, _, _ = file.read_text().rpartition("\n") if file.exists() else ("", "", "")
    return [event for event in map(json.loads, filter(None, whole.split("\n"))) if event["event"] == kind]


def losses(folder: Path) -> dict[tuple[int, int], float]:
    """By island and step; of a step that was done twice, the second time counts."""
    return {(event["island"], event["step"]): event["loss"] for event in events(folder, "step")}


@dataclass(frozen=True)
class Hold:
    """Called in a program, makes its island 1 stop after a step until there is a file, the gate, so that whatever the
    test does to the run happens in a known step; the other island gets as far as it can without it.
    """

    step: int
    gate: Path

    def __call__(self) -> None:
        write = EventLog.write

        def write_and_wait(log: EventLog, event: str, **fields: Any) -> str:
            line = write(log, event, **fields)
            while event == "step" and fields["step"] == self.step and os.environ.get("RANK") == "1":
                if self.gate.exists():
                    break
                time.sleep(0.02)
            return line

        EventLog.write = write_and_wait  # type: ignore[method-assign]


def wait_for_step(folder: Path, step: int, process: Program) -> None:
    """Until island 1 has done it."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while (1, step) not in losses(folder):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, finish(start(["--run", str(folder), *SMALL], folder.parent, environment))


def test_what_a_run_says_and_leaves_behind(undisturbed, tmp_path, environment):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "isles.cli", "train", "--run", str(folder), *SMALL]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    summary = finish(subprocess.Popen(command, env=environment, **output))
    wanted = ("val_loss", "val_bits_per_byte", "steps", "tokens", "islands", "bytes_sent", "peak_bytes_per_step")
    assert all(name in summary for name in (*wanted, "compute_utilization", "wall_seconds", "run_dir"))
    assert summary["steps"] == STEPS
    assert summary["islands"] == 2
    assert summary["tokens"] == STEPS * 2 * 2 * 32
    assert 0 < summary["compute_utilization"] <= 1
    assert summary["run_dir"] == str(folder)
    left = {path.name for path in folder.iterdir()}
    assert left >= {"config.json", "events.jsonl", "checkpoints", "model.safetensors", "report.html"}
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["00000025", "00000030"], "the last two checkpoints are kept"
    sent = sum(event["num_bytes"] for event in events(folder, "send"))
    assert sent == sum(event["bytes_sent"] for event in events(folder, "step"))
    last = {(event["island"], event["fragment"]): event["num_bytes"] for event in events(folder, "send")}
    assert 0 < summary["bytes_sent"] - sent <= sum(last.values()), "the closing round"
    assert len(losses(folder)) == 2 * STEPS
    assert losses(folder) == losses(undisturbed[0])


def test_kill_9_of_an_island_and_resume_is_the_same_run(undisturbed, tmp_path, environment):
    folder = tmp_path / "run"
    process = start(["--run", str(folder), *SMALL], tmp_path, environment, Hold(13, gate=tmp_path / "never"))
    wait_for_step(folder, 13, process)
    victim = next(event["pid"] for event in events(folder, "island") if event["island"] == 1)
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1
    assert "island 1 was ended by SIGKILL" in err.splitlines()[-1]
    assert "--resume" in err.splitlines()[-1]
    assert "Traceback" not in err
    summary = finish(start(["--run", str(folder), "--resume", "--json"], tmp_path, environment))
    assert losses(folder) == losses(undisturbed[0])
    assert summary["val_loss"] == undisturbed[1]["val_loss"]
    assert summary["bytes_sent"] == undisturbed[1]["bytes_sent"]
    assert events(folder, "resume")[0]["step"] in (5, 10), "the second may have been on its way to the disk"


def test_ctrl_c_saves_and_leaves_and_resume_is_the_same_run(undisturbed, tmp_path, environment):
    folder = tmp_path / "run"
    arguments, hold = ["--run", str(folder), *SMALL, "--checkpoint-every", "0"], Hold(3, gate=folder / STOP_FILE)
    process = start(arguments, tmp_path, environment, hold)
    wait_for_step(folder, 3, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130, err
    assert "--resume" in err.splitlines()[-1]
    finish(start(["--run", str(folder), "--resume", "--json"], tmp_path, environment))
    assert losses(folder) == losses(undisturbed[0])


def test_the_same_command_under_torchrun_is_the_same_run(undisturbed, tmp_path, environment):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "isles.cli", "train", "--run-dir", str(folder), *SMALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert losses(folder) == losses(undisturbed[0])
    assert summary["val_loss"] == undisturbed[1]["val_loss"]


@pytest.mark.parametrize("method", ["diloco", "delayed", "eager", "data-parallel"])
def test_every_method_trains(method, tmp_path, environment):
    folder = tmp_path / "run"
    arguments = ["--run", str(folder), "--method", method, *TINY, "--steps", "12", "--eval-every", "0"]
    arguments += [] if method == "data-parallel" else ["--sync-every", "4"]
    summary = finish(start(arguments, tmp_path, environment))
    first, last = losses(folder)[0, 1], losses(folder)[0, 12]
    assert last < first
    assert summary["val_loss"] < first
    if method == "data-parallel":
        assert summary["bytes_sent"] == 2 * 12 * 4 * summary["parameters"]


def mistake(arguments: list[str], folder: Path, environment: dict[str, str]) -> str:
    """The last line of a run that cannot be."""
    process = start(arguments, folder, environment)
    _, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 2
    return err.splitlines()[-1]


def test_a_model_that_is_not_known_is_a_mistake(tmp_path, environment):
    said = mistake(["--run", str(tmp_path / "run"), *SMALL, "--model", "giant"], tmp_path, environment)
    assert "--model giant is not known" in said


def test_more_islands_than_tokens_allow_is_a_mistake(tmp_path, environment):
    (tmp_path / "short.txt").write_text("A few words are not enough.\n" * 20)
    short = ["--data", str(tmp_path / "short.txt"), "--tokenizer", "bytes", "--batch-size", "64"]
    assert "use more text" in mistake(["--run", str(tmp_path / "run"), *short], tmp_path, environment)


def test_a_checkpoint_of_another_model_is_a_mistake(undisturbed, tmp_path, environment):
    again = ["--run", str(undisturbed[0]), "--resume", "--model", "micro", "--json"]
    assert "--model nano, not micro" in mistake(again, tmp_path, environment)
