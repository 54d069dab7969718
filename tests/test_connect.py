"""Islands that share no process group meet at an address, and then are a world like any other.

What they compute is what the islands of one process group compute, bit for bit, with no default group and beside one;
ranks of an island find their peers by their place. Who does not come, comes twice or was started differently is named
on every island. An island that leaves is named with its reason, also the one that hosts the store, and closing gives
sockets and threads back. Worlds have a time-out that is longer than `processes.run` waits, except where it is tested.
"""

import re
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import isles
from isles.wire import rendezvous
from isles.wire.rendezvous import check_address
from tests import processes, test_resources
from tests.processes import free_address
from tests.test_islands_of_ranks import Model, join, train, values_of

torch.set_num_threads(1)
LONG = 600.0
"""A time-out that nobody lives to see."""


# ---- the same as in one process group


def plain(rank, address):
    world = isles.TorchWorld.connect(address, rank, 2, timeout=LONG) if address else isles.TorchWorld(timeout=LONG)
    model = Model()
    diloco, optimizer = join(model, world=world, weight=1.0 + rank)
    with diloco:
        train(model, optimizer, rank, range(8))
    world.close()
    return values_of(model), (world.rank, world.size), diloco.stats.bytes_sent, dist.is_initialized()


@pytest.mark.parametrize("ranks", [0, 1, 2], ids=["no default group", "one each", "one over both islands"])
def test_islands_at_an_address_train_as_those_of_one_process_group(ranks, tmp_path):
    expected = processes.values(plain, 2, tmp_path, None)
    found = processes.values(plain, 2, tmp_path, free_address(), ranks=ranks)
    assert [each[:3] for each in found] == [each[:3] for each in expected]
    assert found[0][0] == found[1][0]
    assert [each[3] for each in found] == [ranks > 0] * 2, "no default group was made or destroyed"


def of_ranks(rank, style, address):
    """Two ranks an island, the model over them: a default group of their own, or one over both islands."""
    torch.set_num_threads(1)
    island = rank // 2
    if address:
        from torch.distributed.device_mesh import init_device_mesh

        inside, world = init_device_mesh("cpu", (2,)), isles.TorchWorld.connect(address, island, 2, timeout=LONG)
    else:
        from tests.test_islands_of_ranks import grid

        mesh = grid()
        inside, world = mesh["rank"], isles.TorchWorld(mesh["island"], timeout=LONG)
    if style == "fsdp":
        from torch.distributed.fsdp import fully_shard

        model = Model()
        for layer in model.layers:
            fully_shard(layer, mesh=inside)
        fully_shard(model, mesh=inside)
    else:
        model = nn.parallel.DistributedDataParallel(Model(), process_group=inside.get_group())
    diloco, optimizer = join(model, world=world, weight=1.0 + island)
    with diloco:
        train(model, optimizer, island, range(8))
    return values_of(model), world.rank, diloco.stats.bytes_sent


@pytest.mark.parametrize("style", ["fsdp", "ddp"])
def test_each_rank_of_an_island_finds_the_ranks_at_its_place(style, tmp_path):
    expected = processes.values(of_ranks, 4, tmp_path, style, None)
    assert processes.values(of_ranks, 4, tmp_path, style, free_address(), ranks=2) == expected


def again_and_again(rank, address):
    """At one address, without waiting for the other island to close."""
    sizes = []
    for _ in range(6):
        world = isles.TorchWorld.connect(address, rank, 2, timeout=LONG)
        sizes.append((world.size, world.gather(bytes([rank]))))
        world.close()
    return sizes


def test_one_address_serves_run_after_run(tmp_path):
    assert processes.values(again_and_again, 2, tmp_path, free_address(), ranks=0) == [[(2, [b"\0", b"\1"])] * 6] * 2


def test_one_island_alone_needs_nobody():
    world = isles.TorchWorld.connect(free_address(), 0, 1)
    assert (world.rank, world.size, world.gather(b"x")) == (0, 1, [b"x"])
    world.close()


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("somewhere", 0, 2), "somewhere"),
        (("host:port", 0, 2), "host:port"),
        (("host:70000", 0, 2), "70000"),
        ((":29500", 0, 2), ":29500"),
        ((29500, 0, 2), "29500"),
        (("127.0.0.1:29500", 2, 2), "island=2.*0 to 1"),
        (("127.0.0.1:29500", -1, 2), "island=-1"),
        (("127.0.0.1:29500", True, 2), "island=True"),
        (("127.0.0.1:29500", 0, 0), "islands=0"),
        (("127.0.0.1:29500", 0, 2.0), r"islands=2\.0"),
        (("127.0.0.1:29500", 0, 2, -1), "timeout=-1"),
        (("no.such.host.invalid:29500", 0, 2), "no.such.host.invalid"),
        (("no.such.host.invalid:29500", 1, 2), "no.such.host.invalid"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_right_are_refused_at_once(arguments, named):
    with pytest.raises(ValueError, match=named) as refused:
        isles.TorchWorld.connect(*arguments)
    assert len(str(refused.value).splitlines()) == 1


def test_an_address_in_use():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .*in use"):
            isles.TorchWorld.connect(f"127.0.0.1:{port}", 0, 2)


def test_an_address_in_brackets():
    assert check_address("[fe80::1]:29500") == ("fe80::1", 29500)


def come(rank, address, numbers, islands, timeout):
    """Connects as the island of this number; then waits, so that nobody learns anything from a process that ends."""
    world = isles.TorchWorld.connect(address, numbers[rank], islands[rank], timeout=timeout)
    world.gather(b"")
    time.sleep(1000)


def test_who_does_not_come_is_named(tmp_path):
    outcomes = processes.run(come, 2, tmp_path, free_address(), (0, 2), (4, 4), 1.0, ranks=0)
    for outcome in outcomes:
        assert outcome.error == "LostPeerError", outcome.text
        assert re.search(r"islands 1, 3 of 4 did not come", outcome.message), outcome.message


def test_island_0_does_not_come(tmp_path):
    (outcome,) = processes.run(come, 1, tmp_path, address := free_address(), (1,), (2,), 1.0, ranks=0)
    assert outcome.error == "LostPeerError", outcome.text
    assert address in outcome.message
    assert "island 0" in outcome.message


def test_islands_that_were_told_of_different_numbers_both_say_so(tmp_path):
    outcomes = processes.run(come, 2, tmp_path, free_address(), (0, 1), (2, 3), LONG, ranks=0)
    for outcome in outcomes:
        assert outcome.error == "MismatchError", outcome.text
        assert "islands=2" in outcome.message
        assert "islands=3" in outcome.message


def test_two_islands_with_one_number(tmp_path):
    """The third is not there, so the first two wait: one of them is refused at once."""
    outcomes = processes.run(come, 3, tmp_path, free_address(), (0, 1, 1), (3, 3, 3), 4.0, ranks=0)
    refused = [outcome for outcome in outcomes[1:] if outcome.error == "ValueError"]
    assert len(refused) == 1, [outcome.text for outcome in outcomes]
    assert "island 1 " in refused[0].message


def come_in_islands(rank, address, sizes, late):
    """Islands of unlike numbers of ranks, as one default group each. The rank `late` is the last to come."""
    if rank == late:
        join = rendezvous._join
        rendezvous._join = lambda *options: (time.sleep(1), join(*options))[1]
    island = sum(rank >= sum(sizes[: place + 1]) for place in range(len(sizes) - 1))
    method = f"tcp://{address[1 + island]}"
    own = rank - sum(sizes[:island])
    dist.init_process_group("gloo", init_method=method, rank=own, world_size=sizes[island])
    isles.TorchWorld.connect(address[0], island, len(sizes), timeout=LONG)


@pytest.mark.parametrize("late", [None, 1], ids=["at once", "a rank of the host's island comes late"])
def test_islands_of_unlike_numbers_of_ranks(late, tmp_path):
    addresses = [free_address() for _ in range(3)]
    outcomes = processes.run(come_in_islands, 3, tmp_path, addresses, (2, 1), late, ranks=0)
    for outcome in outcomes:
        assert outcome.error == "MismatchError", outcome.text
        assert re.search("1 ranks.*2 ranks|2 ranks.*1 ranks", outcome.message), outcome.message


# ---- leaving


def go_wrong(rank, address, culprit, how):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = isles.TorchWorld.connect(address, rank, 3, timeout=LONG)
    with isles.DiLoCo(model, optimizer, isles.Method(sync_every=2, fragments=1, overlap=1), world=world):
        for step in range(1, 40):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (rank, step) == (culprit, 4):
                if how == "killed":
                    signal.raise_signal(signal.SIGKILL)
                raise ZeroDivisionError("the user's own mistake")


@pytest.mark.parametrize("culprit", [0, 1], ids=["the host of the store", "another island"])
def test_an_island_that_leaves_is_named_with_its_reason(culprit, tmp_path):
    """Its process ends at once, and with island 0's the store."""
    outcomes = processes.run(go_wrong, 3, tmp_path, free_address(), culprit, "exception", ranks=0)
    for rank, outcome in enumerate(outcomes):
        if rank != culprit:
            assert outcome.error == "LostPeerError", outcome.text
            assert re.search(rf"island {culprit} left at step 4: ZeroDivisionError: the user", outcome.message)


@pytest.mark.parametrize("culprit", [0, 1], ids=["the host of the store", "another island"])
def test_an_island_that_is_killed_is_missed_at_once(culprit, tmp_path):
    outcomes = processes.run(go_wrong, 3, tmp_path, free_address(), culprit, "killed", ranks=0)
    for rank, outcome in enumerate(outcomes):
        if rank != culprit:
            assert outcome.error == "LostPeerError", outcome.text


# ---- giving back


def make_many(rank, address):
    early = (0, 0)
    for number in range(1, 10):
        world = isles.TorchWorld.connect(address, rank, 2, timeout=LONG)
        if number % 3:
            model, optimizer = test_resources.build()
            method = isles.Method.streaming(sync_every=2, fragments=1)
            test_resources.train(isles.DiLoCo(model, optimizer, method, world=world), model, optimizer, steps=3)
            world.close()
        else:
            world.gather(b"")
        del world
        if number == 3:
            early = test_resources.in_use()
    return early, test_resources.in_use(most=early)


def test_worlds_that_are_closed_or_dropped_leave_no_files_and_no_threads_behind(tmp_path):
    for early, late in processes.values(make_many, 2, tmp_path, free_address(), ranks=0):
        assert late[0] <= early[0], f"open files after 3 worlds and after 9: {early[0]} and {late[0]}"
        assert late[1] <= early[1], f"threads after 3 worlds and after 9: {early[1]} and {late[1]}"
