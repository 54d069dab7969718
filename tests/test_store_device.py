"""Payloads of a store are made beside the loop: the loop goes on meanwhile, and knows what became of them when it has
to.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future

import pytest
import torch

import isles
from isles.core import island
from tests import pretend, processes
from tests.test_device import stack, train

METHOD = isles.Method.streaming(sync_every=4, fragments=1, overlap=2)
"""Sent at steps 4, 8, 12, applied at 6, 10, 14."""


def goes_on(rank, folder, ranks):
    """An island of so many ranks on a device that is busy: its first payload is not made before step 5 is over."""
    pretend.install()
    if ranks > 1:
        own = list(range(ranks))
        groups = [island._group_of(own) for _ in range(2)]
        island.Island.of = staticmethod(lambda model, named: island.Island(own, groups[0], {}, beside=groups[1]))
    is_over, synchronize, waited = threading.Event(), pretend.Event.synchronize, []

    def when_it_is_over(event):
        waited.append(is_over.is_set())
        assert is_over.wait(60), "the loop waits for the payload of the step before"
        synchronize(event)

    def watch(step, model, diloco):
        if step == 5:
            is_over.set()

    results = []
    for on_device in (False, True):
        pretend.Event.synchronize = when_it_is_over if on_device else synchronize
        world = isles.StoreWorld(f"{folder}/{on_device}", patience=math.inf)
        results.append(train(rank, world, METHOD, on_device, 15, watch if on_device else None))
    same = all(torch.equal(one, two) for one, two in zip(results[0][:3], results[1][:3], strict=True))
    return same, waited[0], pretend.settled()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_takes_its_next_step_while_a_payload_is_made(ranks, tmp_path):
    assert processes.values(goes_on, ranks, tmp_path, str(tmp_path), ranks) == [(True, False, [])] * ranks


class Asked(Future):
    """A payload that is being made; notices when somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.is_asked = threading.Event()

    def result(self, timeout=None):
        self.is_asked.set()
        return super().result(timeout)


def test_whoever_waits_for_a_round_waits_for_its_own_payload():
    """Also if the others have completed the round without it: what became of it decides what is done about it."""
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = isles.StoreWorld("memory://own-payload", patience=math.inf)
    with isles.DiLoCo(model, optimizer, METHOD, world=world):
        session, pending, ended = world._session, Asked(), threading.Event()
        session._preparing = {0: pending, 7: Asked()}
        waiting = threading.Thread(target=lambda: (session.wait(0), ended.set(), pending.is_asked.set()))
        waiting.start()
        pending.is_asked.wait()
        assert not ended.is_set(), "the round is over, its payload is not made"
        pending.set_result(None)
        waiting.join()
        assert list(session._preparing) == [7]
        session._preparing.clear()
