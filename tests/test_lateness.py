"""How late an island's payloads come, where the others complete rounds without them: measured, written down, told."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import isles
from isles.elastic.lateness import MOST_LEFT_OUT, Lateness
from isles.elastic.objects import payload_name, seal_name
from isles.elastic.requests import Answer, Operation
from isles.view.live import Live
from isles.view.problems import problems
from tests.reference import Tower, toy_backward
from tests.stores import in_order, new_store, threads

torch.set_num_threads(1)


def look(lateness: Lateness, number: int, begin: float, status: Any = "missing") -> None:
    lateness.note(Operation("get", seal_name(number)), Answer(status), begin, begin + 0.1)


def store(lateness: Lateness, number: int, end: float, status: Any = "ok") -> None:
    lateness.note(Operation("put", payload_name(number, 1)), Answer(status), end - 1, end)


def test_lateness_is_from_the_last_look_that_found_the_round_open_until_the_payload_is_stored():
    lateness = Lateness()
    look(lateness, 3, 1.0)
    look(lateness, 3, 2.0)
    look(lateness, 3, 3.0, "ok")
    store(lateness, 3, 4.5)
    assert lateness.left_out(3) == 2.5


def test_an_open_round_says_that_all_later_ones_are_open_and_nothing_about_earlier_ones():
    lateness = Lateness()
    look(lateness, 3, 2.0)  # then 3 and 4 are found at once
    look(lateness, 5, 6.0)
    store(lateness, 4, 7.0)
    assert lateness.left_out(4) == 5.0


def test_a_payload_that_is_still_on_its_way_is_told_with_a_later_round():
    lateness = Lateness()
    look(lateness, 1, 1.0)
    assert lateness.left_out(1) is None
    lateness.forget(1)
    store(lateness, 1, 2.0, "again")
    look(lateness, 2, 3.0)
    assert lateness.left_out(2) is None
    lateness.forget(2)
    store(lateness, 1, 5.0)
    assert lateness.left_out(3) == 4.0
    lateness.forget(3)
    assert lateness.left_out(4) == 4.0  # nothing newer is known


def test_a_payload_that_is_in_time_by_a_hair_is_not_early():
    lateness = Lateness()
    store(lateness, 1, 1.0)
    look(lateness, 1, 1.5)
    assert lateness.left_out(1) == 0.0


def test_what_is_kept_is_bounded():
    lateness = Lateness()
    for number in range(1, 1000):
        look(lateness, number, float(number))
        if number % 2:
            store(lateness, number, number + 0.5)
        else:
            lateness.left_out(number)  # and never stored
        lateness.forget(number)
    sizes = [len(each) for each in (lateness._open, lateness._stored, lateness._left_out)]
    assert max(sizes) <= 2 * MOST_LEFT_OUT + 1  # every other round is on its way; and one look before them


class SlowUpload:
    """A store that an island's payloads reach only after their round was completed without them, and a while later."""

    def __init__(self, store: Any) -> None:
        self.store, self.url, self.is_local = store, store.url, store.is_local
        self.get, self.put, self.list, self.insist = store.get, store.put, store.list, store.insist
        self.over = threading.Event()
        self.late: dict[int, float] = {}
        """At least, in seconds, by round."""

    def perform(self, operation: Operation) -> Answer:
        if operation.kind != "put" or not operation.name.startswith("rounds/"):
            return self.store.perform(operation)  # type: ignore[no-any-return]
        number = int(operation.name.split("/")[1])
        while not self.over.is_set() and self.store.get(seal_name(number)) is None:
            time.sleep(0.005)
        sealed = time.monotonic()
        time.sleep(0.3)
        answer: Answer = self.store.perform(operation)
        self.late[number] = time.monotonic() - sealed
        return answer


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_an_island_on_a_slow_link_says_how_late_it_is(tmp_path: Path, kind: str):
    method = isles.Method.streaming(sync_every=4, fragments=1, overlap=2)
    told: list[isles.Event] = []
    over = threading.Event()
    uploads: list[SlowUpload] = []
    begin = time.monotonic()
    with new_store(kind, tmp_path) as (url, options):

        def island(slow: bool, turn: Any) -> None:
            world = isles.StoreWorld(url, patience=0.05, timeout=60, **options)
            if slow:
                world.store = SlowUpload(world.store)  # type: ignore[assignment]
                uploads.append(world.store)  # type: ignore[arg-type]
            model = Tower(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            on_event = told.append if slow else None
            diloco = turn(lambda: isles.DiLoCo(model, optimizer, method, world=world, on_event=on_event))
            with diloco:
                while not over.is_set():
                    toy_backward(model, world.rank, diloco.step_count + 1)
                    optimizer.step()
                    time.sleep(0.01)
                    if slow and sum(event.late_seconds is not None for event in told) >= 3:
                        over.set()
                        world.store.over.set()  # type: ignore[attr-defined]

        turns = in_order(2)
        threads(lambda: island(False, turns[0]), lambda: island(True, turns[1]))
    excluded = [event for event in told if event.kind == "excluded"]
    late = [event.late_seconds for event in excluded if event.late_seconds is not None]
    assert len(late) >= 3
    assert all(event.late_seconds is None for event in told if event.kind != "excluded")
    [upload] = uploads
    assert min(late) >= min(upload.late.values())
    assert max(late) <= time.monotonic() - begin


def test_the_page_says_how_late_payloads_are():
    run = Live("store")
    feed = run.feed_all
    feed([{"event": "announced", "island": island, "round": 1} for island in (0, 1)])
    place = {"island": 1, "step": 15, "fragment": 0, "round": 1}
    for number, late in ((1, None), (2, 2.5), (3, 3.5)):
        who = {"islands": [0], "missing": [1], "num_bytes": {"0": 5000}}
        feed([{"event": "sealed", "round": number, "fragment": 0, "clock": 15 * number, **who}])
        feed([{"event": "excluded", **place, "round": number, "late_seconds": late}])
    [problem] = problems(run, 0.0)
    assert problem.what == "Island 1 has been out of 3 rounds: its payloads arrive 3.0 s too late."
    assert problem.todo.startswith("A larger overlap or patience would take it in")
