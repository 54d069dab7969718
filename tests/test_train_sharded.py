"""`isles train --ranks-per-island 2`: the model in shards, or copied, and a resume with other ranks.

The run in shards is under torchrun, the others are in ranks as torchrun would start them (`tests.ranks`).
"""

import json
import os
import subprocess
import sys

import pytest

from isles.train import export
from isles.view import events
from tests import ranks

LIMIT_SECONDS = 240
pytestmark = pytest.mark.timeout(900)  # several runs of four processes each, one after the other
FLAGS = ["--method", "streaming", "--sync-every", "4", "--model", "nano", "--data", "synthetic:0.2", "--steps", "12"]
FLAGS += ["--tokenizer", "bytes", "--sequence-length", "32", "--warmup-steps", "2", "--sample-tokens", "8"]
FLAGS += ["--eval-every", "6", "--eval-tokens", "600", "--json"]


def train(number, per_island, folder, *more):
    """So many ranks."""
    return ranks.run(command(per_island, folder, more), number, folder.parent, seconds=LIMIT_SECONDS)


def train_under_torchrun(number, per_island, folder, *more):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    torchrun += ["-m", "isles.cli", *command(per_island, folder, more)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def command(per_island, folder, more):
    return ["train", "--run-dir", str(folder), "--ranks-per-island", str(per_island), *FLAGS, *more]


def summary(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two islands of one rank, the same sequences per island."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, summary(train(2, 1, folder, "--batch-size", "4", "--checkpoint-every", "6"))


def test_copies_inside_an_island_send_every_value_once(alone, tmp_path):
    copied = summary(train(4, 2, tmp_path / "run", "--batch-size", "2", "--inside", "ddp"))
    assert copied["islands"] == 2
    assert copied["val_loss"] < 5.7
    assert copied["bytes_sent"] == pytest.approx(alone[1]["bytes_sent"], rel=0.05)


def test_an_island_in_shards_trains_and_goes_on_with_one_rank(alone, tmp_path):
    folder = tmp_path / "run"
    whole = summary(train_under_torchrun(4, 2, folder, "--batch-size", "2", "--checkpoint-every", "6"))
    assert whole["val_loss"] < 5.7
    log = events.read(folder)
    described = next(event for event in log if event["event"] == "config")
    assert sum(fragment["numel"] for fragment in described["fragments"]) == whole["parameters"]
    assert any(event["event"] == "sample" for event in log)
    assert whole["bytes_sent"] == pytest.approx(alone[1]["bytes_sent"], rel=0.05)
    (folder / export.WEIGHTS).unlink()
    model, step = export.load_run(folder)
    assert step == 12
    assert sum(parameter.numel() for parameter in model.parameters()) == whole["parameters"]

    for name in ("island-0", "island-1"):  # as if it had crashed between the two checkpoints
        (folder / "checkpoints" / "00000012" / f"{name}.sharded.json").unlink()
    mistaken = train(2, 1, folder, "--resume", "--batch-size", "2")
    assert mistaken.returncode != 0
    assert "--batch-size 4" in mistaken.stderr
    resumed = summary(train(2, 1, folder, "--resume", "--batch-size", "4"))
    assert next(event for event in events.read(folder) if event["event"] == "resume")["step"] == 6
    assert resumed["val_loss"] == pytest.approx(whole["val_loss"], rel=0.05)


def test_checkpoints_of_single_ranks_are_not_for_several(alone):
    refused = train(4, 2, alone[0], "--resume", "--batch-size", "2")
    assert refused.returncode != 0
    assert "--ranks-per-island 1" in refused.stderr
