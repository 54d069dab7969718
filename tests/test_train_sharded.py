"""`isles train --ranks-per-island 2` under torchrun: the model in shards, or copied, and a resume with other ranks."""

import json
import os
import subprocess
import sys

import pytest

from isles.train import export
from isles.view import events

LIMIT_SECONDS = 240
pytestmark = pytest.mark.timeout(900)  # several runs of four processes each, one after the other
FLAGS = ["--method", "streaming", "--sync-every", "4", "--model", "nano", "--data", "synthetic", "--steps", "12"]
FLAGS += ["--tokenizer", "bytes", "--sequence-length", "32", "--warmup-steps", "2", "--sample-tokens", "8"]
FLAGS += ["--eval-every", "6", "--eval-tokens", "600", "--json"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    own = {"ISLES_CACHE": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | own


def train(ranks, per_island, folder, environment, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "isles.cli", "train", "--run-dir", str(folder), "--ranks-per-island", str(per_island)]
    return subprocess.run(
        [*command, *FLAGS, *more], env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )


def summary(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory, environment):
    """Two islands of one rank, the same sequences per island."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, summary(train(2, 1, folder, environment, "--batch-size", "4", "--checkpoint-every", "6"))


def test_copies_inside_an_island_send_every_value_once(alone, tmp_path, environment):
    copied = summary(train(4, 2, tmp_path / "run", environment, "--batch-size", "2", "--inside", "ddp"))
    assert copied["islands"] == 2
    assert copied["val_loss"] < 5.7
    assert copied["bytes_sent"] == pytest.approx(alone[1]["bytes_sent"], rel=0.05)


def test_an_island_in_shards_trains_and_goes_on_with_one_rank(alone, tmp_path, environment):
    folder = tmp_path / "run"
    whole = summary(train(4, 2, folder, environment, "--batch-size", "2", "--checkpoint-every", "6"))
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
    mistaken = train(2, 1, folder, environment, "--resume", "--batch-size", "2")
    assert mistaken.returncode != 0
    assert "--batch-size 4" in mistaken.stderr
    resumed = summary(train(2, 1, folder, environment, "--resume", "--batch-size", "4"))
    assert next(event for event in events.read(folder) if event["event"] == "resume")["step"] == 6
    assert resumed["val_loss"] == pytest.approx(whole["val_loss"], rel=0.05)


def test_checkpoints_of_single_ranks_are_not_for_several(alone, environment):
    refused = train(4, 2, alone[0], environment, "--resume", "--batch-size", "2")
    assert refused.returncode != 0
    assert "--ranks-per-island 1" in refused.stderr
