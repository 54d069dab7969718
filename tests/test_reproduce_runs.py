"""Jobs, their records, and the pool that runs them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import isles
from isles import cli
from isles.reproduce import pool, probes
from isles.reproduce.job import Job, Text, key_of
from isles.reproduce.pool import Task, run_tasks, tasks_of
from isles.reproduce.study import Change, Records
from isles.reproduce.train import train
from isles.wire.codecs import codecs
from isles.wire.world import Payload

TEXT = Text("synthetic:0.05")
SMALL = Job(
    method=isles.Method.streaming(sync_every=4, mixing=0.0),
    model="2x2x16",
    steps=8,
    batch_size=2,
    sequence_length=16,
    warmup_steps=2,
    evaluations=2,
    curve_tokens=256,
    final_tokens=512,
)
OTHER_VALUES = {
    "method": isles.Method.eager(sync_every=4),
    "model": "nano",
    "inner": "muon",
    "overlaps": (0, 1),
    "shards": "trained",
    "weights": (1.0, 2.0),
    "frozen": True,
    "similarity": True,
    "replicas": True,
}


def changed(**changes) -> Job:
    return dataclasses.replace(SMALL, **changes)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("ISLES_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


# ---- the name of a run


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(Job)])
def test_every_field_is_part_of_the_name(field):
    value = OTHER_VALUES.get(field, getattr(SMALL, field))
    other = changed(**{field: value + 1 if isinstance(value, (int, float)) and field not in OTHER_VALUES else value})
    assert other != SMALL
    assert key_of(other, TEXT, "digest") != key_of(SMALL, TEXT, "digest")


def test_the_same_text_elsewhere_is_the_same_run(tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "folder" / "second.txt"
    first.write_text("\n".join(f"line {number}" for number in range(2000)))
    second.parent.mkdir()
    shutil.copy(first, second)
    keys = [tasks_of({"run": SMALL}, range(1), Text(str(path)))[0].key for path in (first, second)]
    assert keys[0] == keys[1]
    first.write_text("\n".join(f"other line {number}" for number in range(2000)))
    assert tasks_of({"run": SMALL}, range(1), Text(str(first)))[0].key != keys[0]


def test_data_parallel_does_not_know_how_many_islands_share_a_batch():
    two, one = changed(method=None), changed(method=None, islands=1, batch_size=4)
    assert key_of(two, TEXT, "digest") == key_of(one, TEXT, "digest")
    assert train(two, TEXT)["curve"] == train(one, TEXT)["curve"]


# ---- one run


def test_a_run_is_a_function_of_its_job():
    first, second = train(SMALL, TEXT), train(SMALL, TEXT)
    times = ("seconds", "cpu_seconds", "step_seconds")
    assert {k: v for k, v in first.items() if k not in times} == {k: v for k, v in second.items() if k not in times}
    assert train(changed(seed=1), TEXT)["val_loss"] != first["val_loss"]
    json.dumps(first, allow_nan=False)


def test_diloco_with_one_island_and_plain_averaging_is_the_bare_loop():
    alone = isles.Method.diloco(sync_every=4, outer_lr=1.0, outer_momentum=0.0)
    with_engine = train(changed(method=alone, islands=1), TEXT)
    bare = train(changed(method=None, islands=1), TEXT)
    assert with_engine["val_loss"] == pytest.approx(bare["val_loss"], abs=2e-5)
    assert bare["bytes_sent"] == with_engine["bytes_sent"] == 0


def test_replica_average_and_outer_are_one_after_a_full_synchronisation():
    method = isles.Method.diloco(sync_every=4)
    seen = train(changed(method=method, replicas=True), TEXT)
    assert seen["replica_loss"] == seen["average_loss"] == seen["outer_loss"] == seen["val_loss"]
    apart = train(changed(method=method, replicas=True, steps=7), TEXT)  # three steps after the last exchange
    assert len({apart["replica_loss"], apart["average_loss"], apart["outer_loss"]}) == 3


def test_similarity_has_a_cosine_for_every_round():
    cosines = train(changed(similarity=True), TEXT)["cosines"]
    assert sorted((fragment, step) for fragment, step, _ in cosines) == [(0, 4), (0, 8), (1, 2), (1, 6)]
    assert all(-1 <= cosine <= 1 for _, _, cosine in cosines)
    same = train(changed(similarity=True, shards="trained", islands=1), TEXT)
    assert same["cosines"] == []


@pytest.mark.parametrize("changes", [{"inner": "muon"}, {"frozen": True}, {"weights": (3.0, 1.0)}])
def test_options_change_the_run(changes):
    assert train(changed(**changes), TEXT)["val_loss"] != train(SMALL, TEXT)["val_loss"]


def test_shards():
    parts = TEXT.shards(3)
    whole = TEXT.tokens()
    assert [token for part in parts for token in part.train.tolist()] == whole.train.tolist()
    two = Text("synthetic:0.05,synthetic:0.02", "synthetic:0.01,synthetic:0.03")
    own = two.shards(2)
    assert [part.digest for part in own] == [
        Text("synthetic:0.05", "synthetic:0.01").tokens().digest,
        Text("synthetic:0.02", "synthetic:0.03").tokens().digest,
    ]
    record = train(changed(shards="trained"), two)
    assert len(record["shard_losses"]) == 2
    assert train(changed(shards="measured"), two)["val_loss"] != record["val_loss"]


def test_a_run_that_diverges_is_a_record_too():
    record = train(changed(method=None, learning_rate=1e30), TEXT)
    assert record["val_loss"] is None
    assert str(Records([{"name": "run", "job": {"seed": 0}, **record}]).change("run", "run")) == "diverged"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_compiled_kernels_give_the_same_losses():
    job = changed(model="1x2x8", islands=1)
    plain, compiled = (train(job, TEXT, compile_model=choice) for choice in (False, True))
    assert compiled["compiled"]
    assert compiled["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-3)


# ---- probes


def test_cosines_are_means_over_pairs():
    def payload(values: list[float], round_number: int = 1, weight: float = 1.0) -> Payload:
        vector = torch.tensor(values)
        return Payload(0, round_number, codecs["fp32"], len(values), weight, codecs["fp32"].encode(vector))

    similarity = probes.Similarity()
    for values in ([1.0, 0.0], [2.0, 0.0], [0.0, 1.0]):
        similarity.add(payload(values, 0), 3)  # round 0 is no outer gradient
        similarity.add(payload(values), 3)
    [(fragment, number, cosine)] = similarity.cosines
    assert (fragment, number, round(cosine, 6)) == (0, 1, round(1 / 3, 6))


def test_only_the_fragment_that_is_sent_next_is_trained():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = isles.Method(sync_every=6, fragments=[[f"{n}.weight", f"{n}.bias"] for n in range(3)])
    trained = []
    with isles.DiLoCo(model, optimizer, method) as diloco:
        assert diloco.schedule.offsets == (0, 2, 4)
        for step in range(1, 8):
            model(torch.ones(2)).sum().backward()
            probes.freeze(diloco, step)
            trained.append([n for n, layer in enumerate(model) if layer.weight.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
    assert trained == [[1], [1], [2], [2], [0], [0], [1]]


# ---- many runs


def test_finished_runs_are_not_run_again(tmp_path, monkeypatch):
    tasks = tasks_of({"first": SMALL, "same": SMALL, "other": changed(method=None)}, range(2), TEXT)
    log = io.StringIO()
    records = dict(run_tasks(tasks[:3], TEXT, workers=1, cache=tmp_path, stream=log))
    assert "2 runs to go" in log.getvalue()
    assert records[tasks[0]] == records[tasks[1]] != records[tasks[2]]
    log = io.StringIO()
    again = dict(run_tasks(tasks, TEXT, workers=1, cache=tmp_path, stream=log))
    assert "2 runs to go" in log.getvalue()
    assert len(again) == 6
    assert again[tasks[0]] == records[tasks[0]]
    next(tmp_path.glob("runs/*.json")).write_text("{")  # damaged: as if it were not there
    log = io.StringIO()
    assert len(dict(run_tasks(tasks, TEXT, workers=1, cache=tmp_path, stream=log))) == 6
    assert "1 runs to go" in log.getvalue()


def test_processes_give_what_this_process_gives(tmp_path):
    tasks = tasks_of({"streaming": SMALL, "data-parallel": changed(method=None)}, range(1), TEXT)
    here = dict(run_tasks(tasks, TEXT, workers=1, cache=tmp_path / "here"))
    there = dict(run_tasks(tasks, TEXT, workers=2, cache=tmp_path / "there"))
    assert {t.name: r["curve"] for t, r in here.items()} == {t.name: r["curve"] for t, r in there.items()}


def test_what_goes_wrong_in_a_process_is_raised_here(tmp_path):
    too_much = Task("too much", changed(batch_size=10**6), "key")
    with pytest.raises(ValueError, match="use more text"):
        list(run_tasks([too_much], TEXT, workers=2, cache=tmp_path))


def test_a_process_that_dies_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_work", die)
    with pytest.raises(ValueError, match=r"exit code 7 and no result.*start again to go on"):
        list(run_tasks(tasks_of({"run": SMALL}, range(1), TEXT), TEXT, workers=2, cache=tmp_path))


def die(*_) -> None:
    os._exit(7)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_study_leaves_no_process_and_goes_on(stop, tmp_path, monkeypatch, capsys):
    """It has far more to do than it can do before the signal comes; what goes on later is the beginning of it."""
    flags = ["--scale", "quick", "--model", "1x2x8", "--workers", "2", "--results", str(tmp_path), "--seeds"]
    arguments = ["reproduce", "evaluated-weights", *flags]
    monkeypatch.setenv("ISLES_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "isles.cli", *arguments, "30"]
    study = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    lines = iter(study.stderr.readline, "")
    finished = next(line for line in lines if line.startswith("[2/90]"))
    if stop == signal.SIGINT:
        os.killpg(study.pid, stop)  # as a terminal does
    else:
        study.kill()
    rest = study.stderr.read()
    assert study.wait(120) == (130 if stop == signal.SIGINT else -stop), finished + rest
    assert "Traceback" not in rest
    deadline = time.monotonic() + 60
    while (left := in_session(study.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    if stop == signal.SIGKILL:
        return
    assert cli.main([*arguments, "2"]) == 0
    todo = [int(line.split()[0]) for line in capsys.readouterr().err.splitlines() if "runs to go" in line]
    assert sum(todo) <= 6 - 2, "no line at all: everything was finished"


def in_session(session: int) -> list[str]:
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


# ---- what records say


def test_change_is_paired_by_seed():
    def record(name: str, seed: int, loss: float) -> dict:
        return {"name": name, "job": {"seed": seed}, "val_loss": loss}

    records = Records([record("base", 0, 2.0), record("base", 1, 4.0), record("own", 1, 4.4), record("own", 0, 2.2)])
    change = records.change("own", "base")
    assert change.mean == pytest.approx(0.1)
    assert change.error == pytest.approx(0.0, abs=1e-12)
    assert records.seeds() == 2
    assert records.best(["own", "base"]) == "base"
    with pytest.raises(ValueError, match="no run is called 'other'"):
        records.change("other", "base")


def test_verdicts_are_open_within_two_standard_errors():
    assert Change(0.004, 0.001).below(0.005) is None
    assert Change(0.002, 0.001).below(0.005) is True
    assert Change(0.008, 0.001).below(0.005) is False
    assert Change(0.0049, None).below(0.005) is True
    assert Change(float("inf"), None).above(0.01) is True
