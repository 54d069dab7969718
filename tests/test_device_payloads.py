"""The engine on an accelerator with kernels: outer steps straight from the payloads of all islands.

The kernels are Triton's, run by its interpreter on the pretend device (`tests.pretend_kernels`). They give the CPU's
weights, bit for bit, in every world. The host never waits, nothing is compiled in the loop, and no mean in fp32 crosses
to the device where payloads are shorter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os

import pytest
import torch

import isles
from isles.wire import device_kernels, device_tables
from isles.wire.reduction import Gathered
from tests import pretend, pretend_kernels, processes, test_device, test_device_order
from tests.test_device import METHODS, both, train

if importlib.util.find_spec("triton") is None:
    reason = "Triton is not installed, and kernels for accelerators are its: pip install 'isles[gpu]' (Linux)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget


def with_kernels(rank, function, *arguments):
    """Calls a function of another test in a process whose pretend device has kernels."""
    pretend_kernels.install()
    result = function(rank, *arguments)
    assert pretend_kernels.launched
    assert pretend_kernels.launched <= pretend_kernels.compiled, "nothing is compiled in the loop"
    return result


# ---- methods and worlds

CASES = [*((name, None) for name in METHODS), ("streaming", "cpu"), ("eager", "cpu"), ("gradual", "cpu")]


@pytest.mark.parametrize(("name", "outer_device"), CASES)
def test_kernels_on_a_device_give_the_cpus_weights(name, outer_device, tmp_path):
    arguments = (test_device.both_well, name, torch.float32, {"outer_device": outer_device})
    assert processes.values(with_kernels, 2, tmp_path, *arguments) == [[], []]


def test_parameters_of_other_precisions(tmp_path):
    assert processes.values(with_kernels, 2, tmp_path, both, "streaming", torch.bfloat16, {}) == [[], []]


@pytest.mark.parametrize("name", ["streaming", "eager"])
def test_a_checkpoint_holds_the_means_of_rounds_in_flight(name, tmp_path):
    for same, wrong in processes.values(with_kernels, 2, tmp_path, test_device.resumed, name, None):
        assert same == [True, True]
        assert wrong == []


@pytest.mark.parametrize("robust", [False, True])
def test_islands_in_a_store(robust, tmp_path):
    arguments = (test_device.in_a_store, str(tmp_path), "streaming", None, robust)
    for same, wrong in processes.values(with_kernels, 2, tmp_path, *arguments):
        assert same
        assert wrong == []


@pytest.mark.parametrize("islands", [1, 3])
def test_islands_as_threads(islands, tmp_path):
    arguments = (test_device.as_threads, "streaming", islands, None)
    assert processes.values(with_kernels, 1, tmp_path, *arguments) == [([True] * islands, [])]


def test_ranks_of_an_island(tmp_path):
    for differs, *_, wrong in processes.values(with_kernels, 4, tmp_path, test_device.as_ranks, "streaming", False):
        assert not differs
        assert wrong == []


@pytest.mark.parametrize("name", ["streaming", "eager"])
def test_an_island_whose_weights_are_not_finite_is_left_out(name, tmp_path):
    well, ill = processes.values(with_kernels, 2, tmp_path, test_device.astray, name, None)
    assert all(well[0])
    assert not all(ill[0])
    assert (well[2], ill[2] > 0) == (0, True)
    assert torch.equal(well[1], ill[1])
    assert well[4] == ill[4] == []


# ---- what crosses to the device


def crossing(rank, name, reduction):
    """How many bytes copies to the device have, as long as the loop runs; bytes of payloads and means by fragment."""
    pretend_kernels.install()
    sizes, copies, applies = {}, [], []

    def watch(step, model, diloco):
        codec, numels = diloco._rounds.codec, [fragment.numel for fragment in diloco.fragments]
        sizes.update(payloads=[2 * codec.num_bytes(numel) for numel in numels], means=[4 * numel for numel in numels])
        copies[:], applies[:] = pretend.machine.sizes_from_host, [diloco.stats.applies]

    host, device = (
        train(rank, isles.TorchWorld(reduction=reduction), METHODS[name], on_device, 39, watch)
        for on_device in (False, True)
    )
    assert all(torch.equal(one, two) for one, two in zip(host[:3], device[:3], strict=True))
    assert pretend.settled() == []
    return {kind: sum(size in some for size in copies) for kind, some in sizes.items()}, *applies


@pytest.mark.parametrize(
    ("name", "reduction", "kind"),
    [
        ("streaming", "all-gather", "payloads"),
        ("eager", "all-gather", "payloads"),
        ("gradual", "all-gather", "payloads"),
        ("streaming", "reduce-scatter", "means"),  # nobody has all payloads
    ],
)
def test_what_is_shorter_crosses_to_the_device(name, reduction, kind, tmp_path):
    for copies, applies in processes.values(crossing, 2, tmp_path, name, reduction):
        assert applies > 0
        assert 0 <= copies.pop(kind) - applies <= 1, "once for each round; the next one may be there already"
        assert set(copies.values()) == {0}


@pytest.mark.parametrize(("name", "most"), [("e3m0", 7), ("int8", 3), ("bf16", 1), ("fp32", 0)])
def test_payloads_are_kept_apart_while_they_are_shorter_than_their_mean(name, most):
    codec, numel = isles.codecs[name], 1280
    for islands in range(1, 10):
        bodies = [codec.encode(torch.randn(numel)) for _ in range(islands + 1)]
        weights, factors = [*([1.0] * islands), 0.0], [0.5] * (islands + 1)
        gathered = Gathered(bodies, weights, codec, numel, factors)
        kept, mean = gathered.result(apart=True), gathered.mean()
        assert isinstance(kept, Gathered) == (islands <= most)
        assert torch.equal(mean, kept.mean() if isinstance(kept, Gathered) else kept)
        assert torch.equal(mean, gathered.result(apart=False))
        assert not isinstance(kept, Gathered) or len(kept.bodies) == islands, "those of weight zero are left out"


def held(rank, name):
    """The most payloads of other islands, and means, that rounds in flight refer to on the host: bytes a value."""
    pretend_kernels.install()
    most = []

    def watch(step, model, diloco):
        rounds = [sent for state in diloco._rounds.offload.states for sent in state.rounds.values()]
        results = [sent.handle.wait().result for sent in rounds]
        for result in results:
            assert isinstance(result, Gathered)
            table = {body.untyped_storage()._cdata: body.untyped_storage().nbytes() for body in result.bodies}
            most.append(sum(table.values()) / (len(result.bodies) * result.codec.num_bytes(result.numel)))
            assert all(pretend.is_pinned(body) for body in result.bodies)

    train(rank, isles.TorchWorld(), METHODS[name], True, 24, watch, guarded=False)
    return max(most), pretend.settled()


def test_a_round_in_flight_holds_one_payload_an_island(tmp_path):
    assert processes.values(held, 2, tmp_path, "streaming") == [(1.0, [])] * 2


def holding(rank, name):
    """As `test_device_order.memory`. Tensors are larger: every fragment has a table of addresses for each stream."""
    pretend_kernels.install()
    test_device_order.WIDTH, device_tables.ROWS = 64, 128
    method, outer_device, _ = test_device_order.MEMORY[name]
    ratio, temporary, payload, _, wrong = test_device_order.memory(rank, method, outer_device)
    return ratio, temporary <= payload, wrong


HOLDS = {"streaming, on the host": 1.045, "eager, on the host": 1.055, "streaming": 1.515, "eager": 1.515}
"""With kernels eager updates need no mean in fp32 and keep no payload: 9.55 bytes a value of the fragment that is due
(anchor and velocity, the payloads of two islands, and the fresh one), where they are 12 and more without."""


@pytest.mark.parametrize("name", HOLDS)
def test_what_the_device_holds_at_the_most(name, tmp_path):
    for ratio, is_small, wrong in processes.values(holding, 2, tmp_path, name, seconds=250):
        assert ratio <= HOLDS[name], f"{ratio:.4f} of the bare loop"
        assert is_small, "a temporary is larger than a payload"
        assert wrong == []


# ---- before the loop


class Driver:
    """Of a GPU that is not there: Triton compiles for it, and a launch does nothing."""

    loaded, launched = 0, 0
    utils = property(lambda self: self)
    get_current_device = get_current_stream = unload_module = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 80, 32)
    get_device_properties = lambda self, device: {"max_shared_mem": 1 << 16}

    def load_binary(self, *_):
        self.loaded += 1
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, *_):
        return lambda *_: setattr(self, "launched", self.launched + 1)


def on_a_gpu_that_is_not_there(rank, name, folder):
    """How many kernels are compiled, and loaded, when DiLoCo is made; and then, by the calls of its rounds."""
    os.environ["TRITON_CACHE_DIR"] = folder
    launch = device_kernels._launch
    device = pretend_kernels.install(interpreted=False)
    device_kernels._launch = launch
    pretend.Module.device = staticmethod(contextlib.nullcontext)
    compiled, gpu = [], Driver()
    triton.runtime.driver.set_active(gpu)
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    model, method = pretend.on_device(test_device.stack()), METHODS[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = isles.DiLoCo(model, optimizer, method, world=isles.LocalWorld.alone())
    before = len(compiled), gpu.loaded
    codec, how = diloco._rounds.codec, (0.4, 0.9, True, method.mixing)
    for fragment, state in zip(diloco.fragments, diloco._rounds.offload.states, strict=True):
        anchor, thetas, numel = state.anchor, fragment.tensors_in_place(), fragment.numel
        finite = torch.ones(1, dtype=torch.int32, device=device)
        bodies = [torch.empty(codec.num_bytes(numel), dtype=torch.uint8, device=device) for _ in range(3)]
        device_kernels.encode_difference(codec, anchor, thetas, bodies[0], finite)
        for weights in ([1.0, 1.0, 0.5], [1.0, 0.0, 0.0]):
            gathered = Gathered(bodies, weights, codec, numel)
            device_kernels.weighted_mean(gathered, torch.empty(numel, device=device))
            device_kernels.outer_step_and_mix(anchor, gathered, state.velocity, thetas, *how, [(bodies[0], 0.5)])
        device_kernels.outer_step_and_mix(anchor, torch.empty(numel, device=device), state.velocity, thetas, *how)
        device_kernels.accumulate(codec, bodies[0], anchor, 0.5, fresh=True)
    assert gpu.launched == 11 * len(diloco.fragments)
    diloco.close()
    return before, (len(compiled), gpu.loaded)


def test_nothing_is_compiled_or_loaded_after_diloco_is_made(tmp_path):
    arguments = ("streaming", str(tmp_path / "cache"))
    ((before, after),) = processes.values(on_a_gpu_that_is_not_there, 1, tmp_path, *arguments)
    assert before == after
    assert before[0] == before[1] >= 6


def without_a_compiler(rank):
    """Kernels pass the first trial, and then one does not compile."""
    pretend_kernels.install()
    launch = device_kernels._launch

    def broken(name, *arguments, **options):
        if device_kernels._mode.compiles and name == "outer_step_and_mix":
            raise OSError("no assembler today")
        launch(name, *arguments, **options)

    device_kernels._launch = broken
    wrong = both(rank, "streaming", torch.float32, {})
    return wrong, pretend_kernels.launched, device_kernels.available(torch.device("pretend", 0))


def test_kernels_that_do_not_compile_are_done_without(tmp_path):
    assert processes.values(without_a_compiler, 2, tmp_path) == [([], set(), False)] * 2


# ---- order


@pytest.mark.parametrize("which", test_device_order.WAITS)
def test_a_wait_that_is_missing_is_noticed(which, tmp_path):
    """Also where kernels find what they read by its address."""
    results = processes.values(with_kernels_broken, 2, tmp_path, which)
    assert all(results), "both islands notice, or lose the one that does"
    assert any(test_device_order.WAITS[which] in each for wrong in results for each in wrong), results


def with_kernels_broken(rank, which):
    pretend_kernels.install()
    return test_device_order.broken(rank, which, None)


def forgotten(rank):
    """A payload that is gone when the kernel that is given its address runs."""
    device = pretend_kernels.install()
    codec, anchor = isles.codecs["e3m0"], torch.zeros(300).to(device)
    table = device_tables.table_of_payloads([(codec.encode(torch.zeros(300)).to(device), 1.0, 1.0)], device)
    finite = torch.ones(1, dtype=torch.int32, device=device)
    payloads = device_kernels._Payloads(table, 1, 1.0)
    device_kernels._merge(codec, payloads, anchor, finite, "zero")


def test_an_address_of_memory_that_is_gone_is_refused(tmp_path):
    (outcome,) = processes.run(forgotten, 1, tmp_path)
    assert "memory that is not there any more" in outcome.message
