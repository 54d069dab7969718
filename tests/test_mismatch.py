"""Islands that do not do the same thing, and bytes that change on the way: an error, never a silent average.

Mismatches go through `world.start`, in threads and in processes: everybody gets a `MismatchError` that names both
sides, and no process crashes, which is what gloo does when it is told different sizes. Damage is done to the transport
itself: every collective of a round in turn delivers one changed bit, and nobody may end up with a mean that is wrong.

No world has a time-out that could run out: an island that waits for another is told by the other's leaving, and one
that waits for ever is ended by `processes.run`.
"""

import ast
import pathlib

import pytest
import torch
import torch.distributed as dist

import isles
from isles.wire.world import Payload
from tests import processes

torch.set_num_threads(1)
FORMS = ["all-gather", "reduce-scatter"]


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


@pytest.mark.parametrize("function", [different_forms, different_calls, resume_alone], ids=lambda f: f.__name__)
def test_islands_at_different_points_of_the_program(function, tmp_path):
    for outcome in processes.run(function, 2, tmp_path):
        assert outcome.exit_code == 0, f"crashed: {outcome.exit_code}"
        error, message = outcome.value
        assert error == "MismatchError", f"{error}: {message}"


# ---- damage


class Damage:
    """A transport that flips one bit of what this process sends, or receives, in the n-th collective from now on."""

    def __init__(self, number, byte, receiving=False):
        self.number, self.byte, self.receiving = number, byte, receiving
        self.seen = []
        self.originals = dist.all_gather, dist.isend, dist.irecv
        dist.all_gather, dist.isend, dist.irecv = self.all_gather, self.isend, self.irecv

    def undo(self):
        dist.all_gather, dist.isend, dist.irecv = self.originals

    def hit(self, sent):
        self.seen.append(sent.numel())
        return len(self.seen) - 1 == self.number

    def flip(self, tensor):
        tensor.view(-1)[self.byte % tensor.numel()] ^= 16

    def all_gather(self, received, own, async_op=False, **more):
        hit, own = self.hit(own), own.clone()
        if hit and not self.receiving:
            self.flip(own)
        work = self.originals[0](received, own, async_op=True, **more)
        if hit and self.receiving:
            work.wait()
            self.flip(received[0])
        if async_op:
            return work
        work.wait()

    def isend(self, own, **more):
        own = own.clone()
        if not self.receiving and self.hit(own):
            self.flip(own)
        self.kept = own  # until it is sent
        return self.originals[1](own, **more)

    def irecv(self, received, **more):
        work = self.originals[2](received, **more)
        return self.Flipped(work, self, received) if self.receiving and self.hit(received) else work

    class Flipped:
        """Receiving ends with a flip; the send that goes with it has not begun, so nobody may wait here."""

        def __init__(self, work, damage, received):
            self.work, self.damage, self.received = work, damage, received

        def wait(self):
            self.work.wait()
            self.damage.flip(self.received)


def damaged_rounds(rank, form, flips, receiving):
    """For each (collective, byte): what island 1, whose transport it is, and the others make of the round."""
    results = []
    for number, byte in flips:
        world = isles.TorchWorld(reduction=form)
        damage = Damage(number, byte, receiving) if rank == 1 else None
        means = []
        error, message = outcome_of(lambda w=world, m=means: m.append(w.start(payload(rank)).wait()))
        results.append((error, message, [(mean.values, mean.weights) for mean in means]))
        if damage is not None:
            damage.undo()
    return results


def sizes_of_a_round(rank, form):
    world = isles.TorchWorld(reduction=form)
    damage = Damage(-1, 0)
    world.start(payload(rank)).wait()
    damage.undo()
    return damage.seen


@pytest.mark.parametrize("receiving", [False, True], ids=["sender", "receiver"])
@pytest.mark.parametrize("form", FORMS)
def test_one_bit_changed_on_the_way(form, receiving, tmp_path):
    sizes = processes.values(sizes_of_a_round, 2, tmp_path, form)[0]
    assert len(sizes) >= 2
    groups = []
    for number, size in enumerate(sizes):
        if size < 200 and not receiving:  # a header, every part of it: all islands see it, so nobody has to wait
            groups.append([(number, byte) for byte in range(0, size, 3)])
        else:  # in processes of their own: one island may wait for another that has given up, until that one leaves
            groups += [[(number, 0)], [(number, size // 2 - 1)]]
    results = [[], []]
    for group in groups:
        for result, more in zip(
            results, processes.values(damaged_rounds, 2, tmp_path, form, group, receiving), strict=True
        ):
            result += more
    flips = [flip for group in groups for flip in group]
    right = isles.run_local(lambda world: world.start(payload(world.rank)).wait(), 2, reduction=form)[0]
    for case, (number, byte) in enumerate(flips):
        where = f"collective {number} of {len(sizes)}, byte {byte} of {sizes[number]}"
        errors = [result[case][0] for result in results]
        assert set(errors) <= {"MismatchError", "LostPeerError", "nothing"}, f"{where}: {errors}"
        if errors != ["nothing"] * 2:  # a byte that has no meaning may change
            assert "MismatchError" in errors, f"{where}: {errors}"
        for error, message, means in (result[case] for result in results):
            assert error != "MismatchError" or "island" in message, f"{where}: {message}"
            for values, weights in means:
                assert torch.equal(values, right.values), f"{where}: a silent wrong average"
                assert weights == right.weights, f"{where}: a silent wrong weight"
    if not receiving:
        body = max(range(len(flips)), key=lambda case: sizes[flips[case][0]])
        assert results[0][body][0] == "MismatchError", "the payload itself was damaged"
        assert "damaged" in results[0][body][1]


def garbage_header(rank, seed):
    """Island 1 sends noise instead of its header."""
    world = isles.TorchWorld()
    if rank == 1:
        original = dist.all_gather

        def noise(received, own, **more):
            generator = torch.Generator().manual_seed(seed)
            garbage = torch.randint(0, 256, own.shape, generator=generator, dtype=torch.uint8)
            return original(received, garbage, **more)

        dist.all_gather = noise
    return outcome_of(lambda: world.start(payload(rank)).wait())


def test_a_header_of_noise(tmp_path):
    for seed in range(3):
        for error, message in processes.values(garbage_header, 2, tmp_path, seed):
            assert error == "MismatchError", f"{error}: {message}"
            assert "island 1" in message


# ---- nothing from a peer is executed


def test_nothing_from_a_peer_is_unpickled_or_evaluated():
    package = pathlib.Path(isles.__file__).parent
    forbidden_modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}
    forbidden_calls = {"eval", "exec", "compile", "__import__", "import_module", "load", "loads"}
    files = [*(package / "wire").glob("*.py"), package / "core" / "agreement.py"]
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
                assert called not in forbidden_calls or owner == "json", f"{where}: {called}"
