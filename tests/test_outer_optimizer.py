"""Any optimizer of torch can take the outer step: `outer_optimizer` makes it from the anchors.

The function is called once, with the list of all anchors, one flat fp32 tensor for each fragment; what it returns steps
on outer gradients. With the settings of the built-in Nesterov it is the same run to rounding; any other is saved,
resumed, shelved and sharded like the built-in one; islands that have unlike ones are told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import isles
from tests import processes
from tests.reference import Tower, same, toy_backward, weights_of

torch.set_num_threads(1)
STEPS = 13
METHODS = {
    "diloco": isles.Method.diloco(sync_every=4, outer_lr=0.4),
    "streaming": isles.Method.streaming(sync_every=5, fragments=3, overlap=3, mixing=0.5),
    "delayed": isles.Method.delayed(sync_every=3, fragments=2),
    "eager": isles.Method.eager(sync_every=3, fragments=2, delay_rounds=2),
    "error feedback": isles.Method.streaming(sync_every=4, fragments=2, codec="int4", error_feedback=True),
}
OUTER = {
    "Nesterov": lambda anchors: torch.optim.SGD(anchors, lr=0.4, momentum=0.9, nesterov=True),
    "momentum": lambda anchors: torch.optim.SGD(anchors, lr=0.4, momentum=0.9),
    "SGD": lambda anchors: torch.optim.SGD(anchors, lr=0.4),
    "AdamW": lambda anchors: torch.optim.AdamW(anchors, lr=0.02, weight_decay=0.1),
}


class Island:
    """Everything that a process would have in memory, new."""

    def __init__(self, world, method, outer=None, **options):
        self.world, self.model = world, Tower(3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if outer is not None:
            options["outer_optimizer"] = OUTER[outer] if isinstance(outer, str) else outer
        options = {"weight": 1.0 + world.rank, **options}
        self.diloco = isles.DiLoCo(self.model, self.optimizer, method, world=world, **options)

    def train(self, until=STEPS):
        """Goes on to a step, then says what the weights were after each."""
        trajectory = []
        for step in range(self.diloco.step_count + 1, until + 1):
            toy_backward(self.model, self.world.rank, step)
            self.optimizer.step()
            trajectory.append(weights_of(self.model))
        return trajectory

    def finish(self):
        self.diloco.finish()
        self.diloco.close()
        return weights_of(self.model)

    def run(self):
        return [*self.train(), self.finish()]


def run(method, outer=None, **options):
    """The weights of both islands, after every step and at the end."""
    return isles.run_local(lambda world: Island(world, method, outer, **options).run(), 2)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# ---- what it computes


@pytest.mark.parametrize("name", ["diloco", "streaming", "delayed", "eager"])
def test_nesterov_of_torch_is_the_built_in_one_to_rounding(name):
    method = dataclasses.replace(METHODS[name], codec="fp32")  # 4 bits would make a large difference of a last bit
    for mine, built_in in zip(run(method, "Nesterov"), run(method), strict=True):
        for one, other in zip(mine, built_in, strict=True):
            close(one, other)


@pytest.mark.parametrize(
    ("outer", "knobs"), [("SGD", {"outer_momentum": 0.0}), ("momentum", {"nesterov": False})], ids=["SGD", "momentum"]
)
def test_other_forms_of_sgd_are_the_built_in_ones_to_rounding(outer, knobs):
    method = isles.Method(sync_every=3, fragments=2, overlap=1, outer_lr=0.4, **knobs)
    for mine, built_in in zip(run(method, outer), run(method), strict=True):
        for one, other in zip(mine, built_in, strict=True):
            close(one, other)


def by_hand(make_outer, every, rounds):
    """DiLoCo of two islands, weights 1 and 2, around any outer optimizer."""
    models = [Tower(3), Tower(3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    anchors = [parameter.detach().clone() for parameter in Tower(3).parameters()]
    outer = make_outer(anchors)
    for step in range(1, every * rounds + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            toy_backward(model, rank, step)
            optimizer.step()
        if step % every == 0:
            for anchor, one, two in zip(anchors, *(model.parameters() for model in models), strict=True):
                anchor.grad = ((anchor - one.detach()) + 2 * (anchor - two.detach())) / 3
            outer.step()
            for model in models:
                for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                    parameter.data.copy_(anchor)
    return weights_of(models[0])


@pytest.mark.parametrize("outer", OUTER)
def test_in_a_dense_start_islands_are_averaged_whatever_the_outer_optimizer(outer):
    method = isles.Method.diloco(sync_every=4, dense_start=[(3, 2)])
    expected = by_hand(lambda anchors: torch.optim.SGD(anchors, lr=1.0), every=2, rounds=3)
    for weights in isles.run_local(lambda world: Island(world, method, outer).train(6)[-1], 2):
        close(weights, expected)


@pytest.mark.parametrize("outer", OUTER)
def test_the_outer_gradient_is_its_gradient(outer):
    method = isles.Method.diloco(sync_every=4)
    expected = by_hand(OUTER[outer], every=4, rounds=3)
    for weights in isles.run_local(lambda world: Island(world, method, outer).train(12)[-1], 2):
        close(weights, expected)


@pytest.mark.parametrize("name", METHODS)
def test_with_adamw_islands_keep_one_global_model(name):
    one, two = run(METHODS[name], "AdamW")
    assert same(one[-1], two[-1])
    assert all(bool(torch.isfinite(value).all()) for value in one[-1].values())
    assert not same(one[-1], weights_of(Tower(3)))
    assert not same(one[-1], run(METHODS[name])[0][-1])


def test_the_function_is_called_once_with_all_anchors():
    calls = []

    def make(anchors):
        calls.append((type(anchors), [(a.dtype, a.dim()) for a in anchors], [a.clone() for a in anchors]))
        return torch.optim.SGD(anchors, lr=0.4)

    island = Island(isles.LocalWorld.alone(), isles.Method(sync_every=2, fragments=3), make)
    ((kind, tensors, values),) = calls
    assert kind is list
    assert tensors == [(torch.float32, 1)] * 3
    expected = torch.cat([parameter.detach().flatten() for parameter in Tower(3).parameters()])
    assert torch.equal(torch.cat(values).sort().values, expected.sort().values), "they hold the model"
    island.train()
    island.finish()
    assert len(calls) == 1


def test_an_optimizer_of_ones_own_can_treat_fragments_differently():
    """Groups: the first fragment stands still."""
    make = lambda anchors: torch.optim.SGD([{"params": anchors[:1], "lr": 0.0}, {"params": anchors[1:], "lr": 0.4}])
    names = [["head.weight", "head.bias"], [n for n, _ in Tower(3).named_parameters() if not n.startswith("head")]]
    island = Island(isles.LocalWorld.alone(), isles.Method(sync_every=4, fragments=names), make)
    island.train()
    with island.diloco.global_model() as model:
        start, now = weights_of(Tower(3)), weights_of(model)
    island.finish()
    assert [name for name in start if not torch.equal(now[name], start[name])] == names[1]


# ---- saved, resumed, shelved


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("outer", ["Nesterov", "AdamW", "SGD"])
@pytest.mark.parametrize("name", METHODS)
def test_resuming_is_never_stopping(name, outer):
    """Saved at steps before the first outer step, with rounds in flight, and after several outer steps."""
    expected = run(METHODS[name], outer)
    for stop in (0, 4, 7, 11):

        def before(world, stop=stop):
            island = Island(world, METHODS[name], outer)
            island.train(stop)
            state = through_a_file(island.diloco.state_dict())
            island.diloco.close()
            return state

        states = isles.run_local(before, 2)

        def after(world, states=states):
            island = Island(world, METHODS[name], outer)
            island.diloco.load_state_dict(states[world.rank])
            return island.run()

        for resumed, straight in zip(isles.run_local(after, 2), expected, strict=True):
            assert all(same(*pair) for pair in zip(resumed, straight[stop:], strict=True)), f"stopped after {stop}"


@pytest.mark.parametrize("outer", ["Nesterov", "AdamW", "SGD"])
@pytest.mark.parametrize("name", METHODS)
def test_where_the_outer_state_lies_changes_no_bit(name, outer):
    here, shelved = run(METHODS[name], outer), run(METHODS[name], outer, outer_device="cpu")
    for one, other in zip(here, shelved, strict=True):
        assert all(same(*pair) for pair in zip(one, other, strict=True))


def test_a_state_of_another_outer_optimizer_is_an_error():
    island = Island(isles.LocalWorld.alone(), METHODS["diloco"], "AdamW")
    island.train(5)
    state = island.diloco.state_dict()
    for other in ("Nesterov", None):
        before = Island(isles.LocalWorld.alone(), METHODS["diloco"], other)
        with pytest.raises(ValueError, match="outer"):
            before.diloco.load_state_dict(state)
        assert before.diloco.step_count == 0


# ---- sharded


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))  # too small to be on every rank

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.scale * x


class ShardedRun:
    """Batches depend on island and step alone, however many ranks share them."""

    def __init__(self, ranks, outer):
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("island", "rank"))
        self.model, self.mesh, self.island = Stack(), mesh, mesh.get_local_rank("island")
        if ranks > 1:
            from torch.distributed.fsdp import fully_shard

            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh["rank"])
            fully_shard(self.model, mesh=mesh["rank"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        method = isles.Method.streaming(sync_every=4, fragments=2, overlap=2, codec="fp32")
        world = isles.TorchWorld(mesh["island"], timeout=600)
        self.diloco = isles.DiLoCo(self.model, self.optimizer, method, world=world, outer_optimizer=OUTER[outer])

    def train(self, steps):
        for step in steps:
            rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * self.island + step))
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def checkpoint(self, action, folder):
        """Every island has one of its own. Returns what was saved, or loaded."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        state = self.diloco.state_dict(sharded=True)
        action(state, checkpoint_id=f"{folder}/{self.island}", process_group=self.mesh["rank"].get_group())
        return state

    def finish(self):
        self.diloco.finish()
        self.diloco.close()
        full = lambda p: (p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().tolist()
        return {name: full(parameter) for name, parameter in self.model.named_parameters()}


def save_half_way(rank, ranks, outers, folder):
    """Saves after 9 of 16 steps, with rounds in flight, and goes on to the end."""
    results = {}
    for outer in outers:
        run = ShardedRun(ranks, outer)
        run.train(range(9))
        run.checkpoint(dcp.save, f"{folder}-{outer}")
        run.train(range(9, 16))
        results[outer] = run.finish()
    return results


def go_on(rank, ranks, outers, folder):
    results = {}
    for outer in outers:
        run = ShardedRun(ranks, outer)
        run.diloco.load_state_dict(run.checkpoint(dcp.load, f"{folder}-{outer}"))
        assert run.diloco.step_count == 9
        run.train(range(9, 16))
        results[outer] = run.finish()
    return results


@pytest.mark.parametrize(("ranks", "other_ranks"), [(2, 1), (1, 2)])
def test_a_sharded_state_goes_on_with_another_number_of_ranks(ranks, other_ranks, tmp_path):
    outers, folder = ["Nesterov", "AdamW"], str(tmp_path / "checkpoint")
    straight = processes.values(save_half_way, 2 * ranks, tmp_path, ranks, outers, folder)
    resumed = processes.values(go_on, 2 * other_ranks, tmp_path, other_ranks, outers, folder)
    for outer in outers:
        expected = straight[0][outer]
        for result in (*straight, *resumed):
            assert result[outer].keys() == expected.keys()
            for name, values in result[outer].items():
                torch.testing.assert_close(torch.tensor(values), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5)


# ---- what must not pass

UNLIKE = {
    "another lr": (lambda a: torch.optim.SGD(a, lr=0.1), lambda a: torch.optim.SGD(a, lr=0.2)),
    "another class": (lambda a: torch.optim.SGD(a, lr=0.1), lambda a: torch.optim.AdamW(a, lr=0.1)),
    "the built-in one": (lambda a: torch.optim.SGD(a, lr=0.4, momentum=0.9, nesterov=True), None),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_islands_with_unlike_outer_optimizers_are_told(case):
    seen = {}

    def island(world):
        try:
            Island(world, isles.Method.diloco(), UNLIKE[case][world.rank])
        except Exception as error:
            seen[world.rank] = error

    isles.run_local(island, 2)
    for rank in (0, 1):
        assert isinstance(seen.get(rank), isles.MismatchError), f"island {rank}: {seen.get(rank)!r}"
        assert "outer" in str(seen[rank])


NO_OPTIMIZERS = {
    "nothing": lambda anchors: None,
    "a class": lambda anchors: torch.optim.SGD,
    "the anchors": lambda anchors: anchors,
    "one of other tensors": lambda anchors: torch.optim.SGD([torch.zeros(3)], lr=0.1),
    "one of copies": lambda anchors: torch.optim.SGD([anchor.clone() for anchor in anchors], lr=0.1),
    "one of some": lambda anchors: torch.optim.SGD(anchors[:1], lr=0.1),
}


@pytest.mark.parametrize("kind", NO_OPTIMIZERS)
def test_a_function_that_makes_no_optimizer_of_the_anchors_is_refused(kind):
    model = Tower(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="outer_optimizer"):
        isles.DiLoCo(model, optimizer, isles.Method(fragments=2), outer_optimizer=NO_OPTIMIZERS[kind])
    isles.DiLoCo(model, optimizer, isles.Method(fragments=2), outer_optimizer=OUTER["SGD"]).close()
