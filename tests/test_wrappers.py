"""The engine among other people's machinery: hooks, optimizer wrappers, torch.compile, CUDA graphs, devices, machines.

It is called after each inner step and at no other time, in the place among the user's hooks in which it was put; it
finds the optimizer inside a wrapper; a compiler goes around it. Where it cannot work it says so in one sentence, before
training or at the first step.
"""

from __future__ import annotations

import copy
import re
import sys

import pytest
import torch
from torch import nn

import isles
from tests import processes
from tests.reference import Tower, same, toy_backward, weights_of

torch.set_num_threads(1)


# ---- hooks

SAVING = {
    "state_dict": lambda diloco: diloco.state_dict(),
    "state_dict of shards": lambda diloco: diloco.state_dict(sharded=True),
    "load_state_dict": lambda diloco: diloco.load_state_dict(diloco.state_dict()),
    "load_state_dict of shards": lambda diloco: diloco.load_state_dict(diloco.state_dict(sharded=True)),
}


@pytest.mark.parametrize("action", SAVING)
@pytest.mark.parametrize("steps_before", [0, 2], ids=["optimizer without state", "optimizer with state"])
def test_saving_and_loading_leave_the_order_of_hooks_alone_and_are_no_steps(action, steps_before):
    """Hooks that log or clamp weights after the engine has mixed them must not come before it once a run was saved."""
    calls = []
    model = Tower(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: calls.append("before"))
    method = isles.Method.diloco(sync_every=1)
    with isles.DiLoCo(model, optimizer, method, on_event=lambda event: calls.append(event.kind)) as diloco:
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for step in range(1, steps_before + 1):
            toy_backward(model, 0, step)
            optimizer.step()
        for number in range(2):  # the second time too
            calls.clear()
            SAVING[action](diloco)
            assert not {"send", "apply"} & set(calls), "it is no step"
            assert (diloco.step_count, diloco.stats.sends) == (steps_before + number,) * 2
            calls.clear()
            toy_backward(model, 0, steps_before + number + 1)
            optimizer.step()
            assert calls == ["before", "send", "apply", "after"]


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_alone_leave_the_optimizer_to_whoever_saves_it(sharded):
    def steps(model, optimizer, numbers):
        for step in numbers:
            toy_backward(model, 0, step)
            optimizer.step()

    method = isles.Method(sync_every=3, fragments=2, overlap=1)
    model, other = Tower(2), Tower(2)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, other)]
    with isles.DiLoCo(model, optimizers[0], method) as diloco, isles.DiLoCo(other, optimizers[1], method) as resumed:
        steps(model, optimizers[0], range(5))
        state = copy.deepcopy(diloco.state_dict(replica="weights", sharded=sharded))
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        resumed.load_state_dict(state)
        assert same(weights_of(other), weights_of(model))
        steps(model, optimizers[0], range(5, 9))
        steps(other, optimizers[1], range(5, 9))
        assert same(weights_of(other), weights_of(model))


def test_a_step_that_was_skipped_counts_and_changes_nothing_else():
    """The same rounds at the same steps as if a step had been taken that leaves the weights alone."""
    trained = []
    for skip in (False, True):
        model = Tower(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with isles.DiLoCo(model, optimizer, isles.Method(sync_every=3, fragments=2, overlap=1)) as diloco:
            for step in range(9):
                toy_backward(model, 0, step)
                if step != 4:
                    optimizer.step()
                elif skip:
                    diloco.skip_step()
                else:
                    optimizer.zero_grad()
                    optimizer.step()
                optimizer.zero_grad()
            assert (diloco.step_count, diloco.stats.sends) == (9, 6)
        trained.append(weights_of(model))
    assert same(*trained)


# ---- optimizer wrappers


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an Optimizer by type, which never calls Optimizer.__init__ and forwards to one that is inside.

    While gradients are accumulated, its step does nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.accumulates = False

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none=True):
        if not self.accumulates:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        if not self.accumulates:
            self.optimizer.step(closure)


def train(world, wrap, start=0, stop=9, state=None):
    """Two of three calls of step() are real ones. Returns the island's weights, the steps counted, and the state."""
    model = Tower(2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = Wrapper(inner) if wrap else inner
    diloco = isles.DiLoCo(model, optimizer, isles.Method(sync_every=3, fragments=2, overlap=1), world=world)
    if state is not None:
        diloco.load_state_dict(state)
    for step in range(start, stop):
        toy_backward(model, world.rank, step)
        accumulates = step % 3 == 0
        if wrap:
            optimizer.accumulates = accumulates
        if wrap or not accumulates:
            optimizer.step()
    weights, saved = weights_of(model), diloco.state_dict()
    diloco.finish()
    diloco.close()
    counted = diloco.step_count
    inner.step()
    assert diloco.step_count == counted, "after close() the optimizer is the user's again"
    return weights, counted, saved


def test_an_optimizer_inside_a_wrapper_is_found_and_its_steps_are_counted():
    plain = isles.run_local(lambda world: train(world, wrap=False), 2)
    wrapped = isles.run_local(lambda world: train(world, wrap=True), 2)
    for (weights, counted, _), (expected, _, _) in zip(wrapped, plain, strict=True):
        assert counted == 6
        assert same(weights, expected)


def test_a_run_with_a_wrapper_is_resumed():
    straight = isles.run_local(lambda world: train(world, wrap=True), 2)
    saved = isles.run_local(lambda world: train(world, wrap=True, stop=5), 2)
    resumed = isles.run_local(lambda world: train(world, wrap=True, start=5, state=saved[world.rank][2]), 2)
    for (weights, counted, _), (expected, _, _) in zip(resumed, straight, strict=True):
        assert counted == 6
        assert same(weights, expected)


@pytest.mark.parametrize("outside_first", [True, False])
def test_a_wrapper_and_what_is_in_it_are_one_optimizer(outside_first):
    """With an engine on each, every step would count twice."""
    model = Tower(1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (Wrapper(inner), inner) if outside_first else (inner, Wrapper(inner))
    diloco = isles.DiLoCo(model, first, isles.Method.diloco())
    with pytest.raises(ValueError, match="already has a DiLoCo"):
        isles.DiLoCo(model, second, isles.Method.diloco())
    diloco.close()
    isles.DiLoCo(model, second, isles.Method.diloco()).close()


class Hollow(torch.optim.Optimizer):
    """An Optimizer by type, and nothing else."""

    def __init__(self) -> None:
        pass


NO_OPTIMIZERS = {
    "None": lambda model: None,
    "a name": lambda model: "adamw",
    "a class": lambda model: torch.optim.AdamW,
    "parameters": lambda model: list(model.parameters()),
    "a scheduler": lambda model: torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=0.1)),
    "a hollow optimizer": lambda model: Hollow(),
    "a wrapper of nothing": lambda model: Wrapper(None),
    "a wrapper of a hollow optimizer": lambda model: Wrapper(Hollow()),
}


def test_what_is_no_optimizer_is_refused_in_one_sentence():
    for kind, make in NO_OPTIMIZERS.items():
        model = Tower(1)
        try:
            isles.DiLoCo(model, make(model), isles.Method.diloco())
            error: Exception | None = None
        except Exception as caught:
            error = caught
        assert isinstance(error, ValueError), f"{kind}: {error!r}"
        assert "optimizer" in str(error), f"{kind}: {error}"
        assert not re.search(r"\n|[.!?]\s", str(error)), f"{kind}: {error}"


# ---- torch.compile and CUDA graphs


def compiled(with_isles):
    """A step that is compiled as a whole: frames that were compiled, graph breaks, steps counted, weights."""
    from torch._dynamo import reset
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backend = CompileCounter()  # runs what it is given as it is, like "eager"

    @torch.compile(backend=backend)
    def step(rows):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    method = isles.Method(sync_every=4, fragments=2, overlap=1)
    diloco = isles.DiLoCo(model, optimizer, method) if with_isles else None
    for _ in range(12):
        step(torch.ones(2, 3))
    counted = diloco and (diloco.step_count, diloco.stats.sends)
    if diloco is not None:
        diloco.close()
    breaks = sum(counters["graph_break"].values())
    reset()
    return backend.frame_count, breaks, counted


def test_a_compiler_does_not_look_into_the_engine():
    """It would compile the engine's arithmetic, again and again, as the number of the step changes."""
    frames, breaks, _ = compiled(with_isles=False)
    frames_with, breaks_with, counted = compiled(with_isles=True)
    assert counted == (12, 6)
    assert frames_with <= frames + 2
    assert breaks_with <= breaks + 2


def test_a_step_that_is_captured_in_a_cuda_graph_is_refused(monkeypatch):
    """Replaying the graph would repeat the kernels of one step, and never call the engine."""
    model = Tower(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = isles.DiLoCo(model, optimizer, isles.Method.diloco(sync_every=100))
    toy_backward(model, 0, 1)
    optimizer.step()
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_initialized", lambda: True)
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"(?i)cuda graph"):
            optimizer.step()
    diloco.close()


# ---- devices, lazy modules, machines


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_fragment_on_two_devices_is_refused_with_what_to_do(fragments):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model[2].to("meta")  # strided fragments: beside model[0] in any case
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="device") as refused:
        isles.DiLoCo(model, optimizer, isles.Method(fragments=fragments))
    assert "meta" in str(refused.value)
    assert re.search("fragments|move|one device|to_empty", str(refused.value)), f"what to do: {refused.value}"


def test_a_lazy_module_that_has_not_run_is_refused_with_what_to_do():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"1\.weight") as refused:
        isles.DiLoCo(model, optimizer, isles.Method.diloco())
    assert re.search("batch|forward", str(refused.value)), "what to do: run one batch through the model first"
    model(torch.ones(1, 2))
    isles.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), isles.Method.diloco()).close()


def test_a_big_endian_machine_is_refused_by_the_engine(monkeypatch):
    model = Tower(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as machine:
        machine.setattr(sys, "byteorder", "big")
        with pytest.raises(ValueError, match="endian"):
            isles.DiLoCo(model, optimizer, isles.Method.diloco())
    isles.DiLoCo(model, optimizer, isles.Method.diloco()).close()


def on_a_big_endian_machine(rank):
    sys.byteorder = "big"
    isles.TorchWorld()


def test_a_big_endian_machine_is_refused_by_a_world_of_processes(tmp_path):
    (outcome,) = processes.run(on_a_big_endian_machine, 1, tmp_path)
    assert outcome.error == "ValueError", outcome.text
    assert "endian" in outcome.message
