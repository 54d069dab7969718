"""Islands of several ranks that are joined by a store: each island has a process group of its own, and nothing else.

Where nobody is left out they are what the same islands are over torch.distributed, to the last bit. An island is in a
round with all its ranks or not at all: it joins late, fails and dies as one.
"""

import functools
import math
import os
import pathlib
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import isles
from isles.core.island import local
from isles.elastic.objects import Seal, seal_name
from isles.elastic.store import open_store
from tests import processes
from tests.stores import threads
from tests.test_sharded import METHODS as SHARDED
from tests.test_sharded import STEPS, Model

LONG = 600.0
"""A time-out that nobody lives to see."""
STYLES = ["fsdp", "ddp", "tensor-parallel"]
SMALL = [["scale"], [name for name, _ in Model().named_parameters() if name != "scale"]]
"""The first fragment is a single value: with FSDP2 the second rank has nothing of it."""
METHODS = {**SHARDED, "small": isles.Method.streaming(sync_every=4, overlap=1, fragments=SMALL)}


def inside(islands):
    """The mesh of this rank's island, that of its peers in the others, and the number of its island."""
    torch.set_num_threads(1)
    if islands == 1:
        return init_device_mesh("cpu", (dist.get_world_size(),)), None, 0
    mesh = init_device_mesh("cpu", (islands, dist.get_world_size() // islands), mesh_dim_names=("island", "rank"))
    return mesh["rank"], mesh["island"], mesh.get_local_rank("island")


def spread(style, mesh, seed=0):
    """The model as one rank of an island has it."""
    torch.manual_seed(seed)
    model = Model()
    if style == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if style == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    if style == "tensor-parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for layer in model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def step(model, optimizer, style, island, number):
    """Batches depend on island and step alone, however many ranks share them."""
    parts = 1 if style == "tensor-parallel" else min(2, dist.get_world_size())
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * island + number))
    model(rows.chunk(parts)[dist.get_rank() % parts]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model):
    """What this rank has."""
    return {name: local(parameter).flatten().tolist() for name, parameter in model.named_parameters()}


def until(condition):
    while not condition():
        time.sleep(0.01)


class Turns:
    """Islands are numbered in the order of joining: the second one waits for the first."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def wait(self, island):
        until(lambda: island == 0 or self.file(island - 1).exists())

    def done(self, island):
        self.file(island).touch()

    def file(self, island):
        return self.folder / f"joined-{island}"


def train(rank, folder, style, method, island, islands=1):
    """Over a store, or over torch.distributed with all islands in one group."""
    mesh, peers, place = inside(islands)
    model, island = spread(style, mesh), place if island is None else island
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    turns = Turns(folder)
    if peers is None:
        turns.wait(island)
        world = isles.StoreWorld(f"{folder}/store", quorum=2, patience=math.inf, timeout=LONG)
    else:
        world = isles.TorchWorld(peers, timeout=LONG)
    history = []
    with isles.DiLoCo(model, optimizer, METHODS[method], world=world, weight=1.0 + island) as diloco:
        turns.done(island)
        assert world.rank == island
        for number in range(STEPS):
            step(model, optimizer, style, island, number)
            history.append(weights_of(model))
        with diloco.global_model():
            history.append(weights_of(model))
    assert (diloco.world, diloco.clock, diloco.stats.islands) == (world, STEPS, 2)
    assert (diloco.stats.excluded_rounds, diloco.stats.catch_up_rounds) == (0, 0)
    return [*history, weights_of(model)], diloco.stats.bytes_sent


def apart(function, folder, *arguments, islands=2, ranks=2):
    """Islands with a default process group each, all at the same time: what their ranks returned."""
    call = lambda island: functools.partial(processes.values, function, ranks, folder, str(folder), *arguments, island)
    return threads(*map(call, range(islands)))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("method", ["diloco", "streaming", "e3m0", "small"])
def test_a_store_gives_what_torch_distributed_gives_bit_for_bit(style, method, tmp_path):
    together = processes.values(train, 4, tmp_path, str(tmp_path), style, method, None, 2)
    for file in tmp_path.glob("joined-*"):
        file.unlink()
    results = apart(train, tmp_path, style, method)
    for mine, theirs in zip([rank for island in results for rank in island], together, strict=True):
        assert mine[0] == theirs[0]
    store = open_store(f"{tmp_path}/store")
    for island, ranks in enumerate(results):
        payloads = sum(each.num_bytes for seal in seals(store) for each in seal.contributions if each.island == island)
        assert ranks[0][1] > payloads, "the first rank writes for all"
        assert ranks[1][1] == 0


def seals(store):
    number = 1
    while (data := store.get(seal_name(number))) is not None:
        yield Seal.parse(data, seal_name(number))
        number += 1


def join_late(rank, folder, style, snapshot_every, island):
    """The second island starts when the first one has got far, with weights of its own."""
    mesh, _, _ = inside(1)
    model = spread(style, mesh, seed=island)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    turns = Turns(folder)
    turns.wait(island)
    world = isles.StoreWorld(f"{folder}/store", patience=LONG, timeout=LONG, snapshot_every=snapshot_every)
    with isles.DiLoCo(model, optimizer, METHODS["e3m0"], world=world) as diloco:
        begun = diloco.clock
        if island == 1:
            turns.done(1)
        while diloco.clock < 60:
            step(model, optimizer, style, island, diloco.step_count)
            if island == 0 and diloco.clock == 30:
                turns.done(0)
                until(turns.file(1).exists)
    return weights_of(model), begun, diloco.stats.islands, world.rank, world.last_round


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("snapshot_every", [2, 1000])
def test_an_island_that_joins_late_has_the_anchors_of_the_others(style, snapshot_every, tmp_path):
    (one, second), (other, last) = apart(join_late, tmp_path, style, snapshot_every)
    assert (one[0], second[0]) == (other[0], last[0])
    assert (one[1], second[1]) == (0, 0)
    assert 20 <= other[1] == last[1] <= 30
    assert [each[2] for each in (one, second, other, last)] == [2] * 4
    assert [each[3] for each in (one, second, other, last)] == [0, 0, 1, 1]
    assert len({each[4] for each in (one, second, other, last)}) == 1


def lose_a_rank(rank, folder, style, victim, island):
    """A rank of the second island dies at its tenth step. The first one goes on until it is alone, and a bit more."""
    mesh, _, _ = inside(1)
    model = spread(style, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    turns = Turns(folder)
    turns.wait(island)
    world = isles.StoreWorld(f"{folder}/store", patience=1.0, timeout=LONG)
    with isles.DiLoCo(model, optimizer, METHODS["e3m0"], world=world) as diloco:
        turns.done(island)
        turns.wait(2)
        alone = torch.zeros(1)
        while alone < 1 or diloco.clock < 20:
            step(model, optimizer, style, island, diloco.step_count)
            if island == 1 and rank == victim and diloco.step_count == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            alone.fill_(diloco.step_count >= 10 and diloco.stats.islands == 1)
            assert alone < 1 or island == 0
    return weights_of(model), diloco.stats.islands, diloco.stats.sends


@pytest.mark.parametrize("style", ["fsdp", "tensor-parallel"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_takes_its_island_out_and_the_other_goes_on(style, victim, tmp_path):
    call = functools.partial(processes.run, lose_a_rank, 2, tmp_path, str(tmp_path), style, victim)
    stays, dies = threads(functools.partial(call, 0), functools.partial(call, 1))
    for outcome in stays:
        assert not outcome.error, outcome.trace
        assert outcome.value[1] == 1
    assert dies[victim].exit_code == -signal.SIGKILL
    assert dies[1 - victim].error, "its twin is told, and does not hang"
    assert {len(seal.islands) for seal in seals(open_store(f"{tmp_path}/store"))} == {1, 2}


def of_another_number(rank, folder, island):
    mesh, _, _ = inside(1)
    model = spread("fsdp", mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    world = isles.StoreWorld(f"{folder}/store", timeout=LONG)
    with isles.DiLoCo(model, optimizer, METHODS["streaming"], world=world):
        step(model, optimizer, "fsdp", 0, 0)
    return open_store(f"{folder}/store").list("")


def test_an_island_of_another_number_of_ranks_is_refused_on_all_of_them(tmp_path):
    before = processes.values(of_another_number, 2, tmp_path, str(tmp_path), 0)[0]
    for ranks in (1, 3):
        for outcome in processes.run(of_another_number, ranks, tmp_path, str(tmp_path), 1):
            assert outcome.error == "MismatchError"
            assert f"ranks_per_island=2 there, {ranks} here" in outcome.message
            assert "\n" not in outcome.message
    assert open_store(f"{tmp_path}/store").list("") == before, "no number was taken, no probe was left"


def meet_an_error(rank, folder, island):
    """Somebody has written what is no seal. The first rank reads it; all have to hear of it."""
    mesh, _, _ = inside(1)
    model = spread("plain", mesh)
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    world = isles.StoreWorld(f"{folder}/store", timeout=LONG)
    with isles.DiLoCo(model, optimizer, METHODS["streaming"], world=world) as diloco:
        for number in range(1000):
            step(model, optimizer, "ddp", 0, number)
            if rank == 0 and diloco.step_count == 7:
                open_store(f"{folder}/store").put(seal_name(5), b'{"seal": "of nobody"}')


def test_an_error_on_the_first_rank_is_the_error_of_all(tmp_path):
    one, other = processes.run(meet_an_error, 2, tmp_path, str(tmp_path), 0)
    assert one.text == other.text
    assert one.error == "MismatchError"
    assert seal_name(5) in one.message


def test_a_store_that_cannot_be_used_is_the_error_of_all(tmp_path):
    (tmp_path / "store").write_text("a file, not a folder")
    one, other = processes.run(meet_an_error, 2, tmp_path, str(tmp_path), 0)
    assert one.text == other.text
    assert one.error == "ValueError"


def be_slow(rank, folder, style, method, island):
    """The second island takes its time, and the first has next to no patience."""
    mesh, _, _ = inside(1)
    model = spread(style, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    turns, own = Turns(folder), METHODS[method]
    turns.wait(island)
    store = open_store(f"{folder}/store")
    world = isles.StoreWorld(f"{folder}/store", patience=0.02, timeout=LONG, snapshot_every=3)
    with isles.DiLoCo(model, optimizer, own, world=world) as diloco:
        turns.done(island)
        turns.wait(2)
        more = torch.ones(1)
        while more:
            step(model, optimizer, style, island, diloco.step_count)
            if island == 1:  # for several rounds of the other one, now and then for longer than payloads are kept
                rounds = 40 if diloco.step_count == 6 else 2
                coming = seal_name(len(store.list("seals/")) + rounds)
                until(functools.partial(store.get, coming))
                more.fill_(diloco.step_count < 12)
            else:
                more.fill_(not (pathlib.Path(folder) / "over").exists())
                dist.broadcast(more, 0)
    if island == 1 and rank == 0:
        (pathlib.Path(folder) / "over").touch()
    stats = diloco.stats
    return diloco.step_count, diloco.clock, stats.excluded_rounds + stats.catch_up_rounds, world.rank


@pytest.mark.parametrize(("style", "method"), [("fsdp", "e3m0"), ("ddp", "streaming")])
def test_every_step_of_a_slow_island_is_counted_once(style, method, tmp_path):
    (quick, _), (slow, twin) = apart(be_slow, tmp_path, style, method)
    assert slow == twin
    assert slow[1] > slow[0] == 12
    assert slow[2] > 0
    assert slow[3] > 1, "it was away for so long that it has loaded a snapshot, and has a new number"
    counted = {}
    for seal in seals(open_store(f"{tmp_path}/store")):
        for each in seal.contributions:  # an island that was away for long comes back under another number
            row = counted.setdefault(each.island > 0, {})
            row[seal.fragment] = row.get(seal.fragment, 0) + each.steps
    assert counted == {False: dict.fromkeys(range(3), quick[0]), True: dict.fromkeys(range(3), 12)}


def diverge(rank, folder, style, island):
    """One rank of an island has an infinite weight: the whole island sits the round out."""
    mesh, _, _ = inside(1)
    model = spread(style, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    turns = Turns(folder)
    turns.wait(island)
    world = isles.StoreWorld(f"{folder}/store", quorum=2, patience=math.inf, timeout=LONG)
    with isles.DiLoCo(model, optimizer, METHODS["streaming"], world=world) as diloco:
        turns.done(island)
        for number in range(STEPS):
            step(model, optimizer, style, island, number)
            if (island, rank, number) == (1, 1, 4):
                with torch.no_grad():
                    local(model.layers[0].up.weight).view(-1)[0] = math.inf
    return weights_of(model), diloco.stats.nonfinite_rounds


def test_what_is_not_finite_on_one_rank_keeps_its_island_out_of_the_round(tmp_path):
    (one, second), (other, last) = apart(diverge, tmp_path, "fsdp")
    assert (one[0], second[0]) == (other[0], last[0])
    assert all(math.isfinite(value) for part in (one, second) for values in part[0].values() for value in values)
    assert (one[1], second[1]) == (0, 0)
    assert other[1] == last[1] > 0


def explode(rank, folder, robust, island):
    """One rank of an island has a huge weight, which is finite."""
    mesh, _, _ = inside(1)
    model = spread("fsdp", mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    turns = Turns(folder)
    turns.wait(island)
    world = isles.StoreWorld(f"{folder}/store", quorum=2, patience=math.inf, timeout=LONG, robust=robust)
    with isles.DiLoCo(model, optimizer, METHODS["diloco"], world=world):
        turns.done(island)
        with torch.no_grad():
            local(model.embed.weight).view(-1)[0] += 1e6 if (island, rank) == (1, 1) else 1.0
        for number in range(5):
            step(model, optimizer, "fsdp", island, number)
    return weights_of(model)


@pytest.mark.parametrize("robust", [False, True])
def test_a_huge_value_on_one_rank_is_limited_by_the_norm_of_its_whole_island(robust, tmp_path):
    (one, second), (other, last) = apart(explode, tmp_path, robust)
    assert (one, second) == (other, last)
    largest = max(abs(value) for part in (one, second) for values in part.values() for value in values)
    assert (largest < 10) == robust


def save_and_go_on(rank, folder, island):
    """Each rank saves the moments of its own part; the weights are the run's."""
    mesh, _, _ = inside(1)

    def run(seed, state=None):
        model = spread("fsdp", mesh, seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        world = isles.StoreWorld(f"{folder}/store", timeout=LONG)
        with isles.DiLoCo(model, optimizer, METHODS["e3m0"], world=world) as diloco:
            begun = weights_of(model)
            if state is None:
                for number in range(9):
                    step(model, optimizer, "fsdp", 0, number)
                state = diloco.state_dict()
            else:
                diloco.load_state_dict(state)
                assert weights_of(model) == begun
        moments = [local(each["exp_avg"]).flatten().tolist() for each in optimizer.state.values()]
        return state, moments, begun, weights_of(model)

    state, saved, _, ended = run(seed=0)
    _, put_back, begun, _ = run(1, state)
    assert begun == ended
    return saved, put_back


def test_moments_of_every_rank_can_be_saved_and_put_back(tmp_path):
    results = processes.values(save_and_go_on, 2, tmp_path, str(tmp_path), 0)
    for saved, put_back in results:
        assert saved == put_back
        assert any(value for values in saved for value in values)
    assert results[0] != results[1]
