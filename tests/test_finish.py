"""finish() keeps every step: what islands have learned since their last send is in the model that they end with.

A run rarely ends on a step at which everything is sent. With sync_every=100 and 60 or 99 steps nothing may have been
sent at all, and a global model that is still the initial one would throw all of the training away.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import isles
from tests.reference import same, weights_of

torch.set_num_threads(1)
EVERY = 100


class Targets(nn.Module):
    """Layers that are to become something; how far each is from it is its loss."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.outside = nn.Linear(4, 4, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.targets = [1 + torch.rand(p.shape, generator=generator) for p in self.parameters()]

    def losses(self):
        return [(p - target).square().mean() for p, target in zip(self.parameters(), self.targets, strict=True)]


def train(world, method, steps):
    """Every island pulls towards the targets, from a side of its own. Returns losses at the start and at the end."""
    model = Targets()
    before = [float(loss) for loss in model.losses()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(world.rank)
    with isles.DiLoCo(model, optimizer, method, world=world, weight=1.0 + world.rank) as diloco:
        for _ in range(steps):
            noise = [0.01 * torch.randn(p.shape, generator=generator) for p in model.parameters()]
            loss = sum(loss * p.numel() / 2 for loss, p in zip(model.losses(), model.parameters(), strict=True))
            (loss + sum((p * n).sum() for p, n in zip(model.parameters(), noise, strict=True))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diloco.step_count == steps
    return before, [float(loss) for loss in model.losses()], weights_of(model)


METHODS = {
    "diloco": isles.Method.diloco(sync_every=EVERY),
    "averaging": isles.Method.diloco(sync_every=EVERY, outer_lr=1.0, outer_momentum=0.0),
    "streaming": isles.Method.streaming(sync_every=EVERY, fragments=4),
    "streaming, long overlap": isles.Method.streaming(sync_every=EVERY, fragments=4, overlap=50),
    "error feedback": isles.Method.streaming(sync_every=EVERY, fragments=4, codec="int4", error_feedback=True),
}
LATE_BY_ROUNDS = {
    "delayed": isles.Method.delayed(sync_every=EVERY, fragments=2),
    "eager": isles.Method.eager(sync_every=EVERY, fragments=2),
}


def check_learned(method, steps, factor):
    results = isles.run_local(lambda world: train(world, method, steps), 2)
    for before, after, weights in results:
        assert same(weights, results[0][2]), "all islands end with the same model"
        for layer, (at_first, at_last) in enumerate(zip(before, after, strict=True)):
            assert at_last < at_first / factor, f"layer {layer}: {at_first} at the start, {at_last} at the end"


@pytest.mark.parametrize("steps", [60, 99])
@pytest.mark.parametrize("name", METHODS)
def test_no_part_of_the_model_is_left_as_it_was_at_the_start(name, steps):
    check_learned(METHODS[name], steps, factor=4)


@pytest.mark.parametrize("steps", [60, 99])
@pytest.mark.parametrize("name", LATE_BY_ROUNDS)
def test_what_is_late_by_rounds_is_not_lost(name, steps):
    """A fragment that was sent and went back to the start has learned all of it once more at the end. By definition
    both count, so the model goes past its target; but it ends nearer to it than it was.
    """
    check_learned(LATE_BY_ROUNDS[name], steps, factor=1)


@pytest.mark.parametrize("steps", [60, 99])
def test_an_island_alone_that_only_averages_ends_with_the_weights_it_has_trained(steps):
    """All numbers are multiples of 2**-12 and smaller than 4, so their differences are exact in fp32: nothing but a
    lost step could make a difference.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-4096, 4096, parameter.shape) / 4096)
    start = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = isles.Method.diloco(sync_every=EVERY, outer_lr=1.0, outer_momentum=0.0, codec="fp32")
    with isles.DiLoCo(model, optimizer, method):
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.randint(-64, 64, parameter.shape) / 4096
            optimizer.step()
        trained = weights_of(model)
    assert not same(trained, start)
    assert same(weights_of(model), trained)


def test_an_island_alone_that_only_averages_ends_with_its_weights_whatever_they_are():
    """The same with any numbers: to a rounding of fp32, whichever way the last step takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    method = isles.Method.diloco(sync_every=EVERY, outer_lr=1.0, outer_momentum=0.0, codec="fp32")
    with isles.DiLoCo(model, optimizer, method):
        for _ in range(60):
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = weights_of(model)
    torch.testing.assert_close(weights_of(model), trained, rtol=1e-6, atol=1e-7)


def test_finish_without_a_with_block_and_without_a_step():
    """finish() is for those who do not use the block, too; where nothing was trained nothing changes."""
    model = Targets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    method = isles.Method.diloco(sync_every=EVERY, outer_lr=1.0, outer_momentum=0.0)
    diloco = isles.DiLoCo(model, optimizer, method)
    diloco.finish()
    assert same(weights_of(model), weights_of(Targets()))
    for _ in range(3):
        sum(model.losses()).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = weights_of(model)
    diloco.finish()
    diloco.close()
    torch.testing.assert_close(weights_of(model), trained, rtol=1e-6, atol=1e-7)


# ---- the clock


def test_the_clock_is_the_number_of_steps_during_and_after_training():
    def island(world):
        model = Targets()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        method = isles.Method.streaming(sync_every=3, fragments=2, overlap=2)
        with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
            assert diloco.clock == diloco.step_count == 0
            for step in range(1, 6):
                sum(model.losses()).backward()
                optimizer.step()
                assert diloco.clock == diloco.step_count == step
            saved = diloco.state_dict()
            optimizer.step()
            assert diloco.clock == 6
            diloco.load_state_dict(saved)
            assert diloco.clock == diloco.step_count == 5
        assert diloco.clock == diloco.step_count == 5

    isles.run_local(island, 2)
