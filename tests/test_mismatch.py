"""Islands that do not do the same thing, and bytes that change on the way: an error, never a silent average.

Mismatches go through `world.start`, in threads and in processes: everybody gets a `MismatchError` that names both
sides, and no process crashes, which is what gloo does when it is told different sizes. Damage is done to the transport
itself: every message of a round in turn delivers one changed bit, and nobody may end up with a mean that is wrong.

No world has a time-out that could run out: an island that waits for another is told by the other's leaving, and one
that waits for ever is ended by `processes.run`.
"""

import ast
import pathlib
import threading

import pytest
import torch

import isles
import isles.wire.message
from isles.wire import reduction
from isles.wire.exchange import Kind
from isles.wire.message import HEADER_BYTES
from isles.wire.torch_world import GlooTransport
from isles.wire.world import Payload
from tests import processes

torch.set_num_threads(1)
FORMS = ["all-gather", "reduce-scatter"]
PART_BYTES = 300
"""Of a piece of some 600 bytes."""


def payload(rank, *, fragment=2, round=7, codec="int8", numel=9 * 128, weight=1.5, extra=0):
    chosen = isles.codecs[codec]
    body = chosen.encode(torch.randn(numel, generator=torch.Generator().manual_seed(rank)))
    body = torch.cat([body, body[:extra]]) if extra >= 0 else body[:extra]
    return Payload(fragment, round, chosen, numel, weight, body)


DIFFERENCES = {
    "fragment": ({"fragment": 2}, {"fragment": 3}),
    "round": ({"round": 7}, {"round": 8}),
    "codec of the same size": ({"codec": "bf16"}, {"codec": "fp16"}),
    "codec of another size": ({"codec": "int8"}, {"codec": "int4"}),
    "one value more": ({"numel": 1000}, {"numel": 1001}),
    "another length": ({"numel": 1000}, {"numel": 5000}),
    "truncated": ({"extra": 0}, {"extra": -1}),
    "one byte too many": ({"extra": 0}, {"extra": 1}),
    "a block too many": ({"extra": 0}, {"extra": 130}),
}
WRONG_WEIGHTS = [-1.0, float("nan"), float("inf")]


def outcome_of(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def start_differently(world, case, odd):
    """All islands start the same round, but for one."""
    this, other = DIFFERENCES[case]
    return outcome_of(lambda: world.start(payload(world.rank, **(other if world.rank == odd else this))).wait())


def differences_in_process(rank):
    return {
        (case, form): start_differently(isles.TorchWorld(reduction=form), case, 1)
        for case in DIFFERENCES
        for form in FORMS
    }


def check_mismatch(case, results):
    this, other = (str(value) for difference in DIFFERENCES[case] for value in difference.values())
    for rank, (error, message) in enumerate(results):
        assert error == "MismatchError", f"{case}, island {rank}: {error}: {message}"
        assert "island 0" in message, message
        assert "island 1" in message, message
        if "extra" not in DIFFERENCES[case][0]:
            assert this in message, message
            assert other in message, message


def test_different_payloads_in_processes(tmp_path):
    results = processes.values(differences_in_process, 3, tmp_path)
    for case, form in results[0]:
        check_mismatch(case, [result[case, form] for result in results])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", DIFFERENCES)
def test_different_payloads_in_threads(case, form):
    check_mismatch(case, isles.run_local(lambda world: start_differently(world, case, 1), 3, reduction=form))
    this, other = DIFFERENCES[case]
    start = lambda world: world.start(payload(0, **(other if world.rank == 2 else this)))
    with pytest.raises(isles.MismatchError, match="island 2"):
        isles.run_local(lambda world: start(world).wait(), 3, reduction=form)


def wrong_weight(world, weight):
    """Island 1 has a weight that is none."""
    return outcome_of(lambda: world.start(payload(0, weight=weight if world.rank == 1 else 1.0)).wait())


def wrong_weights_in_process(rank):
    return [wrong_weight(isles.TorchWorld(), weight) for weight in WRONG_WEIGHTS]


def test_weights_that_are_none(tmp_path):
    """A negative weight would pass for a mean, a wrong one: the engine checks its own, a world checks everybody's."""
    by_process = processes.values(wrong_weights_in_process, 2, tmp_path)
    for case, weight in enumerate(WRONG_WEIGHTS):
        by_thread = isles.run_local(lambda world, weight=weight: wrong_weight(world, weight), 2)
        for good, odd in (by_thread, [result[case] for result in by_process]):
            assert odd[0] in ("MismatchError", "ValueError"), f"{weight}: {odd}"
            assert "weight" in odd[1], f"{weight}: {odd}"
            assert good[0] in ("MismatchError", "LostPeerError"), f"{weight}: {good}"


def different_forms(rank):
    world = isles.TorchWorld(reduction=FORMS[rank])
    return outcome_of(lambda: world.start(payload(rank)).wait())


def different_calls(rank):
    world = isles.TorchWorld()
    return outcome_of(lambda: world.gather(b"my notes") if rank == 0 else world.start(payload(rank)).wait())


def resume_alone(rank):
    """Island 0 finds its checkpoint and compares notes before it goes on; island 1 has none and starts from scratch."""
    model = torch.nn.Linear(4, 4)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        method = isles.Method.diloco(sync_every=1)
        with isles.DiLoCo(model, optimizer, method, world=isles.TorchWorld()) as diloco:
            if rank == 0:
                diloco.load_state_dict(diloco.state_dict())
            model(torch.ones(4)).sum().backward()
            optimizer.step()

    return outcome_of(run)


def disagree_later(rank, form):
    """Four rounds under way together; in the third one the islands disagree, before a body of the first has gone."""
    known, agree, begin = threading.Event(), isles.wire.message.agree, GlooTransport._begin

    def agree_or_tell(headers):
        try:
            agree(headers)
        except isles.MismatchError:
            known.set()
            raise

    def held_begin(transport, what, part, other, kind):
        assert what == "recv" or kind != Kind.BODY or known.wait(60)
        return begin(transport, what, part, other, kind)

    isles.wire.message.agree, GlooTransport._begin = agree_or_tell, held_begin
    world = isles.TorchWorld(reduction=form)
    rounds = [world.start(payload(rank, round=number)) for number in (1, 2, 3 + rank, 4 + rank)]
    means = [handle.wait().values for handle in rounds[:2]]
    return means, [outcome_of(handle.wait) for handle in rounds[2:]], outcome_of(lambda: world.gather(b"notes"))


@pytest.mark.parametrize("form", FORMS)
def test_what_came_before_a_disagreement_is_brought_to_its_end(form, tmp_path):
    right = isles.run_local(lambda world: world.start(payload(world.rank)).wait(), 2, reduction=form)[0].values
    for means, later, gathered in processes.values(disagree_later, 2, tmp_path, form):
        assert all(torch.equal(mean, right) for mean in means)
        for error, message in (*later, gathered):
            assert error == "MismatchError", f"{error}: {message}"
            assert "round 3" in message, message


@pytest.mark.parametrize("function", [different_forms, different_calls, resume_alone], ids=lambda f: f.__name__)
def test_islands_at_different_points_of_the_program(function, tmp_path):
    for outcome in processes.run(function, 2, tmp_path):
        assert outcome.exit_code == 0, f"crashed: {outcome.exit_code}"
        error, message = outcome.value
        assert error == "MismatchError", f"{error}: {message}"


# ---- damage


class Damage:
    """A transport that flips one bit of what this process sends, or receives, in one message of every world.

    `flips`: for each world, in the order in which they are made, the number of the message and that of the byte.
    """

    def __init__(self, flips, receiving=False):
        self.flips, self.receiving = iter(flips), receiving
        self.flip_of, self.seen = {}, {}
        self.begin = GlooTransport._begin
        damage = self
        GlooTransport._begin = lambda *arguments: damage.damaged_begin(*arguments)

    def byte_of(self, part, transport):
        """Which byte of this message to flip, or None; counts the messages of each transport."""
        self.seen[transport].append(part.numel())
        number, byte = self.flip_of[transport]
        return byte % part.numel() if len(self.seen[transport]) - 1 == number else None

    def damaged_begin(self, transport, what, part, other, kind):
        if transport not in self.flip_of:  # a new world posts the receive of the first header
            self.flip_of[transport], self.seen[transport] = next(self.flips), []
        if kind == Kind.PROBE:
            return self.begin(transport, what, part, other, kind)
        byte = self.byte_of(part, transport) if self.receiving == (what == "recv") else None
        if what == "send":
            part = part.clone()
            if byte is not None:
                part[byte] ^= 16
        work = self.begin(transport, what, part, other, kind)
        return self.Kept(work, part, byte if what == "recv" else None)

    class Kept:
        """Keeps what is sent; receiving may end with a flip."""

        def __init__(self, work, part, byte):
            self.work, self.part, self.byte = work, part, byte

        def wait(self):
            self.work.wait()
            if self.byte is not None:
                self.part[self.byte] ^= 16


def damaged_rounds(rank, form, flips, receiving):
    """For each (message, byte), in a world of its own: what island 1, whose transport it is, and the other make of it.

    All rounds are started before one is waited for: an island may wait for another that has given up, until that one
    leaves.
    """
    reduction.PART_BYTES = PART_BYTES
    if rank == 1:
        Damage(flips, receiving)
    handles = [isles.TorchWorld(reduction=form).start(payload(rank)) for _ in flips]
    results = []
    for handle in handles:
        means = []
        error, message = outcome_of(lambda handle=handle, means=means: means.append(handle.wait()))
        results.append((error, message, [(mean.values, mean.weights) for mean in means]))
    return results


def sizes_of_a_round(rank, form, receiving):
    reduction.PART_BYTES = PART_BYTES
    damage = Damage([(-1, 0)], receiving)
    isles.TorchWorld(reduction=form).start(payload(rank)).wait()
    (seen,) = damage.seen.values()
    if receiving:
        assert seen.pop() == HEADER_BYTES, "the next header, for which every island is ready, and which never comes"
    return seen


@pytest.mark.parametrize("receiving", [False, True], ids=["sender", "receiver"])
@pytest.mark.parametrize("form", FORMS)
def test_one_bit_changed_on_the_way(form, receiving, tmp_path):
    sizes = processes.values(sizes_of_a_round, 2, tmp_path, form, receiving)[0]
    assert len(sizes) >= (2 if form == "all-gather" else 1 + 2 * 2), "a header; a body, or pieces and means in parts"
    flips = []
    for number, size in enumerate(sizes):
        every_field = range(0, size, 3)
        flips += [(number, byte) for byte in (every_field if size == HEADER_BYTES else (0, size // 2 - 1, size - 1))]
    results = processes.values(damaged_rounds, 2, tmp_path, form, flips, receiving)
    right = isles.run_local(lambda world: world.start(payload(world.rank)).wait(), 2, reduction=form)[0]
    victim = 1 if receiving else 0
    for case, (number, byte) in enumerate(flips):
        where = f"message {number} of {len(sizes)}, byte {byte} of {sizes[number]}"
        errors = [result[case][0] for result in results]
        assert errors[victim] == "MismatchError", f"{where}: {errors}"
        assert errors[1 - victim] in ("LostPeerError", "nothing"), f"{where}: {errors}"
        assert f"island {1 - victim}" in results[victim][case][1], f"{where}: {results[victim][case][1]}"
        if sizes[number] != HEADER_BYTES:
            assert "damaged" in results[victim][case][1], f"{where}: {results[victim][case][1]}"
        for values, weights in results[1 - victim][case][2]:
            assert torch.equal(values, right.values), f"{where}: a silent wrong average"
            assert weights == right.weights, f"{where}: a silent wrong weight"


def garbage_header(rank, seed):
    """Island 1 sends noise instead of its header."""
    world = isles.TorchWorld()
    if rank == 1:
        kept, begin = [], GlooTransport._begin

        def noise(transport, what, part, other, kind):
            if what == "send":
                generator = torch.Generator().manual_seed(seed)
                part = torch.randint(0, 256, part.shape, generator=generator, dtype=torch.uint8)
                kept.append(part)
            return begin(transport, what, part, other, kind)

        GlooTransport._begin = noise
    return outcome_of(lambda: world.start(payload(rank)).wait())


def test_a_header_of_noise(tmp_path):
    for seed in range(3):
        (error, message), (other_error, other_message) = processes.values(garbage_header, 2, tmp_path, seed)
        assert error == "MismatchError", f"{error}: {message}"
        assert "island 1" in message
        assert other_error == "LostPeerError", f"what island 1 meant to send was right: {other_error}: {other_message}"


# ---- nothing from a peer is executed


def test_nothing_from_a_peer_is_unpickled_or_evaluated():
    package = pathlib.Path(isles.__file__).parent
    forbidden_modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}
    forbidden_calls = {"eval", "exec", "compile", "__import__", "import_module", "load", "loads"}
    files = [*(package / "wire").glob("*.py"), package / "core" / "handshake.py"]
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.name}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {name.split(".")[0] for name in names} & forbidden_modules, where
            if isinstance(node, ast.Attribute):
                assert "_object" not in node.attr, f"{where}: torch.distributed's *_object* collectives unpickle"
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                owner = getattr(getattr(node.func, "value", None), "id", "")
                numba = (file.name, called, owner) == ("fused.py", "compile", "function")
                triton = (file.name, called, owner) == ("triton_kernels.py", "load", "tl")  # from device memory
                assert called not in forbidden_calls or owner == "json" or numba or triton, f"{where}: {called}"
