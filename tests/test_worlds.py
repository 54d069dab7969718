"""Threads and processes are the same world: the same training gives the same parameters, bit for bit, at every step.

One island is one function. It runs in threads (`isles.run_local`) and in real processes over gloo, with 2 and with 4
islands, in both forms of the reduction, for every kind of update and every codec, and draws from the global random
generators as it likes. After each step it notes a digest of all its parameters; the notes must be equal.
"""

import dataclasses
import functools
import hashlib
import random
import threading

import numpy
import pytest
import torch
from torch import nn

import isles
from isles.core.diloco import DiLoCo
from tests import processes

torch.set_num_threads(1)
FORMS = ["all-gather", "reduce-scatter"]
STEPS = 7

METHODS = {
    "diloco": isles.Method.diloco(sync_every=3),
    "streaming": isles.Method.streaming(sync_every=3, fragments=2, overlap=2),
    "delayed": isles.Method.delayed(sync_every=3, fragments=2),
    "eager": isles.Method.eager(sync_every=3, fragments=2, rounding="stochastic"),
}
MORE = {
    "two rounds late": isles.Method.eager(sync_every=2, fragments=2, delay_rounds=2, mixing=0.5, error_feedback=True),
    "more fragments than layers": isles.Method.streaming(sync_every=5, fragments=7, overlap=4),
}


class Tiny(nn.Module):
    """Fragments of several blocks of every codec, none a multiple of one; dropout draws from the global generator."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.head = nn.Linear(48, 5)

    def forward(self, values):
        for layer in self.layers:
            values = nn.functional.dropout(torch.tanh(layer(values)), 0.1)
        return self.head(values)


def digest(model):
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    return total.hexdigest()[:16]


def train(method, world, weight):
    """One island. Its data come from the three global generators, as in many a user's program."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + world.rank)
    random.seed(200 + world.rank)
    numpy.random.seed(300 + world.rank)
    notes = []
    with DiLoCo(model, optimizer, method, world=world, weight=weight) as diloco:
        for _ in range(STEPS):
            inputs = torch.randn(4, 48) * random.uniform(0.5, 1.5) + float(numpy.random.normal())
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            notes.append(digest(model))
    notes.append(digest(model))
    return notes, diloco.stats.bytes_sent, diloco.stats.sends


def cases(codec_names):
    for codec in codec_names:
        for kind, method in METHODS.items():
            yield f"{kind} in {codec}", dataclasses.replace(method, codec=codec)
    yield from MORE.items()


def train_all(codec_names, world):
    """Every case on one world, one after the other; each island has its own weight."""
    return {name: train(method, world, 1.0 + world.rank % 3) for name, method in cases(codec_names)}


def island_process(rank, codec_names, form):
    return train_all(codec_names, isles.TorchWorld(timeout=60, reduction=form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("islands", [2, 4])
def test_threads_and_processes_agree_at_every_step(islands, form, tmp_path):
    names = tuple(isles.codecs)
    by_process = processes.values(island_process, islands, tmp_path, names, form)
    by_thread = isles.run_local(functools.partial(train_all, names), islands, reduction=form)
    for rank in range(islands):
        for case, (notes, bytes_sent, sends) in by_process[rank].items():
            expected, expected_bytes, expected_sends = by_thread[rank][case]
            different = [step for step, pair in enumerate(zip(notes, expected, strict=True), 1) if pair[0] != pair[1]]
            assert not different, f"{case}: island {rank} of {islands} differs from step {different[0]} on"
            assert (bytes_sent, sends) == (expected_bytes, expected_sends), case
    for case in by_process[0]:
        last = {result[case][0][-1] for result in by_process}
        assert len(last) == 1, f"{case}: finish() left different models"
        assert len({result[case][0][0] for result in by_process}) == islands, "the islands trained on the same data"


def test_one_island_alone_is_the_same_in_a_process(tmp_path):
    for form in FORMS:
        [alone] = processes.values(island_process, 1, tmp_path, ("e3m0", "dare"), form)
        [thread] = isles.run_local(functools.partial(train_all, ("e3m0", "dare")), 1, reduction=form)
        assert alone == thread, form


def draws(world):
    """What an island draws from the global generators, with exchanges in between."""
    seen = []
    for number in range(3):
        seen.append((torch.rand(1).item(), random.random(), numpy.random.rand()))
        world.gather(b"%d" % number)
        if world.rank == number:
            torch.manual_seed(7)
            random.seed(7)
            numpy.random.seed(7)
    return seen


def seeded_draws(rank):
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    return draws(isles.TorchWorld(timeout=60))


def test_each_island_of_run_local_has_its_own_random_state(tmp_path):
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    by_thread = isles.run_local(draws, 3)
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]), "the caller's generator moved"
    assert before[1:] == after[1:]
    assert by_thread == processes.values(seeded_draws, 3, tmp_path)
    assert by_thread[0][0] == by_thread[1][0] == by_thread[2][0], "every island starts from the caller's state"
    assert by_thread[0][1] != by_thread[1][1]


def test_run_local_gives_results_in_the_order_of_ranks():
    assert isles.run_local(lambda world: (world.rank, world.size), 5) == [(rank, 5) for rank in range(5)]
    for wrong in (0, -1, 1.5, True, "2", None):
        with pytest.raises(ValueError, match="islands"):
            isles.run_local(lambda world: None, wrong)
    with pytest.raises(ValueError, match="ring"):
        isles.run_local(lambda world: None, 2, reduction="ring")


def test_islands_that_cannot_all_be_started_end(monkeypatch):
    """The third thread of five cannot be: those that run wait for nobody, and the caller learns why."""
    start = threading.Thread.start

    def fails(thread):
        if thread.name == "island-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        isles.run_local(lambda world: world.gather(b"here"), 5)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("island-")]


def test_training_in_threads_is_the_same_every_time():
    run = functools.partial(train_all, ("e3m0", "dare"))
    assert isles.run_local(run, 3) == isles.run_local(run, 3)
