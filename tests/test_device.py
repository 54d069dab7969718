"""The engine on an accelerator, the pretend device of `tests.pretend`: it gives the CPU's weights, bit for bit, and the
host never waits for the device in the loop.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

import isles
from isles.core import device as devices
from isles.core import island
from isles.core.replica import Replica
from tests import pretend, processes

STEPS = 50
METHODS = {
    "streaming": isles.Method.streaming(sync_every=10, fragments=3, overlap=2, mixing=0.5),
    "one step late": isles.Method.streaming(sync_every=6, fragments=2, overlap=1),
    "whole round late": isles.Method.distant(sync_every=8, fragments=2),
    "diloco": isles.Method.diloco(sync_every=10, codec="e3m0"),
    "gradual": isles.Method.gradual(sync_every=8, fragments=2, overlap=2, dense_start=[(2, 2)], warmup_rounds=2),
    "delayed": isles.Method.delayed(sync_every=6, fragments=2, codec="e3m0"),
    "eager": isles.Method.eager(sync_every=6, fragments=2, codec="e3m0"),
    "feedback": isles.Method.streaming(sync_every=8, fragments=2, overlap=2, codec="int4", error_feedback=True),
    "int8": isles.Method.streaming(sync_every=10, fragments=2, overlap=3, codec="int8"),
    "bf16": isles.Method.streaming(sync_every=10, fragments=2, overlap=3, codec="bf16"),
    "stochastic": isles.Method.streaming(sync_every=10, fragments=2, overlap=2, rounding="stochastic"),
}


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def stack(width: int = 20, layers: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, dtype) for _ in range(layers)))


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().cpu().flatten() for parameter in model.parameters()])


def train(rank, world, method, on_device, steps=STEPS, watch=None, dtype=torch.float32, *, guarded=True, **options):
    """Weights after the last step, anchors, weights after finish(), and statistics. `watch` is called after every step.
    `guarded`: nobody waits for the device in the loop.
    """
    model = stack(dtype=dtype)
    rows = [torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * rank + step)) for step in range(steps)]
    rows = [each.to(dtype) for each in rows]
    if on_device:
        pretend.on_device(model)
        rows = [each.to("pretend") for each in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = isles.DiLoCo(model, optimizer, method, world=world, **options)

    def loop():
        for step in range(steps):
            model(rows[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch(step + 1, model, diloco)

    with pretend.no_waiting() if on_device and guarded else contextlib.nullcontext():
        loop()
    trained = weights_of(model)
    anchors = torch.cat([anchor.cpu() for anchor in diloco._rounds.anchors()])
    diloco.finish()
    diloco.close()
    return trained, anchors, weights_of(model), diloco.stats


def both(rank, name, dtype, options):
    """One island of two, on the CPU and then on the device. Returns what differs, and what the device complains of."""
    devices.LEAST_PIECE = 128  # several pieces in a fragment, the last one not full
    pretend.install()  # before autograd has started a thread for every device
    host = train(rank, isles.TorchWorld(), METHODS[name], False, dtype=dtype, **options)
    device = train(rank, isles.TorchWorld(), METHODS[name], True, dtype=dtype, **options)
    wrong = pretend.settled()
    for mine, other, what in zip(host[:3], device[:3], ("weights", "anchors", "the final model"), strict=True):
        if not torch.equal(mine, other):
            wrong.append(f"{what} differ from the CPU's")
    assert host[3].applies == device[3].applies > 0
    return wrong


def both_well(rank, *arguments):
    """The same, where nothing should be wrong."""
    wrong = both(rank, *arguments)
    assert pretend.machine.host_waits > 0, "threads beside the loop waited for the device"
    return wrong


@pytest.mark.parametrize("outer_device", [None, "cpu"])
@pytest.mark.parametrize("name", METHODS)
def test_a_device_trains_as_the_cpu_does_and_the_host_never_waits(name, outer_device, tmp_path):
    options = {"outer_device": outer_device}
    for wrong in processes.values(both_well, 2, tmp_path, name, torch.float32, options):
        assert wrong == []


def test_parameters_of_other_precisions(tmp_path):
    for wrong in processes.values(both_well, 2, tmp_path, "streaming", torch.bfloat16, {}):
        assert wrong == []


def resumed(rank, name, outer_device):
    """The same with a look at the global model and a checkpoint in the midst of it, rounds in flight included."""
    pretend.install()

    def watch(step, model, diloco):
        if step == 17:
            before = weights_of(model)
            with diloco.global_model():
                assert not torch.equal(weights_of(model), before)
            diloco.load_state_dict(diloco.state_dict())
            assert torch.equal(weights_of(model), before)

    results = []
    for on_device in (False, True):
        options = {"watch": watch, "guarded": False, "outer_device": outer_device}
        results.append(train(rank, isles.TorchWorld(), METHODS[name], on_device, 40, **options))
    straight = train(rank, isles.TorchWorld(), METHODS[name], False, 40)
    same = [all(torch.equal(one, two) for one, two in zip(each[:3], straight[:3], strict=True)) for each in results]
    return same, pretend.settled()


@pytest.mark.parametrize("outer_device", [None, "cpu"])
@pytest.mark.parametrize("name", ["streaming", "eager", "feedback"])
def test_a_checkpoint_on_a_device_goes_on_as_if_there_were_none(name, outer_device, tmp_path):
    for same, wrong in processes.values(resumed, 2, tmp_path, name, outer_device):
        assert same == [True, True]
        assert wrong == []


def in_a_store(rank, folder, name, outer_device, robust=False):
    pretend.install()
    results = []
    for on_device in (False, True):
        world = isles.StoreWorld(f"{folder}/{on_device}", quorum=2, patience=math.inf, robust=robust)
        results.append(train(rank, world, METHODS[name], on_device, 40, outer_device=outer_device))
    host, device = results
    same = all(torch.equal(one, two) for one, two in zip(host[:3], device[:3], strict=True))
    return same, pretend.settled()


@pytest.mark.parametrize("outer_device", [None, "cpu"])
@pytest.mark.parametrize("name", ["streaming", "feedback"])
def test_islands_in_a_store_train_on_devices_as_on_cpus(name, outer_device, tmp_path):
    for same, wrong in processes.values(in_a_store, 2, tmp_path, str(tmp_path), name, outer_device):
        assert same
        assert wrong == []


def as_threads(rank, name, islands, outer_device):
    """Islands as threads of one process, which encode when they send; an island alone, when it applies."""
    pretend.install()
    same = []
    island = lambda on_device: (
        lambda world: train(world.rank, world, METHODS[name], on_device, 30, guarded=False, outer_device=outer_device)
    )
    for host, device in zip(
        isles.run_local(island(False), islands), isles.run_local(island(True), islands), strict=True
    ):
        same.append(all(torch.equal(one, two) for one, two in zip(host[:3], device[:3], strict=True)))
    return same, pretend.settled()


@pytest.mark.parametrize(("name", "outer_device"), [("streaming", None), ("feedback", "cpu"), ("eager", "cpu")])
@pytest.mark.parametrize("islands", [1, 3])
def test_islands_as_threads_train_on_one_device_as_on_the_cpu(name, islands, outer_device, tmp_path):
    assert processes.values(as_threads, 1, tmp_path, name, islands, outer_device) == [([True] * islands, [])]


def buffers(rank):
    """The last good value of a buffer, chosen without asking the host."""
    device = pretend.install()
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.tensor([1.0, 2.0]))
    pretend.on_device(model)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), [], island.Island())
    with pretend.no_waiting():
        model.mean.fill_(3.0)
        replica.remember_buffers()
        model.mean[1:].fill_(torch.nan)
        replica.remember_buffers()
    replica.heal()
    assert model.mean.device == device
    return model.mean.cpu().tolist()


def test_a_buffer_that_is_not_finite_goes_back_to_its_last_good_value(tmp_path):
    assert processes.values(buffers, 1, tmp_path) == [[3.0, 3.0]]


# ---- weights that are not finite


def astray(rank, name, outer_device):
    """Island 1 has a NaN in its weights after step 12. Returns who was finite after each step, and the end."""
    pretend.install()
    seen = []

    def watch(step, model, diloco):
        if rank == 1 and step == 12:
            model[0].linear.weight.data[3].fill_(torch.nan)
        seen.append(torch.stack([torch.isfinite(p).all() for p in model.parameters()]).all())

    # To reset weights the host looks at all of them, once: outside what must not wait.
    final = train(rank, isles.TorchWorld(), METHODS[name], True, 40, watch, guarded=False, outer_device=outer_device)
    return [bool(each) for each in seen], final[2], final[3].nonfinite_rounds, final[1], pretend.settled()


@pytest.mark.parametrize(("name", "outer_device"), [("streaming", None), ("eager", None), ("feedback", "cpu")])
def test_an_island_whose_weights_are_not_finite_harms_nobody_and_comes_back(name, outer_device, tmp_path):
    (well, ill) = processes.values(astray, 2, tmp_path, name, outer_device)
    assert all(well[0])
    assert not all(ill[0])
    period = METHODS[name].sync_every
    assert all(ill[0][12 + 2 * period :]), "it was reset within two periods"
    assert (well[2], ill[2] > 0) == (0, True)
    assert torch.isfinite(well[1]).all()
    assert torch.equal(well[1], ill[1])
    assert well[4] == ill[4] == []


# ---- islands of several ranks


def as_ranks(rank, name, spoil):
    """A rank of two islands of two: it holds some layers of the model, as a rank of a sharded model does."""
    pretend.install()
    ranks = [rank // 2 * 2, rank // 2 * 2 + 1]

    def island_of(model, named):
        groups = [island._group_of(ranks) for _ in range(2)]
        return island.Island(ranks, groups[0], {}, beside=groups[1])

    island.Island.of = staticmethod(island_of)
    peers = [rank % 2, rank % 2 + 2]

    def watch(step, model, diloco):
        if spoil and rank == 3 and step == 12:
            model[0].linear.weight.data[3].fill_(torch.nan)

    results = []
    for on_device in (False, True):
        options = {"watch": watch, "guarded": not spoil}
        results.append(train(rank, isles.TorchWorld(peers), METHODS[name], on_device, 40, **options))
    host, device = results
    differs = not all(torch.equal(one, two) for one, two in zip(host[:3], device[:3], strict=True))
    return differs, host[3].nonfinite_rounds, device[3].nonfinite_rounds, device[2], pretend.settled()


@pytest.mark.parametrize("name", ["streaming", "feedback"])
def test_the_ranks_of_an_island_train_on_devices_as_on_cpus(name, tmp_path):
    for differs, *rounds, _, wrong in processes.values(as_ranks, 4, tmp_path, name, False):
        assert not differs
        assert rounds == [0, 0]
        assert wrong == []


def test_the_ranks_of_an_island_agree_that_one_of_them_is_not_finite(tmp_path):
    results = processes.values(as_ranks, 4, tmp_path, "streaming", True)
    for on_host, on_device, _, wrong in (each[1:] for each in results[:2]):
        assert (on_host, on_device, wrong) == (0, 0, [])
    for place in (1, 2):
        assert results[2][place] == results[3][place] > 0, "both ranks sit out the same rounds"
    for place in (0, 1):
        assert torch.isfinite(results[place][3]).all()
        assert torch.equal(results[place][3], results[place + 2][3])
