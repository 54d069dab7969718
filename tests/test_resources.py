"""An engine that is closed has given everything back: connections, threads, and the processor.

In a notebook, or a sweep, one process makes many engines, one after the other. Each has a group of its own over gloo,
with sockets and threads; after the last round they are gone. And an island that has left uses no processor, whatever
the others still send to it.
"""

import gc
import os
import time

import torch

import isles
from tests import processes

torch.set_num_threads(1)
LONG = 600.0
"""A time-out that nobody lives to see."""


def train(diloco, model, optimizer, steps, after_step=lambda step: None):
    with diloco:
        for step in range(1, steps + 1):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(step)


def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def in_use(most=(0, 0)):
    """(open files, threads), once they are no more than `most`, or have been the same for a second: some end late."""
    seen = []
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        if seen[-1][0] <= most[0] and seen[-1][1] <= most[1]:
            break
        time.sleep(0.1)
    return seen[-1]


def make_many(rank):
    early = (0, 0)
    for number in range(1, 31):
        model, optimizer = build()
        diloco = isles.DiLoCo(model, optimizer, isles.Method.streaming(sync_every=2, fragments=1))
        if number % 2:
            train(diloco, model, optimizer, steps=3)
        else:
            diloco.close()
        del diloco
        if number == 5:
            early = in_use()
    return early, in_use(most=early)


def test_engines_that_are_closed_leave_no_files_and_no_threads_behind(tmp_path):
    for early, late in processes.values(make_many, 2, tmp_path):
        assert late[0] <= early[0], f"open files after 5 engines and after 30: {early[0]} and {late[0]}"
        assert late[1] <= early[1], f"threads after 5 engines and after 30: {early[1]} and {late[1]}"


def leave(rank, stays):
    """Island 1 leaves by an exception and lets everything go; then it sleeps. Seconds of processor in two of sleep."""

    def trouble(step):
        if (rank, step) == (1, 4):
            raise ZeroDivisionError("the user's own mistake")
        time.sleep(0.05)

    model, optimizer = build()
    world = isles.TorchWorld(timeout=LONG)
    diloco = isles.DiLoCo(model, optimizer, isles.Method(sync_every=2, fragments=1, overlap=1), world=world)
    try:
        train(diloco, model, optimizer, 40, trouble)
    except ZeroDivisionError:
        pass
    except isles.LostPeerError:
        if stays:
            time.sleep(1000)
        return 0.0
    del world, diloco
    gc.collect()
    time.sleep(2.0)  # the others have sent what they send, and some of them have ended
    begin = time.process_time()
    time.sleep(2.0)
    return time.process_time() - begin


def check_idle(outcome):
    assert outcome.reported, outcome
    assert not outcome.error, outcome.trace
    assert outcome.value < 0.2, f"{outcome.value} s of processor in 2 s of sleep"


def test_an_island_that_has_left_uses_no_processor_while_the_others_live(tmp_path):
    check_idle(processes.run(leave, 3, tmp_path, True, until=(1,))[1])


def test_an_island_that_has_left_uses_no_processor_when_the_others_end(tmp_path):
    check_idle(processes.run(leave, 3, tmp_path, False, until=(1,))[1])
