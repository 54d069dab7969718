"""The engine from the outside: how it starts, what it shows, what it shares, and how it is left."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import isles
from isles.core import handshake
from tests.reference import Tower, same, toy_backward, weights_of

torch.set_num_threads(1)


# ---- starting, being alone, buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(inputs)


def test_buffers_become_the_mean_at_the_end():
    """Statistics are averaged with the islands' weights, counters are island 0's, scratch space is left alone."""

    def island(world):
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(world.rank)
        with isles.DiLoCo(model, optimizer, isles.Method.diloco(), world=world, weight=1.0 + 2 * world.rank):
            for _ in range(5 + world.rank):
                model(torch.randn(16, 4) + world.rank).sum().backward()
            optimizer.step()
            model.scratch.fill_(world.rank)
            own = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return own, {name: buffer.clone() for name, buffer in model.named_buffers()}

    (own_0, final_0), (own_1, final_1) = isles.run_local(island, 2)
    for name in ("norm.running_mean", "norm.running_var"):
        assert not torch.equal(own_0[name], own_1[name])
        torch.testing.assert_close(final_0[name], (own_0[name] + 3 * own_1[name]) / 4)
        assert torch.equal(final_0[name], final_1[name])
    assert (final_0["norm.num_batches_tracked"], final_1["norm.num_batches_tracked"]) == (5, 5)
    assert (float(final_0["scratch"].max()), float(final_1["scratch"].max())) == (0.0, 1.0)


def test_large_buffers_go_in_parts(monkeypatch):
    """As those of a frozen model of many int8 weights."""
    monkeypatch.setattr(handshake, "CHUNK_BYTES", 300)

    def island(world):
        model = Tower(2)
        model.register_buffer("frozen", torch.arange(1000, dtype=torch.int16) * (1 + world.rank))
        model.register_buffer("mask", torch.arange(7) % 2 == world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with isles.DiLoCo(model, optimizer, isles.Method.diloco(), world=world):
            toy_backward(model, world.rank, 1)
            optimizer.step()
        return model.frozen, model.mask

    for frozen, mask in isles.run_local(island, 3):
        assert torch.equal(frozen, torch.arange(1000, dtype=torch.int16))
        assert torch.equal(mask, torch.arange(7) % 2 == 0)


def test_buffers_without_a_value_are_no_obstacle():
    def island(world):
        model = Tower(1)
        model.register_buffer("nothing", torch.empty(0, dtype=torch.int64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with isles.DiLoCo(model, optimizer, isles.Method.diloco(), world=world):
            toy_backward(model, world.rank, 1)
            optimizer.step()
        return model.nothing.numel()

    assert isles.run_local(island, 2) == [0, 0]


def test_sync_initial_gives_everybody_what_island_0_has():
    def island(world):
        model = Tower(2, seed=world.rank)
        model.register_buffer("statistics", torch.full((2,), float(world.rank)))
        model.head.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, isles.Method(fragments=7), world=world, sync_initial=True) as diloco:
            started = weights_of(model), model.statistics.clone()
            with diloco.global_model():
                assert same(weights_of(model), started[0])
        return started

    for weights, statistics in isles.run_local(island, 3):
        assert same(weights, weights_of(Tower(2, seed=0))), "frozen parameters too"
        assert torch.equal(statistics, torch.zeros(2))


def test_alone_without_a_world_it_is_diloco_with_one_island():
    model = Tower(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = isles.Method.diloco(sync_every=1, outer_lr=1.0, outer_momentum=0.0)
    with isles.DiLoCo(model, optimizer, method) as diloco:
        assert (diloco.world.rank, diloco.world.size) == (0, 1)
        for step in range(1, 4):
            toy_backward(model, 0, step)
            optimizer.step()
    assert (diloco.step_count, diloco.stats.sends, diloco.stats.applies, diloco.stats.bytes_sent) == (3, 3, 3, 0)


def test_anchors_share_no_memory_with_the_model():
    model = Tower(2)
    names = [[name] for name, _ in model.named_parameters()]  # one tensor each: nothing that would have to be joined
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = isles.DiLoCo(model, optimizer, isles.Method(sync_every=4, fragments=names))
    before = weights_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    with diloco.global_model():
        assert same(weights_of(model), before)
    saved = diloco.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(8.0)
    assert all(float(value.min()) == 7.0 for value in saved["replica"]["parameters"].values())
    saved["fragments"][0]["anchor"].fill_(9.0)
    with diloco.global_model():
        assert same(weights_of(model), before), "a saved state is a copy"
    diloco.close()


# ---- leaving


def test_an_exception_in_the_block_removes_the_hook_and_stops_the_others():
    optimizers = {}

    def island(world):
        model = Tower(2)
        optimizers[world.rank] = optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, isles.Method(sync_every=2, fragments=2, overlap=1), world=world) as diloco:
            for step in range(1, 20):
                if (world.rank, step) == (1, 6):
                    raise KeyError("the data loader broke")
                toy_backward(model, world.rank, step)
                optimizer.step()
        return diloco

    with pytest.raises(KeyError, match="the data loader broke"):
        isles.run_local(island, 3)
    for optimizer in optimizers.values():
        assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("cut", [KeyboardInterrupt, ZeroDivisionError])
def test_a_step_that_was_interrupted_is_not_forgotten(cut):
    """A Ctrl-C while a round is applied, in a notebook whose user goes on: others have applied it."""
    model = Tower(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    armed = []

    def interrupted(event):
        if armed and event.kind == "apply":
            raise cut

    diloco = isles.DiLoCo(model, optimizer, isles.Method.diloco(sync_every=2), on_event=interrupted)
    for step in (1, 2):
        toy_backward(model, 0, step)
        optimizer.step()
    saved = diloco.state_dict()
    armed.append(True)
    optimizer.step()
    with pytest.raises(cut):
        optimizer.step()
    for again in (optimizer.step, diloco.finish, diloco.state_dict):
        with pytest.raises(RuntimeError, match=f"step 4 was interrupted by {cut.__name__}.*restart all islands"):
            again()
    armed.clear()
    diloco.load_state_dict(saved)
    optimizer.step()
    diloco.finish()
    diloco.close()


def test_after_the_block_the_optimizer_is_the_users_again():
    model = Tower(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with isles.DiLoCo(model, optimizer, isles.Method.diloco(sync_every=1)) as diloco:
        pass
    toy_backward(model, 0, 1)
    optimizer.step()
    assert diloco.step_count == 0
    engine = weakref.ref(diloco)
    del diloco
    gc.collect()
    assert engine() is None, "nothing keeps the engine, and its copy of the model, alive"


def test_a_closed_engine_cannot_be_entered_again():
    """It would let the loop train without any synchronisation, and say nothing."""
    model = Tower(1)
    diloco = isles.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), isles.Method.diloco())
    with diloco:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        diloco.__enter__()


# ---- the global model


@pytest.mark.parametrize("update", ["fresh", "delayed", "eager"])
def test_global_model_shows_the_anchors_and_leaves_no_trace(update):
    method = isles.Method(sync_every=4, fragments=2, update=update, mixing=0.5)
    first_outer_step = {"fresh": 2, "delayed": 6, "eager": 2}[update]

    def island(world):
        model = Tower(2)
        start = weights_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
            for step in range(1, 12):
                toy_backward(model, world.rank, step)
                optimizer.step()
                own, gradients = weights_of(model), [p.grad.clone() for p in model.parameters()]
                inner = copy.deepcopy(optimizer.state_dict())
                with diloco.global_model() as shown:
                    assert shown is model
                    assert same(weights_of(model), start) == (step < first_outer_step)
                    assert not same(weights_of(model), own)
                assert same(weights_of(model), own)
                assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
                assert str(optimizer.state_dict()) == str(inner)
            with pytest.raises(KeyError), diloco.global_model():
                raise KeyError("in the middle of an evaluation")
            assert same(weights_of(model), own)
            with pytest.raises(RuntimeError, match="global_model"), diloco.global_model():
                optimizer.step()
            assert same(weights_of(model), own), "a step in there is refused, and leaves no trace either"

    isles.run_local(island, 2)
