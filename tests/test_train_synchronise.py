"""What the trainer says a step has cost is what the engine has spent in it, whatever else happens to the optimizer."""

import time

import pytest
import torch

import isles
from isles.train.place import Place
from isles.train.synchronise import Islands
from isles.view.events import EventLog
from tests.reference import Tower, toy_backward

torch.set_num_threads(1)
SLOW_SECONDS = 0.02
METHOD = isles.Method.diloco(sync_every=2)


class Slow:
    """A world in which every exchange takes a while to start."""

    def __init__(self, world):
        self.world, self.rank, self.size, self.gather = world, world.rank, world.size, world.gather

    def start(self, payload):
        time.sleep(SLOW_SECONDS)
        return self.world.start(payload)


class Run:
    """One island, as the trainer runs it."""

    def __init__(self, world, folder):
        self.model = Tower(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        place = Place(world.rank, world.size, 1, torch.device("cpu"), world)
        log = EventLog(folder / "events.jsonl")
        self.islands = Islands(self.model, self.optimizer, METHOD, place, Slow(world), log)

    def costs(self, first, last):
        found = []
        for step in range(first, last + 1):
            toy_backward(self.model, self.islands.diloco.world.rank, step)
            self.optimizer.step()
            found.append(self.islands.cost_of_step(0.0))
        return found


def check(costs, diloco):
    """Every second step exchanges; nothing of it is missed, and nothing is counted twice."""
    quiet, busy = costs[0::2], costs[1::2]
    assert all(cost.engine_seconds >= SLOW_SECONDS for cost in busy)
    assert all(0 <= cost.wait_seconds <= cost.engine_seconds for cost in costs)
    assert sum(cost.engine_seconds for cost in costs) == pytest.approx(diloco.engine_seconds)
    assert {cost.bytes_sent for cost in quiet} == {0}
    assert len({cost.bytes_sent for cost in busy} - {0}) == 1


def test_checkpoints_and_other_hooks_do_not_matter(tmp_path):
    def island(world):
        run = Run(world, tmp_path)
        costs = run.costs(1, 4)
        saved = run.islands.state_dict()
        run.optimizer.register_step_post_hook(lambda *_: time.sleep(SLOW_SECONDS))
        costs += run.costs(5, 8)
        check(costs, run.islands.diloco)
        return saved

    saved = isles.run_local(island, 2)

    def resumed(world):
        run = Run(world, tmp_path)
        run.islands.load_state_dict(saved[world.rank])
        check(run.costs(5, 8), run.islands.diloco)

    isles.run_local(resumed, 2)
