"""What the laboratory makes of events, counters and flags: no network needed."""

import itertools
import os
from pathlib import Path

import pytest

from isles.core.method import Method
from isles.lab import figures, nodes, prediction, programs, reference, run, turns
from isles.lab.network import Counters
from isles.lab.reference import Turn
from isles.plan.workload import workload_of
from isles.train.config import TrainConfig

FOLDER = Path("somewhere")


def step(island, number, time, seconds=1.0, wait=0.0, sent=0):
    return {
        "event": "step",
        "island": island,
        "step": number,
        "time": time,
        "seconds": seconds,
        "wait_seconds": wait,
        "engine_seconds": wait,
        "bytes_sent": sent,
    }


def counters(sent):
    return [Counters(sent, 2 * sent, sent // 100, sent // 50), Counters(3 * sent, sent, sent // 100, sent // 50)]


LOG = [
    {"event": "config", "time": 9.0, "islands": 2, "method_name": "diloco", "parameters": 10, "island": 0},
    step(0, 1, 11.0),
    step(1, 1, 11.0),
    step(0, 2, 13.0, seconds=2.0, wait=1.0, sent=400),
    step(1, 2, 15.0, seconds=4.0, wait=3.0, sent=500),
    {"event": "apply", "island": 1, "time": 15.5},
    {"event": "end", "time": 16.0, "bytes_sent": 900, "val_loss": 2.0},
]
SAMPLES = [(time, counters(100 * index)) for index, time in enumerate((8.0, 8.9, 12.0, 15.9, 16.2, 20.0))]


def test_figures_of_a_run():
    found = figures.of_run(LOG, SAMPLES, reference=[1.0, 1.5])
    assert found["wall_seconds"] == pytest.approx((3 + 5) / 2)
    assert found["compute_utilization"] == pytest.approx((2 * 1.0 / 3 + 2 * 1.5 / 5) / 2)
    assert found["step_seconds"] == pytest.approx(2.0)
    assert found["wait_seconds"] == pytest.approx(2.0)
    assert found["drain_seconds"] == pytest.approx(0.5)
    assert found["bytes_sent"] == 900
    assert found["bytes_sent_by_island"] == [400, 500]
    assert found["event_log_utilization"] == pytest.approx(1 - 4 / 8), "four of all eight seconds of steps"
    assert found["val_loss"] == 2.0


@pytest.mark.parametrize(("overlap", "skipped"), [(None, 1), (0, 1), (2, 2)])
def test_the_steady_state_begins_after_the_first_step_and_when_something_can_be_due(overlap, skipped):
    method = None if overlap is None else Method.streaming(sync_every=10, overlap=overlap).as_dict()
    log = [
        {**LOG[0], "islands": 1, "method": method},
        *(step(0, n, 10.0 + n * n, seconds=2 * n - 1) for n in range(1, 6)),
    ]
    found = figures.of_run(log, SAMPLES, reference=[1.0])
    assert found["compute_utilization"] == pytest.approx(5 / 25)
    assert found["steady_utilization"] == pytest.approx((5 - skipped) / (25 - skipped**2))


def test_of_a_long_run_the_last_periods_count_as_steady():
    """Two hundred steps of one second, then eight periods of ten steps that take two: a backlog has built up."""
    seconds = [1] * 200 + [2] * 80
    ends = list(itertools.accumulate(seconds, initial=10))[1:]
    steps = [step(0, n, float(end), seconds=took) for n, (end, took) in enumerate(zip(ends, seconds, strict=True), 1)]
    log = [{**LOG[0], "islands": 1, "method": Method.eager(sync_every=10).as_dict()}, *steps]
    found = figures.of_run(log, SAMPLES, reference=[1.0])
    assert found["compute_utilization"] == pytest.approx(280 / 360)
    assert found["steady_utilization"] == pytest.approx(1 / 2)


def test_counters_are_taken_from_before_the_first_step_to_after_the_end():
    found = figures.of_run(LOG, SAMPLES, reference=None)
    assert found["kernel_bytes_by_island"] == [300, 900], "from 8.9 s to 16.2 s"
    assert found["kernel_bytes_received_by_island"] == [600, 300]
    assert found["kernel_bytes"] == 1200
    assert found["kernel_bytes_with_start"] == 4 * 500
    assert found["kernel_bytes_per_byte_sent"] == pytest.approx(1200 / 900)
    assert found["compute_utilization"] is None


def test_a_run_without_steps_is_told():
    with pytest.raises(ValueError, match="no step of island 1"):
        figures.loops([event for event in LOG if event.get("island") == 0], 2)


# ---- the reference, in turns with the run


def test_a_step_of_the_reference_counts_if_it_lies_in_a_turn():
    """Steps of one second; stopped after 3.5 s for 10 s, in the midst of the fourth."""
    ends = [1.0, 2.0, 3.0, 14.0, 15.0, 16.0]
    steps = [step(0, n, end, seconds=end - begin) for n, (begin, end) in enumerate(itertools.pairwise([0.0, *ends]), 1)]
    numbers = [
        [event["step"] for event in reference.steps_within(steps, turn)] for turn in (Turn(0.5, 3.5), Turn(13.5, 15.9))
    ]
    assert numbers == [[2, 3], [5]], "whatever was cut by the begin or the end of a turn is in none"


WAITING = ("wait_seconds", "engine_seconds")


def test_a_run_that_was_stopped_has_the_figures_of_one_that_was_not():
    """Stopped before the loop, within a step of both islands, twice within one, and after the loop."""
    pauses = [Turn(9.5, 19.5), Turn(22.5, 23.5), Turn(24.0, 26.0), Turn(29.0, 29.5)]

    def stopped(when):
        """When something happens that would have happened at a time."""
        for pause in pauses:
            when += pause.seconds * (pause.begin <= when)
        return when

    def event(each):
        """Where an island waits it is stopped while it waits."""
        end = stopped(each["time"])
        if each["event"] != "step":
            return {**each, "time": end}
        seconds = end - stopped(each["time"] - each["seconds"])
        waited = {name: each[name] + (seconds - each["seconds"]) * (each[name] > 0) for name in WAITING}
        return {**each, "time": end, "seconds": seconds, **waited}

    log, samples = [event(each) for each in LOG], [(stopped(when), counted) for when, counted in SAMPLES]
    assert log != LOG
    healed = [(turns.running(when, pauses), counted) for when, counted in samples]
    found = figures.of_run(turns.without_pauses(log, pauses), healed, [1.0, 1.5])
    for name, value in figures.of_run(LOG, SAMPLES, [1.0, 1.5]).items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    assert figures.of_run(log, samples, [1.0, 1.5])["wall_seconds"] > 1.5 * found["wall_seconds"], "as it was logged"


def test_links_are_quiet_while_nobody_sends():
    idle, busy = counters(100), counters(100_000)
    assert not turns.quiet([(0.0, idle)], 0.2), "not known yet"
    assert not turns.quiet([(0.0, idle), (0.1, idle)], 0.2), "not yet"
    assert turns.quiet([(0.0, counters(0)), (0.5, idle), (0.6, idle), (0.75, idle)], 0.2)
    assert not turns.quiet([(0.0, idle), (0.5, idle), (0.75, busy)], 0.2)
    assert not turns.quiet([(0.0, idle), (0.5, idle), (0.625, busy), (0.75, busy)], 0.2)
    assert turns.quiet([(0.0, idle), (0.5, busy), (0.625, busy), (0.75, busy)], 0.2)
    only_one = [idle[0], busy[1]]
    assert not turns.quiet([(0.0, idle), (0.5, idle), (0.75, only_one)], 0.2)


def test_bytes_that_move_while_the_run_is_stopped_are_known():
    samples = [(float(when), counters(100 * when)) for when in range(20)]
    assert turns.moved(samples, []) == 0
    assert turns.moved(samples, [Turn(1.5, 4.5), Turn(10.0, 11.0), Turn(12.1, 12.2)]) == 4 * 200 + 4 * 100


class Reference:
    """Islands that trained alone: what a step took in each turn, by its begin."""

    def __init__(self, took):
        self.took = dict(took)
        self.turns = [Turn(begin, begin + 1) for begin in took]

    def step_seconds(self, turn):
        return self.took[turn.begin]

    def go_on(self):
        pass

    def work(self, steps):
        assert steps == 7

    def stop(self):
        self.turns.append(Turn(100.0, 110.0))
        self.took[100.0] = [5.0, 6.0]


def counted(took, in_turns=True):
    options = run.Options(folder=FOLDER, reference_steps=7, reference_turns=in_turns)
    steps = [step(island, n, 10.0 + n) for n in range(1, 21) for island in (0, 1)]
    return run._references(options, Reference(took), [LOG[0], *steps], lambda line: None)


def test_the_turns_amid_the_run_are_its_reference():
    """Steady from 11 s, when the first step has been done, to 30 s."""
    took = {0.0: [1.0, 1.0], 10.5: [9.0, 9.0], 12.0: [2.0, 3.0], 15.0: [2.5, 3.5], 20.0: [], 29.0: [3.0, 3.0], 29.5: []}
    assert counted(took) == [[2.0, 3.0], [2.5, 3.5], [3.0, 3.0]]
    assert reference.mean(counted(took)) == pytest.approx([2.5, 19 / 6])


def test_a_run_that_could_not_be_stopped_has_a_reference_before_it_and_one_after():
    took = {0.0: [1.0, 1.0], 12.0: [2.0, 3.0], 15.0: [2.5, 3.5]}
    assert counted(took) == [[1.0, 1.0], [5.0, 6.0]]
    assert counted({0.0: [1.0, 2.0]}, in_turns=False) == [[1.0, 2.0]]


# ---- flags


def parsed(words):
    """What `isles train` would make of the flags of a program."""
    assert words[:3] == ["-m", "isles.cli", "train"]
    chosen, knobs = programs._read([word for word in words[5:] if not word.startswith("--islands")], TrainConfig, "")
    return chosen, knobs


def test_the_run_gets_the_users_flags_as_they_are():
    written = ["--method", "eager", "--sync-every", "7", "--steps", "5", "--offsets", "0,3"]
    program = programs.train(written, islands=3)
    words = program.flags_of_run(FOLDER)
    assert words[3:5] == ["--run-dir", "somewhere"]
    assert words[-len(written) :] == written
    assert "--islands=3" in words
    chosen, knobs = parsed(words)
    assert chosen["eval_every"] == chosen["checkpoint_every"] == 0
    assert knobs == {"sync_every": 7, "offsets": [0, 3]}


def test_the_users_flags_win():
    program = programs.train(["--eval-every", "3", "--threads", "5"], islands=2)
    chosen, _ = parsed(program.flags_of_run(FOLDER))
    assert (chosen["eval_every"], chosen["threads"]) == (3, 5)
    assert program.config.eval_every == 3


def test_the_reference_is_the_same_training_without_the_method():
    written = ["--method", "streaming", "--codec", "e3m0", "--overlap", "2", "--model", "nano", "--seed", "4"]
    program = programs.train([*written, "--steps", "9", "--eval-every", "2", "--resume"], islands=2)
    chosen, knobs = parsed(program.flags_of_reference(FOLDER, 1))
    assert knobs == {}
    assert chosen["method"] == "data-parallel"
    assert (chosen["model"], chosen["seed"]) == ("nano", 4)
    assert chosen["eval_every"] == 0
    assert chosen["steps"] >= programs.MANY
    assert "resume" not in chosen


def test_every_island_has_its_own_text_in_the_reference_too():
    program = programs.train(["--island-data", "a.txt;b.txt"], islands=2)
    chosen, _ = parsed(program.flags_of_reference(FOLDER, 1))
    assert chosen["data"] == "b.txt"
    assert "island_data" not in chosen


class TwoIslands:
    """As much of a network as it takes to write a command."""

    islands = (0, 1)

    def address(self, island):
        return f"10.0.0.{island}"


def test_the_laboratory_starts_what_the_documentation_says():
    page = (Path(__file__).parent.parent / "docs" / "multi-machine.md").read_text()
    start = page[page.index("    export GLOO") : page.index("Your own script")]
    lab = nodes.torchrun(TwoIslands(), 1, ["-m", "isles.cli", "train", "--run-dir", "runs/mine"])
    words = [word for word in lab if word.startswith("-")]
    assert len(words) > 8
    for word in words:
        assert word in start.split() or word == "-m", f"{word} is not documented"
    assert set(nodes.environment(TwoIslands())) - set(os.environ) <= {"GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"}
    assert "GLOO_SOCKET_IFNAME=INTERFACE" in start
    assert "is_host=0" in lab
    assert "is_host=1" in nodes.torchrun(TwoIslands(), 0, [])


# ---- the planner


def config_event(method, **more):
    fragments = [
        {"numel": 300_000, "layers": "outside the layers"},
        {"numel": 200_000, "layers": "0,2"},
        {"numel": 200_000, "layers": "1,3"},
    ]
    return {
        "event": "config",
        "name": "run",
        "parameters": 700_000,
        "layers": 4,
        "fragments": fragments,
        "method": method.as_dict() if method else None,
        "config": {"steps": 40, "reduction": "auto"},
        **more,
    }


def test_the_planner_is_told_of_the_payload_that_was_measured():
    """DiLoCo waits for the whole model in fp32 once in a period: the formula is simple."""
    config = config_event(Method.diloco(sync_every=10), fragments=[{"numel": 700_000, "layers": "0,1,2,3"}])
    found = prediction.predicted(config, [0.1, 0.1], [8e6, 8e6])
    exchange = 8 * found["planned_bytes_sent"] / 2 / 4 / 8e6
    assert found["planned_bytes_sent"] == pytest.approx(2 * 4 * 700_000 * 4, rel=0.01)
    assert found["planned_utilization"] == pytest.approx(1.0 / (1.0 + exchange), rel=0.1)
    assert found["planned_step_seconds"] == pytest.approx((1.0 + exchange) / 10, rel=0.1)


def test_the_slowest_link_sets_the_pace():
    config = config_event(Method.diloco(sync_every=10))
    alike = prediction.predicted(config, [0.1, 0.1], [4e6, 4e6])
    unequal = prediction.predicted(config, [0.1, 0.1], [4e6, 80e6])
    assert unequal["planned_utilization"] == pytest.approx(alike["planned_utilization"], rel=0.1)


def test_data_parallel_is_predicted_too():
    found = prediction.predicted(config_event(None), [0.1, 0.1], [8e6, 8e6])
    assert found["planned_utilization"] == pytest.approx(0.1 / (0.1 + 8 * 2.8e6 / 8e6), rel=0.1)
    assert prediction.predicted(config_event(None), [0.1, 0.1], [8e6, 8e6], ranks=2)["planned_utilization"] is None


def test_the_workload_is_the_runs_own_model():
    work = workload_of(config_event(Method.streaming()), 0.1)
    assert (work.parameters, work.layers, work.outside_parameters) == (700_000, 4, 300_000)
