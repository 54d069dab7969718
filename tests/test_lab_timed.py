"""Islands that sleep for compute: everything but the compute is real."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

import isles
from isles.core.fragments import cut
from isles.core.schedule import Schedule
from isles.lab import timed, timed_model
from isles.lab.timed import TimedConfig, TimedRun
from isles.lab.timed_model import SLICES, Pace, SliceSGD, TimedModel
from isles.train.place import Place
from isles.view import events
from isles.view.runs import Run
from isles.wire.reduction import choose, traffic
from isles.wire.world import Payload
from tests import processes

PARAMETERS, LAYERS, STEPS = 40_001, 3, 2 * SLICES


def small_model(step_seconds: float = 1e-4, island: int = 0) -> TimedModel:
    return TimedModel(parameters=PARAMETERS, layers=LAYERS, step_seconds=step_seconds, seed=0, island=island)


def train(model: TimedModel, steps: int, clock=time.perf_counter) -> list[float]:
    """The seconds of each step."""
    optimizer, seconds = SliceSGD(model), []
    begin = clock()
    for step in range(1, steps + 1):
        model.pace.begin(step, begin)
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        end = clock()
        seconds.append(end - begin)
        begin = end
    return seconds


def one_island(rank: int, islands: int, folder: str, method_name: str, reduction: str, knobs: dict) -> tuple:
    config = TimedConfig(
        run_dir=folder,
        parameters=PARAMETERS,
        layers=LAYERS,
        step_seconds=1e-4,
        steps=STEPS,
        method=method_name,
        reduction=reduction,
        timeout_seconds=60,
    )
    method = getattr(isles.Method, method_name)(**knobs) if method_name != "data-parallel" else None
    world = isles.TorchWorld(timeout=60, reduction=reduction)
    run = TimedRun(config, method, Place(rank, islands, 1, torch.device("cpu"), world))
    summary = run.run()
    return summary, torch.cat([parameter.detach() for parameter in run.model.parameters()])


def theory(method: isles.Method | None, islands: int, reduction: str) -> int:
    """Bytes that all islands send."""
    if method is None:
        return islands * STEPS * round(2 * (islands - 1) / islands * 4 * PARAMETERS)
    fragments = cut(small_model(), method)
    schedule, codec, total = Schedule.of(method, len(fragments)), isles.codecs[method.codec], 0
    for step in range(1, STEPS + 1):
        for due in schedule.sends(step):
            numel = fragments[due.fragment].numel
            body = torch.empty(codec.num_bytes(numel), dtype=torch.uint8)
            payload = Payload(due.fragment, due.round, codec, numel, 1.0, body)
            total += islands * traffic(choose(reduction, islands, codec), islands, payload)
    return total


def closing(method: isles.Method | None, islands: int, reduction: str) -> int:
    """Bytes that all islands send after the last step: a closing round of what was not sent at that step, and eager
    ones average their anchors, in fp32.
    """
    if method is None:
        return 0
    fragments = cut(small_model(), method)
    sent = {due.fragment for due in Schedule.of(method, len(fragments)).sends(STEPS)}
    last = [(method.codec, fragment.numel) for index, fragment in enumerate(fragments) if index not in sent]
    last += [("fp32", fragment.numel) for fragment in fragments if method.update == "eager"]
    total = 0
    for name, numel in last:
        codec = isles.codecs[name]
        payload = Payload(0, 0, codec, numel, 1.0, torch.empty(codec.num_bytes(numel), dtype=torch.uint8))
        total += islands * traffic(choose(reduction, islands, codec), islands, payload)
    return total


@pytest.mark.parametrize(
    ("islands", "name", "reduction", "knobs"),
    [
        (2, "streaming", "auto", {"sync_every": 40, "fragments": 3}),
        (2, "eager", "auto", {"sync_every": 50}),
        (3, "diloco", "reduce-scatter", {"sync_every": 64}),
        (2, "data-parallel", "auto", {}),
    ],
)
def test_islands_agree_and_send_what_theory_says(tmp_path, islands, name, reduction, knobs):
    folder = tmp_path / "run"
    results = processes.values(one_island, islands, tmp_path, islands, str(folder), name, reduction, knobs)
    summary, model = results[0]
    assert all(torch.equal(model, other) for _, other in results)
    assert (model != 0).float().mean() > 0.9
    method = None if name == "data-parallel" else getattr(isles.Method, name)(**knobs)
    in_the_loop = theory(method, islands, reduction)
    assert summary["bytes_sent"] == in_the_loop + closing(method, islands, reduction) > 0
    written = events.read(folder)
    if method is not None:
        sends = [event["num_bytes"] for event in written if event["event"] == "send"]
        assert sum(sends) == in_the_loop
    for island in range(islands):
        steps = [e["step"] for e in written if e["event"] == "step" and e["island"] == island]
        assert steps == list(range(1, STEPS + 1))
    run = Run.load(folder)
    assert run.end["bytes_sent"] == summary["bytes_sent"]
    assert run.config["parameters"] == PARAMETERS
    assert 0 < summary["compute_utilization"] <= 1


def test_gradients_differ_between_islands_and_reach_every_parameter():
    first, second = small_model(island=0), small_model(island=1)
    for model in (first, second):
        train(model, SLICES)
        weights = torch.cat([parameter.detach() for parameter in model.parameters()])
        assert (weights != 0).float().mean() > 0.99
    assert not torch.equal(first.embed.weight, second.embed.weight)


def test_a_step_touches_one_slice_and_copies_no_gradient():
    model = small_model()
    model.pace.begin(1, time.perf_counter())
    model(torch.ones(1)).backward()
    for layer in (model.embed, *model.layers):
        assert layer.weight.grad.data_ptr() == layer.gradient().data_ptr()
    SliceSGD(model).step()
    moved = sum(int((parameter != 0).sum()) for parameter in model.parameters())
    assert 0 < moved <= PARAMETERS / SLICES + LAYERS + 1


def test_gradients_arrive_one_after_the_other_from_the_last_layer():
    seconds = 0.06
    model, arrived = small_model(seconds), []
    for number, layer in enumerate(model.layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: arrived.append((n, time.perf_counter())))
    begin = time.perf_counter()
    model.pace.begin(1, begin)
    out = model(torch.ones(1))
    forward = time.perf_counter() - begin
    out.backward()
    assert forward >= 0.9 * seconds / 3
    assert [number for number, _ in arrived] == [2, 1, 0]
    for share, (_, when) in enumerate(arrived, start=1):  # never early; late is the machine's business
        assert when - begin >= 0.9 * (seconds / 3 + seconds * 2 / 3 * share / LAYERS)


def test_a_step_takes_the_time_that_was_asked_for(monkeypatch):
    asked, steps, clock = 0.03, 15, Clock()
    assert sum(train(small_model(asked), steps)) >= 0.99 * steps * asked  # never early; late is the machine's business
    monkeypatch.setattr(timed_model, "Pace", lambda: Pace(lambda: clock.now, clock.sleep))
    clock.late = 0.001  # in each of six sleeps: only the last one's is there at the end, and is made up for
    first, *others = train(small_model(asked), steps, lambda: clock.now)
    assert first == pytest.approx(asked + clock.late)
    assert others == pytest.approx([asked] * (steps - 1))


def test_a_step_that_is_late_does_not_sleep():
    asked = 60.0
    model = small_model(asked)
    begin = time.perf_counter()
    model.pace.begin(1, begin - 2 * asked)
    model(torch.ones(1)).backward()
    assert time.perf_counter() - begin < asked / 2


class Clock:
    """Time that passes only when it is told to; every sleep ends late by what is asked for."""

    def __init__(self):
        self.now, self.late = 100.0, 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


def test_what_a_pass_is_late_the_next_step_makes_up_for():
    """Sleeps that end late, as on cores that other islands use, do not make the compute longer; the engine does."""
    clock, seconds = Clock(), []
    pace = Pace(lambda: clock.now, clock.sleep)
    for step, late in enumerate((0.0, 0.25, 0.5, 0.0, 0.0), start=1):
        clock.late, begin = late, clock.now
        pace.begin(step, begin)
        pace.work(1.0)
        clock.now += 0.125  # the optimizer, and then an engine
        pace.has_worked(0.125)
        clock.now += 2.0
        seconds.append(clock.now - begin)
    assert seconds == [1 + 0.125 + 2, 1 + 0.25 + 2, 1 - 0.25 + 0.5 + 2, 1 - 0.5 + 2, 1 + 2]
    assert pace.late_seconds == 0.75


def test_no_more_than_one_step_is_made_up_for():
    clock = Clock()
    pace = Pace(lambda: clock.now, clock.sleep)
    pace.begin(1, clock.now)
    clock.late = 7.0
    pace.work(1.0)
    clock.late = 0.0
    for step, wanted in ((2, 0.0), (3, 1.0)):
        begin = clock.now
        pace.begin(step, begin)
        pace.work(1.0)
        assert clock.now - begin == wanted


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--parameters", "3"], "--parameters 3 must be at least 9"),
        (["--parameters", "nan"], "--parameters nan must be at least 9"),
        (["--step-seconds", "-1"], "--step-seconds -1 must be greater than 0"),
        (["--method", "data-parallel", "--sync-every", "5"], "--sync-every has no meaning"),
        (["--sync-every", "0"], "sync_every=0"),
    ],
)
@pytest.mark.usefixtures("_threads")
def test_a_mistake_is_one_line(tmp_path, capsys, flags, words):
    assert timed.main([*flags, "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.usefixtures("_threads")
def test_alone_it_says_what_it_did_and_keeps_what_is_there(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    given = ["--parameters", "1e4", "--steps", "12", "--step-seconds", "0.001", "--sync-every", "4", "--json"]
    given += ["--run-dir", str(tmp_path / "run")]
    assert timed.main(given) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] == 12
    assert summary["islands"] == 1
    assert timed.main(given) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "isles.lab.timed", "--parameters", "2e4", "--steps", "20", "--step-seconds", "0.002"]
    command += ["--method", "streaming", "--sync-every", "10", "--json", "--run-dir", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["islands"] == 2
    assert summary["bytes_sent"] > 0
    assert Run.load(tmp_path / "run").islands == 2
