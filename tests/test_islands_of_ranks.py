"""Islands of several ranks find their peers by themselves: who exchanges with whom is read off the model.

Four processes are two islands of two ranks each, the model sharded (FSDP2) or copied (DDP) inside an island. Without a
world each rank joins the ranks at the same place of the other islands, as if it had been given that dimension of the
mesh. Groups that cannot be right (a world that joins ranks of one island, a model that is spread over everybody) are
refused with what to pass. What one rank does besides (a group of its own, an optimizer without state for an empty
shard) holds up nobody: worlds have a time-out that is longer than `processes.run` waits.
"""

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import isles
from tests import processes

LONG = 600.0
"""A time-out that nobody lives to see."""
STYLES = ["fsdp", "ddp"]
WHAT_TO_PASS = r"world=|TorchWorld\(|mesh|process_group"


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))  # too small to be on every rank
        self.register_buffer("table", torch.full((3,), float(seed)))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.scale * x


def grid():
    torch.set_num_threads(1)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "rank"))


def spread(model, style, inside):
    """The model over the ranks of a mesh; None: over all there are."""
    if style == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=inside and inside.get_group())
    from torch.distributed.fsdp import fully_shard

    inside = inside or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=inside)
    return fully_shard(model, mesh=inside)


def join(model, optimizer=None, every=3, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    method = isles.Method.streaming(sync_every=every, fragments=3, overlap=1, codec="fp32")
    return isles.DiLoCo(model, optimizer, method, **options), optimizer


def train(model, optimizer, island, steps):
    for step in steps:
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * island + step))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten().tolist()


def values_of(model):
    """All parameters and buffers, as whole ones, whatever the model is wrapped in."""
    return {name.removeprefix("module."): whole(tensor) for name, tensor in model.state_dict().items()}


def attempt(action, *arguments):
    """(result, name of the exception, message): ranks go on to the next case, whatever becomes of one."""
    try:
        return action(*arguments), "", ""
    except Exception as error:
        return None, type(error).__name__, str(error)


# ---- the default world


def every_case(rank, style):
    mesh = grid()
    island = mesh.get_local_rank("island")

    def run(world):
        model = spread(Model(), style, mesh["rank"])
        diloco, optimizer = join(model, world=world, weight=1.0 + island)
        with diloco:
            train(model, optimizer, island, range(8))
        return values_of(model), (diloco.world.rank, diloco.world.size), diloco.stats.bytes_sent

    def initial():
        model = spread(Model(seed=island), style, mesh["rank"])
        diloco, _ = join(model, sync_initial=True)
        diloco.close()
        return values_of(model)

    return {
        "given": attempt(lambda: run(isles.TorchWorld(mesh["island"], timeout=LONG))),
        "default": attempt(lambda: run(None)),
        "sync_initial": attempt(initial),
        "model over all ranks": attempt(lambda: join(spread(Model(), style, None))[0].close()),
        "world over all ranks": attempt(
            lambda: join(spread(Model(), style, mesh["rank"]), world=isles.TorchWorld(timeout=LONG))[0].close()
        ),
    }


@pytest.fixture(scope="module", params=STYLES)
def cases(request, tmp_path_factory):
    """What each of four ranks has to say about every case."""
    return processes.values(every_case, 4, tmp_path_factory.mktemp("cases"), request.param)


def result_of(cases, name):
    for rank, case in enumerate(cases):
        _, error, message = case[name]
        assert not error, f"rank {rank}: {error}: {message}"
    return [case[name][0] for case in cases]


def test_the_default_world_joins_the_ranks_at_the_same_place_of_each_island(cases):
    given, default = result_of(cases, "given"), result_of(cases, "default")
    assert default == given, "weights, place in the world and bytes sent"
    assert [place for _, place, _ in default] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(weights == default[0][0] for weights, _, _ in default)


def test_sync_initial_with_the_default_world_gives_every_rank_its_own_part_of_island_0(cases):
    expected = {name: tensor.detach().flatten().tolist() for name, tensor in Model(seed=0).state_dict().items()}
    for weights in result_of(cases, "sync_initial"):
        assert weights == expected


@pytest.mark.parametrize("case", ["model over all ranks", "world over all ranks"])
def test_groups_that_cannot_be_right_are_refused_with_what_to_pass(cases, case):
    """Not a MismatchError: nothing differs between islands. Ranks of one island would average their shards."""
    for rank, results in enumerate(cases):
        _, error, message = results[case]
        assert error == "ValueError", f"rank {rank}: {error or 'no error'}: {message}"
        assert re.search(WHAT_TO_PASS, message), message


# ---- groups that one rank has and others have not


def with_one_more_group(rank, style):
    if style == "plain":
        torch.set_num_threads(1)
        model, island, world = Model(), rank, None
    else:
        mesh = grid()
        model, island = spread(Model(), style, mesh["rank"]), mesh.get_local_rank("island")
    if rank == 0:
        dist.new_group([0])
    if style != "plain":
        world = isles.TorchWorld(mesh["island"], timeout=LONG)
    diloco, optimizer = join(model, world=world)
    with diloco:
        train(model, optimizer, island, range(4))
    return values_of(model)


@pytest.mark.parametrize(("style", "ranks"), [("plain", 2), ("fsdp", 4)])
def test_a_group_that_only_one_rank_has_made_holds_up_nobody(style, ranks, tmp_path):
    results = processes.values(with_one_more_group, ranks, tmp_path, style)
    assert all(result == results[0] for result in results)


# ---- parameters of several placements in one island


class Mixed(nn.Module):
    """Some parameters sharded on the mesh, some DTensors that are replicated on it, some plain tensors."""

    def __init__(self, style, inside):
        super().__init__()
        torch.manual_seed(0)
        self.sharded, self.replicated, self.plain = (nn.Linear(4, 4) for _ in range(3))
        if style == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.sharded, mesh=inside)
        if style == "tensor-parallel":
            from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

            parallelize_module(self.sharded, inside, ColwiseParallel(output_layouts=Replicate()))
        if style != "alone":
            distribute_module(self.replicated, inside)
        self.inside = inside

    def forward(self, x):
        x = torch.tanh(self.sharded(x))
        if isinstance(self.replicated.weight, DTensor):
            x = self.replicated(DTensor.from_local(x, self.inside, [Replicate()])).to_local()
        else:
            x = self.replicated(x)
        return self.plain(torch.tanh(x))


def train_mixed(rank, styles):
    torch.set_num_threads(1)
    mesh = None if styles == ["alone"] else grid()
    island = rank if mesh is None else mesh.get_local_rank("island")

    def run(style):
        model = Mixed(style, mesh and mesh["rank"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with isles.DiLoCo(model, optimizer, isles.Method(sync_every=2, fragments=2, overlap=1)):
            for step in range(6):
                rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * island + step))
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return values_of(model)

    return {style: attempt(run, style) for style in styles}


def test_sharded_replicated_and_plain_parameters_in_one_island(tmp_path):
    """With the default world, which has to be found whatever the kinds of parameters, and as islands of one rank."""
    alone = processes.values(train_mixed, 2, tmp_path, ["alone"])[0]["alone"][0]
    results = processes.values(train_mixed, 4, tmp_path, ["tensor-parallel", "fsdp"])
    for style in ("tensor-parallel", "fsdp"):
        models = result_of(results, style)
        assert all(model == models[0] for model in models)
        for name, values in models[0].items():
            torch.testing.assert_close(torch.tensor(values), torch.tensor(alone[name]), atol=1e-5, rtol=1e-5)


def held_by_some_ranks(rank):
    """One island of four ranks, a 2 x 2 mesh: what is too small for both halves is a copy on ranks 0 and 1 only."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "twin"))
    model = nn.Module()
    model.tiny = nn.Parameter(distribute_tensor(torch.ones(1), mesh, [Shard(0), Replicate()]))
    model.plain = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with isles.DiLoCo(model, optimizer, isles.Method.diloco(sync_every=1), world=isles.LocalWorld.alone()) as diloco:
        optimizer.step()
    return values_of(model), diloco.step_count


def test_copies_that_only_some_ranks_hold_hold_up_nobody(tmp_path):
    assert processes.values(held_by_some_ranks, 4, tmp_path) == [({"tiny": [1.0], "plain": [1.0] * 5}, 1)] * 4


# ---- recovering


class Frugal(torch.optim.Optimizer):
    """Momentum, and no state for a shard without a value."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter.to_local().numel() == 0:
                    continue
                state = self.state[parameter]
                state.setdefault("momentum", torch.zeros_like(parameter))
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.add_(state["momentum"], alpha=-group["lr"])


def go_astray(rank):
    mesh = grid()
    island = mesh.get_local_rank("island")
    model = spread(Model(), "fsdp", mesh["rank"])
    diloco, optimizer = join(model, Frugal(model.parameters()), world=isles.TorchWorld(mesh["island"], timeout=LONG))
    with diloco:
        train(model, optimizer, island, range(4))
        held = len(optimizer.state)
        if rank == 3:
            with torch.no_grad():
                model.layers[0].weight.to_local().view(-1)[0] = math.nan
        train(model, optimizer, island, range(4, 14))
    moments = [state["momentum"].to_local().flatten().tolist() for state in optimizer.state.values()]
    return held, values_of(model), diloco.stats.nonfinite_rounds, [value for moment in moments for value in moment]


def test_an_island_recovers_where_its_ranks_hold_unlike_optimizer_states(tmp_path):
    results = processes.values(go_astray, 4, tmp_path)
    held, models, rounds, moments = zip(*results, strict=True)
    assert held[0] > held[1], "the shard of `scale` is empty on the second rank"
    assert all(model == models[0] for model in models)
    assert all(math.isfinite(value) for values in models[0].values() for value in values)
    assert all(math.isfinite(value) for moment in moments for value in moment)
    assert rounds[:2] == (0, 0)
    assert rounds[2] == rounds[3] > 0
