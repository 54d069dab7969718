"""One round at a time, through the door that the engine uses: `start`, `wait`, `gather`, on both worlds.

The mean is what the definition says (weights, absent islands, both forms, slices), the bytes that a handle reports are
the bytes that are handed to the transport, groups and meshes are taken as islands, and worlds leave nothing behind.
"""

import gc
import math
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import isles
from isles.wire import reduction, torch_world
from isles.wire.exchange import Kind
from isles.wire.torch_world import GlooTransport
from isles.wire.world import Payload
from tests import processes

torch.set_num_threads(1)
FORMS = ["all-gather", "reduce-scatter"]
SIZES = [0, 1, 1024, 5000]
WEIGHTS = {2: [(1, 1), (3, 0.5), (0, 2), (0, 0)], 3: [(1, 1, 1), (0, 2, 5)], 4: [(1, 1, 1, 1), (0.1, 0, 7, 2)]}


def vector(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def payload(values, *, codec="e3m0", round=1, weight=1.0):
    chosen = isles.codecs[codec]
    return Payload(0, round, chosen, values.numel(), weight, chosen.encode(values))


def mean_of(vectors, weights, codec):
    """All-gather: decode all, add up in fp32, divide."""
    codec, numel = isles.codecs[codec], vectors[0].numel()
    total = torch.zeros(numel)
    for values, weight in zip(vectors, weights, strict=True):
        if weight:
            total += codec.decode(codec.encode(values), numel) * weight
    return total / sum(weights) if sum(weights) else total


def once_more_through_the_codec(mean, islands, codec):
    """Reduce-scatter: each piece of the mean, whole blocks dealt out evenly, is encoded by the island that made it."""
    codec = isles.codecs[codec]
    size = math.ceil(math.ceil(mean.numel() / codec.block) / islands) * codec.block
    return torch.cat([codec.decode(codec.encode(piece), piece.numel()) for piece in mean.split(max(1, size))])


def all_rounds(world):
    """Rounds of every codec, size and weighting, all of them in flight together, waited for in the wrong order."""
    handles = {}
    for codec in isles.codecs:
        for numel in SIZES:
            for weights in WEIGHTS[world.size]:
                one = payload(vector(world.rank, numel), codec=codec, round=numel, weight=float(weights[world.rank]))
                handles[codec, numel, weights] = world.start(one)
    means = {key: handles[key].wait() for key in reversed(handles)}
    assert all(handles[key].wait() is mean for key, mean in means.items()), "a second wait gives the same answer"
    return {key: (mean.values, mean.weights, handles[key].bytes_sent) for key, mean in means.items()}


def all_rounds_in_process(rank, form, slice_bytes, part_bytes):
    torch_world.SLICE_BYTES, reduction.PART_BYTES = slice_bytes, part_bytes
    return all_rounds(isles.TorchWorld(timeout=60, reduction=form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("islands", "slice_bytes", "part_bytes"), [(2, 1 << 20, 1 << 18), (3, 700, 500), (4, 1 << 20, 1500)]
)
def test_the_mean_is_the_definition_in_both_worlds(islands, slice_bytes, part_bytes, form, tmp_path, monkeypatch):
    monkeypatch.setattr(reduction, "PART_BYTES", part_bytes)  # each part has a checksum, which counts
    by_process = processes.values(all_rounds_in_process, islands, tmp_path, form, slice_bytes, part_bytes)
    by_thread = isles.run_local(all_rounds, islands, reduction=form)
    all_gathered = isles.run_local(all_rounds, islands, reduction="all-gather")[0]
    for key in all_gathered:
        codec, numel, weights = key
        expected = all_gathered[key][0]
        exact = mean_of([vector(rank, numel) for rank in range(islands)], weights, codec)
        assert torch.allclose(expected, exact, rtol=1e-6, atol=1e-6), key
        if form == "reduce-scatter":
            expected = once_more_through_the_codec(expected, islands, codec)
        for result in (*by_thread, *by_process):
            assert torch.equal(result[key][0], expected), key
            assert result[key][1] == {rank: weight for rank, weight in enumerate(weights) if weight}, key
            assert result[key][2] == by_thread[0][key][2], key


@pytest.mark.parametrize("codec", ["fp32", "int8", "e3m0"])
def test_the_mean_of_the_largest_values_is_finite(codec):
    """A sum that overflows although every island sent finite values would reach everybody's weights as infinity."""
    largest = torch.full((500,), 3e38)
    for form in FORMS:
        for weight in (1.0, 1e6):
            start = lambda world, w=weight: world.start(payload(largest, codec=codec, weight=w)).wait()
            for mean in isles.run_local(start, 3, reduction=form):
                assert torch.allclose(mean.values, largest, rtol=1e-2), (form, weight)


# ---- bytes


def count_bytes(rank, form):
    """What is handed to the transport for each round, next to what the handle says."""
    handed = [0]
    begin = GlooTransport._begin

    def counted_begin(transport, what, part, other, kind):
        handed[0] += part.nbytes if what == "send" else 0
        return begin(transport, what, part, other, kind)

    GlooTransport._begin = counted_begin
    world = isles.TorchWorld(timeout=60, reduction=form)
    counts = []
    for codec in isles.codecs:
        for numel in (0, 1, 5000, 100_000):
            before = handed[0]
            handle = world.start(payload(vector(rank, numel), codec=codec))
            handle.wait()
            counts.append((codec, numel, handed[0] - before, handle.bytes_sent, handle.bytes_received))
    return counts


@pytest.mark.parametrize("form", FORMS)
def test_bytes_reported_are_bytes_handed_to_the_transport(form, tmp_path):
    islands = 3
    for counts in processes.values(count_bytes, islands, tmp_path, form):
        for codec, numel, handed, sent, received in counts:
            assert handed == sent == received, (codec, numel)
            if numel == 100_000:  # where headers and the last block are small change
                payloads = islands - 1 if form == "all-gather" else 2 * (islands - 1) / islands
                assert sent == pytest.approx(payloads * isles.codecs[codec].num_bytes(numel), rel=0.02)


def test_reduce_scatter_does_not_grow_with_the_number_of_islands():
    for islands in (2, 4, 8):
        start = lambda world: world.start(payload(torch.ones(200_000)))
        handle = isles.run_local(start, islands, reduction="reduce-scatter")[0]
        assert handle.bytes_sent < 2.02 * isles.codecs["e3m0"].num_bytes(200_000)


# ---- gather


def notes(world):
    longer = [world.gather(bytes([world.rank]) * (1000 * world.rank)) for _ in range(2)]
    return [world.gather(b""), *longer, world.gather(bytes(range(256)))]


def notes_in_process(rank):
    torch_world.SLICE_BYTES = 300
    return notes(isles.TorchWorld(timeout=60))


def test_gather(tmp_path):
    lengths = [bytes([rank]) * (1000 * rank) for rank in range(3)]
    expected = [[b""] * 3, lengths, lengths, [bytes(range(256))] * 3]
    assert isles.run_local(notes, 3) == [expected] * 3
    assert processes.values(notes_in_process, 3, tmp_path) == [expected] * 3


# ---- groups, meshes, and what worlds leave behind


def islands_of_a_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    worlds = {
        "mesh": isles.TorchWorld(mesh["island"], timeout=60),
        "group": isles.TorchWorld([dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)], timeout=60),
        "all": isles.TorchWorld(timeout=60),
    }
    handles = {name: world.start(payload(torch.full((300,), float(rank)))) for name, world in worlds.items()}
    users = torch.full((300,), float(rank))
    dist.all_reduce(users)  # the user's own traffic, while rounds are in flight
    means = {name: handle.wait().values.unique().tolist() for name, handle in handles.items()}
    return {name: (world.rank, world.size, means[name]) for name, world in worlds.items()}, users.unique().tolist()


def test_islands_are_a_group_or_a_dimension_of_a_mesh(tmp_path):
    results = processes.values(islands_of_a_mesh, 4, tmp_path)
    for rank, (worlds, users) in enumerate(results):
        assert worlds["mesh"] == (rank // 2, 2, [{0: 1.0, 1: 2.0}[rank % 2]])  # islands (0, 2) and (1, 3)
        assert worlds["group"] == (0 if rank < 2 else 1, 2, [1.5])
        assert worlds["all"] == (rank, 4, [1.5])
        assert users == [6.0]


def wrong_arguments(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("island", "shard"))
    cases = {
        "mesh of two dimensions": lambda: isles.TorchWorld(mesh, timeout=9),
        "neither group nor mesh": lambda: isles.TorchWorld("gloo", timeout=9),
        "no time-out": lambda: isles.TorchWorld(timeout=0),
        "time-out not a number": lambda: isles.TorchWorld(timeout=float("nan")),
        "form": lambda: isles.TorchWorld(reduction="ring"),
    }
    group = dist.new_group([0])
    if rank == 1:
        cases["not a member"] = lambda: isles.TorchWorld(group, timeout=9)
    seen = {}
    for name, case in cases.items():
        try:
            case()
            seen[name] = "nothing", ""
        except Exception as error:
            seen[name] = type(error).__name__, str(error)
    return seen


def test_wrong_arguments_of_a_world(tmp_path):
    with pytest.raises(ValueError, match="init_process_group"):
        isles.TorchWorld()
    said = {
        "mesh of two dimensions": "dimension",
        "neither group nor mesh": "gloo",
        "no time-out": "timeout",
        "time-out not a number": "timeout",
        "form": "ring",
        "not a member": "group",
    }
    for seen in processes.values(wrong_arguments, 2, tmp_path):
        for name, (kind, message) in seen.items():
            assert kind == "ValueError", f"{name}: {kind}: {message}"
            assert said[name] in message, f"{name}: {message}"


def order_of_messages(rank, form):
    """What is handed to gloo, and when, in two rounds of four slices or parts."""
    torch_world.SLICE_BYTES = reduction.PART_BYTES = 300
    calls, begin = [], GlooTransport._begin

    def noted_begin(transport, what, part, other, kind):
        calls.append((what, kind, other))
        return begin(transport, what, part, other, kind)

    GlooTransport._begin = noted_begin
    world = isles.TorchWorld(timeout=60, reduction=form)
    for number in (1, 2):
        values = torch.ones(1200 if form == "all-gather" else 3 * 1200)
        world.start(payload(values, codec="int8", round=number)).wait()
    return calls


@pytest.mark.parametrize("form", FORMS)
def test_receives_are_posted_early_and_nobody_waits_long_for_a_slice(form, tmp_path):
    """Receives for the next header, and for all of a round, are posted before the round is announced. Slices go to all
    others in turn, so that each of them hears from every island all the time.
    """
    for rank, calls in enumerate(processes.values(order_of_messages, 3, tmp_path, form)):
        after, before = [(rank + 1) % 3, (rank + 2) % 3], [(rank + 2) % 3, (rank + 1) % 3]
        assert calls[:2] == [("recv", Kind.HEADER, other) for other in before]
        headers = [place for place, call in enumerate(calls) if call[:2] == ("send", Kind.HEADER)]
        bodies = {what: [call[2] for call in calls if call[:2] == (what, Kind.BODY)] for what in ("send", "recv")}
        assert len(headers) == 4
        assert bodies["send"] == len(bodies["send"]) // 2 * after
        assert bodies["recv"] == len(bodies["recv"]) // 2 * before
        assert len(bodies["send"]) == len(bodies["recv"]) >= 2 * 2 * 4, "rounds, islands, slices"
        for number, begin in enumerate((headers[0], headers[2]), start=1):
            ready = [call[1] for call in calls[:begin] if call[0] == "recv"]
            assert ready.count(Kind.HEADER) == 2 * (number + 1)
            assert ready.count(Kind.BODY) == len(bodies["recv"]) * number // 2
            assert form == "all-gather" or ready.count(Kind.MEAN) == ready.count(Kind.BODY)


def let_go_of_the_world(rank):
    """Only the handle of a round is kept, and its messages go when nobody else refers to the world."""
    alone, begin = threading.Event(), GlooTransport._begin

    def held_begin(transport, what, part, other, kind):
        assert what == "recv" or kind == Kind.HEADER or alone.wait(60)
        return begin(transport, what, part, other, kind)

    GlooTransport._begin = held_begin
    handle = isles.TorchWorld(timeout=60, reduction="reduce-scatter").start(payload(torch.ones(300)))
    gc.collect()
    time.sleep(3 if rank == 0 else 0)  # longer than threads that are told to end are waited for
    alone.set()
    return handle.wait().values.unique().tolist()


def test_a_round_outlives_the_world_it_was_started_in(tmp_path):
    assert processes.values(let_go_of_the_world, 2, tmp_path) == [[1.0]] * 2


def threads_after_use(rank):
    world = isles.TorchWorld(timeout=60)
    handle = world.start(payload(torch.ones(10)))
    handle.wait()
    world.gather(b"hello")
    during = sum(thread.name.startswith("isles") for thread in threading.enumerate())
    assert len(world._transport._posted) == 1, "the next header of the other island, and nothing of what has come"
    del world
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("isles"):
            thread.join(60)
    return during, [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]


def test_a_world_that_nobody_holds_ends_its_threads(tmp_path):
    assert processes.values(threads_after_use, 2, tmp_path) == [(4, [])] * 2
