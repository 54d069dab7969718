"""`isles plan --store`: planned requests and bytes beside those of real islands; and the command."""

import collections
import functools
import json
import math
import pathlib
import threading
import time

import pytest
import torch

import isles
from isles import cli
from isles.core.schedule import Schedule
from isles.elastic.world import LOCAL_POLL, POLL
from isles.plan.fleet import Link, alike
from isles.plan.store import payload_sizes, simulate
from isles.plan.store_costs import EVENT_SECONDS, PRICES
from isles.train.elastic import PUBLISH_SECONDS
from tests.reference import Tower, toy_backward
from tests.stores import in_order, new_store, threads

torch.set_num_threads(1)


class Counting:
    """A store that counts what an island asks of it."""

    def __init__(self, store):
        self._store, self._lock = store, threading.Lock()
        self.count = collections.Counter()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def perform(self, operation):
        begin = time.perf_counter()
        answer = self._store.perform(operation)
        seconds = time.perf_counter() - begin
        with self._lock:
            self.count[operation.kind] += 1
            self.count["seconds"] += seconds
            self.count["up"] += len(operation.body or b"")
            if operation.kind == "get" and answer.status == "ok":
                self.count["down"] += len(answer.value)
        return answer


def measured(store, count, method, step_seconds, snapshot_every, periods):
    """Trains for so many periods after some to get into step; what was counted in them, and their seconds. Everybody is
    waited for: on a busy machine an island would go on with a later round, and there would be more rounds than steps.
    """
    url, client = store
    settings = {"quorum": count, "patience": math.inf, "snapshot_every": snapshot_every, "timeout": 60}
    worlds = [isles.StoreWorld(url, **settings, **client) for _ in range(count)]
    for world in worlds:
        world.store = Counting(world.store)
    together, first = threading.Barrier(count), 3 * method.sync_every
    last = first + periods * method.sync_every
    found = []

    def look():
        found.append((time.perf_counter(), sum((world.store.count.copy() for world in worlds), collections.Counter())))

    def island(world, turn):
        model = Tower(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = turn(functools.partial(isles.DiLoCo, model, optimizer, method, world=world))
        together.wait()
        with diloco:
            for step in range(1, last + method.sync_every):
                toy_backward(model, world.rank, step)
                time.sleep(step_seconds)
                optimizer.step()
                if world.rank == 0 and step in (first, last):
                    look()
        return [fragment.numel for fragment in diloco.fragments]

    sizes = threads(*(functools.partial(island, *each) for each in zip(worlds, in_order(count), strict=True)))[0]
    (begin, before), (end, after) = found
    after.subtract(before)
    return sizes, end - begin, after


def stored_is_bounded(folder, count, payloads, snapshot_every):
    """Payloads of one to two intervals between snapshots, with those in flight and the closing ones; and two or three
    snapshots.
    """
    interval = snapshot_every // len(payloads) * count * sum(payloads)
    found = sum(path.stat().st_size for path in (folder / "rounds").glob("*/*"))
    assert interval <= found <= 2 * interval + 2 * count * sum(payloads)
    assert len(list((folder / "snapshots").glob("*/manifest.json"))) in (2, 3)


@pytest.mark.parametrize(("kind", "count"), [("s3", 2), ("s3", 4), ("folder", 2), ("folder", 4)])
def test_requests_and_bytes_are_those_of_real_islands(kind, count, tmp_path):
    """Given the time of a step and the latency of the store, as they were measured."""
    method = isles.Method.streaming(sync_every=30, fragments=3, overlap=10)
    snapshot_every, periods = 12, 8
    step_seconds = 0.04 if kind == "s3" else 0.01
    with new_store(kind, tmp_path) as store:
        sizes, seconds, real = measured(store, count, method, step_seconds, snapshot_every, periods)
        if kind == "folder":
            stored_is_bounded(pathlib.Path(store[0]), count, payload_sizes(sizes, method.codec), snapshot_every)
    requests = sum(real[name] for name in ("get", "put", "create", "list", "delete"))
    planned = simulate(
        Schedule.of(method, len(sizes)),
        payload_sizes(sizes, method.codec),
        [8 * numel for numel in sizes],
        alike(count, seconds / (periods * method.sync_every), Link.symmetric(1e12)),
        latency_seconds=real["seconds"] / requests,
        poll=POLL if kind == "s3" else LOCAL_POLL,
        snapshot_every=snapshot_every,
    )
    rounds = periods * len(sizes)
    compared = {
        "reads": (planned.reads / planned.rounds, real["get"] / rounds),
        "writes": (planned.writes / planned.rounds, (real["put"] + real["create"] + real["list"]) / rounds),
        "up": (planned.bytes_up / planned.rounds, real["up"] / rounds),
        "down": (planned.bytes_down / planned.rounds, real["down"] / rounds),
    }
    for what, (ours, counted) in compared.items():
        assert 0.75 < ours / counted < 1.25, (what, ours, counted)


MODEL = ("--params", "10M", "--layers", "6", "--step-time", "0.3", "--sync-every", "40")


@pytest.fixture
def plan(capsys):
    """Runs the command; gives the exit code, the text, the JSON and what went to standard error."""

    def call(*flags):
        try:
            code = cli.main(["plan", *flags])
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return code, out, json.loads(out.splitlines()[-1]) if "--json" in flags and code == 0 else None, err

    return call


def test_the_command_says_requests_bytes_storage_and_money(plan):
    code, text, answer, _ = plan("--store", *MODEL, "--bandwidth", "50Mbit", "--json")
    assert code == 0
    assert answer["mode"] == "store"
    assert answer["store_latency_seconds"] == 0.05
    assert list(answer["methods"]) == ["diloco", "streaming-overlap-fp4", "streaming-overlap-5-fp4", "distant-fp4"]
    row = answer["methods"]["distant-fp4"]
    assert row["compute_utilization"] == pytest.approx(1.0)
    assert row["included"] == 1.0
    assert row["snapshot_bytes"] == 8 * 10_000_000
    assert f"{row['dollars_per_day']:.2f}" in text
    payload = payload_sizes([10_000_000], "e3m0")[0]
    periods = 3600 / (40 * 0.3)
    assert row["bytes_down_per_hour"] == pytest.approx(periods * payload, rel=0.02)
    assert row["bytes_up_per_hour"] == pytest.approx(periods * (payload + 80e6 / 16 / 2), rel=0.02)
    assert answer["methods"]["diloco"]["compute_utilization"] < row["compute_utilization"]


def test_money_is_what_the_prices_say(plan):
    _, _, listed, _ = plan("--store", "gcs", *MODEL, "--json")
    assert listed["prices"]["out"] == PRICES["gcs"].out
    only = {"writes": 0.0, "reads": 0.0, "deletes": 0.0, "storage": 0.0, "out": 0.0}
    for name in only:
        text = ",".join(f"{each}={1 if each == name else 0}" for each in only)
        row = plan("--store", "gcs", *MODEL, "--prices", text, "--json")[2]["methods"]["distant-fp4"]
        only[name] = row["dollars_per_day"]
    day = 24 * 2  # hours of two islands
    assert only["writes"] == pytest.approx(row["writes_per_hour"] * day / 1e6)
    assert only["reads"] == pytest.approx(row["reads_per_hour"] * day / 1e6)
    assert only["out"] == pytest.approx(row["bytes_down_per_hour"] * day / 1e9)
    assert only["storage"] == pytest.approx(row["stored_bytes"] / 1e9 / 30)
    assert only["deletes"] > 0
    expected = sum(listed["prices"][name] * dollars for name, dollars in only.items())
    assert listed["methods"]["distant-fp4"]["dollars_per_day"] == pytest.approx(expected)


def test_what_the_link_cannot_carry_is_told(plan):
    code, text, answer, _ = plan("--store", *MODEL, "--bandwidth", "2Mbit", "--json")
    assert code == 0
    assert list(answer["too_slow"]) == ["diloco"]
    assert "diloco: the link is too slow: the payloads of a period take" in text
    assert answer["methods"]["distant-fp4"]["compute_utilization"] < 1


def test_patience_keeps_islands_in_rounds_that_the_link_makes_late(plan):
    slow = (*MODEL, "--codec", "fp32", "--fragments", "1", "--bandwidth", "20Mbit", "--json")
    short, long = (plan("--store", *slow, "--patience", each)[2]["methods"]["yours"] for each in ("1s", "10min"))
    assert short["included"] < long["included"] == 1.0


def test_the_planner_knows_how_often_events_are_written():
    assert EVENT_SECONDS == PUBLISH_SECONDS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--store-latency", "50ms"], "--store-latency 50ms is about a store: give --store too"),
        (["--patience", "60s"], "--patience 60s is about a store"),
        (["--prices", "out=0"], "--prices out=0 is about a store"),
        (["--store", "--paper"], "--paper and --store do not go together"),
        (["--store", "--latency", "5ms"], "--latency and --store do not go together"),
        (["--store", "--ranks", "2"], "--ranks and --store do not go together"),
        (["--store", "--plot", "x.png"], "--plot and --store do not go together"),
        (["--store", "--prices", "gb=1"], "--prices 'gb=1' is not understood"),
        (["--store", "--prices", "out=-1"], "--prices 'out=-1' is not understood"),
        (["--store", "--prices", "out"], "--prices 'out' is not understood"),
        (["--store", "--store-latency", "soon"], "--store-latency 'soon' is not understood"),
        (["--store", "--islands", "99"], "99 islands are more than can be planned on a store: at most 16"),
        (["--store", "--bandwidth", "1kbit"], "the link is too slow"),
        (["--store", "--update", "eager"], "--update eager does not go with --store"),
    ],
)
def test_bad_input_is_one_clear_line(plan, flags, message):
    code, out, _, err = plan(*MODEL, *flags)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
