"""Islands of several ranks: FSDP2, tensor-parallel, DDP. Two islands of two ranks are two islands of one, to rounding.

What is exchanged is checked too: an island sends every value once, and copies inside it stay copies, bit for bit. A
checkpoint of torch.distributed.checkpoint goes on in islands of another number of ranks, with rounds in flight.
"""

import contextlib
import math
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

WIDTH, DEPTH, STEPS = 8, 3, 14
METHODS = {
    "diloco": isles.Method.diloco(sync_every=5),
    "streaming": isles.Method.streaming(sync_every=6, overlap=2, fragments=3, codec="fp32"),
    "eager": isles.Method.eager(sync_every=4, fragments=2, codec="fp32"),
    "feedback": isles.Method.eager(sync_every=4, fragments=2, codec="bf16", error_feedback=True),
    "e3m0": isles.Method.streaming(sync_every=4, overlap=1, fragments=3),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(1))  # too small to be on every rank

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.scale * x


def build(style: str, ranks_per_island: int):
    """The model as one rank has it, and the mesh of islands x ranks."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    islands = dist.get_world_size() // ranks_per_island
    mesh = init_device_mesh("cpu", (islands, ranks_per_island), mesh_dim_names=("island", "rank"))
    inside = mesh["rank"]
    if style == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=inside)
        fully_shard(model, mesh=inside)
    if style == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=inside.get_group())
    if style == "tensor-parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for layer in model.layers:
            parallelize_module(layer, inside, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, mesh


class Run:
    """A training run of one rank; batches depend on island and step alone, however many ranks share them."""

    def __init__(self, style: str, ranks_per_island: int, method: str) -> None:
        self.model, self.mesh = build(style, ranks_per_island)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.parts = 1 if style == "tensor-parallel" else ranks_per_island
        self.part = self.mesh.get_local_rank("rank") % self.parts
        self.island = self.mesh.get_local_rank("island")
        world = isles.TorchWorld(self.mesh["island"], timeout=60)
        self.diloco = isles.DiLoCo(self.model, self.optimizer, METHODS[method], world=world)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(1000 * self.island + step)
            rows = torch.randn(4, 5, generator=generator).chunk(self.parts)[self.part]
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == 3:  # looking at the global model changes nothing
                with self.diloco.global_model() as model, torch.no_grad():
                    model(rows)

    def whole(self) -> dict[str, list[float]]:
        named = isles.core.fragments.unwrap(self.model).named_parameters()
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().tolist() for name, p in named
        }


def train_to_the_end(rank, style, ranks_per_island, method):
    run = Run(style, ranks_per_island, method)
    with run.diloco:
        run.train(0, STEPS)
        sent = run.diloco.stats.bytes_sent
        with run.diloco.global_model():
            shown = run.whole()
    return run.whole(), sent, run.diloco.stats.payload_parameters, shown


def close(mine: dict, theirs: dict, tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(torch.tensor(mine[name]), torch.tensor(theirs[name]), atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Two islands of one rank, by method."""
    return {
        method: processes.values(train_to_the_end, 2, tmp_path_factory.mktemp("plain"), "plain", 1, method)
        for method in METHODS
    }


@pytest.mark.parametrize("style", ["fsdp", "ddp", "tensor-parallel"])
@pytest.mark.parametrize("method", METHODS)
def test_islands_of_two_ranks_are_islands_of_one(style, method, plain, tmp_path):
    results = processes.values(train_to_the_end, 4, tmp_path, style, 2, method)
    models, shown = [result[0] for result in results], results[0][3]
    assert all(model == models[0] for model in models), "all ranks of all islands end with the same model, bit for bit"
    # e3m0 cuts its blocks elsewhere on two ranks: other roundings, the same training; once more in the closing round,
    # so the global model before it is compared. There bf16 may round what is at a tie to the other side.
    if method == "e3m0":
        close(shown, plain[method][0][3], 2e-2)
    else:
        close(models[0], plain[method][0][0], 1e-3 if method == "feedback" else 1e-5)
    values = sum(result[2] for result in results[:2])
    once = plain[method][0][2]
    assert once <= values <= once * 1.02 + 8 * len(METHODS), "an island sends every value once"


def diverge(rank, style):
    """One rank of an island sees an infinite weight: the whole island sits the round out, the others go on."""
    run = Run(style, 2, "streaming")
    run.train(0, 4)
    if rank == 3:
        with torch.no_grad():
            isles.core.island.local(isles.core.fragments.unwrap(run.model).layers[0].up.weight).view(-1)[0] = math.inf
    run.train(4, STEPS)
    run.diloco.finish()
    run.diloco.close()
    return run.whole(), run.diloco.stats.nonfinite_rounds


@pytest.mark.parametrize("style", ["fsdp", "ddp"])
def test_what_is_not_finite_on_one_rank_is_the_whole_islands_affair(style, tmp_path):
    results = processes.values(diverge, 4, tmp_path, style)
    models = [model for model, _ in results]
    assert all(model == models[0] for model in models)
    assert all(math.isfinite(value) for values in models[0].values() for value in values)
    counts = [count for _, count in results]
    assert counts[:2] == [0, 0]
    assert counts[2] == counts[3] > 0


def save_half_way(rank, style, ranks_per_island, method, folder):
    run = Run(style, ranks_per_island, method)
    run.train(0, 9)
    state = run.diloco.state_dict(sharded=True)
    save_or_load(dcp.save, run, state, folder)
    run.diloco.close()
    return run.diloco.step_count


def resume(rank, style, ranks_per_island, method, folder):
    run = Run(style, ranks_per_island, method)
    state = run.diloco.state_dict(sharded=True)
    save_or_load(dcp.load, run, state, folder)
    run.diloco.load_state_dict(state)
    assert run.diloco.step_count == 9
    with run.diloco:
        run.train(9, STEPS)
    return run.whole(), run.diloco.stats.sends


def save_or_load(action, run, state, folder):
    """Every island has a checkpoint of its own, as it would have on disks of its own."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    action(state, checkpoint_id=f"{folder}/island-{run.island}", process_group=run.mesh["rank"].get_group())


@pytest.mark.parametrize("method", ["streaming", "eager", "feedback"])
@pytest.mark.parametrize("way", [("fsdp", 2, "plain", 1), ("plain", 1, "fsdp", 2), ("fsdp", 2, "ddp", 2)])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(way, method, plain, tmp_path):
    style, ranks, other_style, other_ranks = way
    folder = str(tmp_path / "checkpoint")
    processes.values(save_half_way, 2 * ranks, tmp_path, style, ranks, method, folder)
    results = processes.values(resume, 2 * other_ranks, tmp_path, other_style, other_ranks, method, folder)
    for model, sends in results:
        # Feedback in bf16: what is at a tie may be rounded to the other side.
        close(model, plain[method][0][0], 1e-3 if method == "feedback" else 1e-5)
        assert sends > 0
