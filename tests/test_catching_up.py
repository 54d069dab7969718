"""Islands that are left out of a round, or learn of rounds they had no part in, follow the global model.

No world of today leaves anybody out. A world that does is played here: it wraps another one and changes what a round's
answer says about this island (`Mean.included`, `Mean.missed`).
"""

import dataclasses

import pytest
import torch

import isles
from isles.wire.world import Mean, MissedRound
from tests.reference import Tower, same, toy_backward, weights_of

torch.set_num_threads(1)


class Handle:
    def __init__(self, handle, change):
        self.handle, self.change = handle, change
        self.bytes_sent, self.bytes_received = handle.bytes_sent, handle.bytes_received

    def wait(self):
        return self.change(self.handle.wait())


class Elastic:
    """A world whose answers `change(payload)` may change."""

    def __init__(self, world, change):
        self.world, self.change = world, change
        self.rank, self.size, self.gather = world.rank, world.size, world.gather

    def start(self, payload):
        return Handle(self.world.start(payload), lambda mean: self.change(payload, mean))


def run(method, steps, change=lambda payload, mean: mean, watch=lambda diloco, model: None, events=None):
    model = Tower(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    world = Elastic(isles.LocalWorld.alone(), change)
    on_event = None if events is None else events.append
    diloco = isles.DiLoCo(model, optimizer, method, world=world, on_event=on_event)
    for step in range(1, steps + 1):
        toy_backward(model, 0, step)
        optimizer.step()
        watch(diloco, model)
    return diloco, model


def global_weights(diloco, model):
    with diloco.global_model():
        return weights_of(model)


@pytest.mark.parametrize("overlap", [0, 2])
def test_an_island_that_was_left_out_follows_the_global_model_and_keeps_what_it_learned(overlap):
    """The others' mean moves the anchor; the distance between anchor and weights, what nobody has counted, stays."""
    method = isles.Method(sync_every=4, fragments=1, overlap=overlap, mixing=0.5)
    others = torch.full((sum(p.numel() for p in Tower(2).parameters()),), 0.25)

    def left_out(payload, mean):
        return Mean(others, {1: 1.0, 2: 1.0}, included=False)

    events = []
    diloco, model = run(method, 3 + overlap, left_out, events=events)
    ahead = {
        n: w - g for (n, w), g in zip(weights_of(model).items(), global_weights(diloco, model).values(), strict=True)
    }
    toy_backward(model, 0, 4 + overlap)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    diloco.optimizer.step()
    for (name, weight), anchor in zip(weights_of(model).items(), global_weights(diloco, model).values(), strict=True):
        torch.testing.assert_close(weight - anchor, ahead[name] - gradients[name])
        # One Nesterov step from the start: lr (1 + mu) times the mean.
        torch.testing.assert_close(anchor, dict(Tower(2).named_parameters())[name].detach() - 0.4 * 1.9 * 0.25)
    assert (diloco.stats.excluded_rounds, diloco.stats.catch_up_rounds, diloco.stats.islands) == (1, 0, 2)
    assert [event.kind for event in events] == ["send", "apply", "excluded"]
    assert diloco.clock == diloco.step_count == 4 + overlap


def test_missed_rounds_are_applied_in_order_before_the_one_that_is_due():
    """An island that is told of two rounds of the other fragment ends with the anchors of one that was in them."""
    method = isles.Method(sync_every=4, fragments=2)
    sizes = {}
    diloco, _ = run(method, 0)
    for index, fragment in enumerate(diloco.fragments):
        sizes[index] = fragment.numel
    rounds = [torch.full((sizes[0],), value) for value in (0.5, -0.125)]

    def catching_up(payload, mean):
        if (payload.fragment, payload.round) != (1, 1):
            return mean
        missed = tuple(MissedRound(0, n, Mean(values, {1: 1.0}, included=False)) for n, values in enumerate(rounds))
        return dataclasses.replace(mean, missed=missed)

    events = []
    diloco, model = run(method, 2, catching_up, events=events)
    anchor = torch.cat(
        [p.detach().reshape(-1) for n, p in Tower(2).named_parameters() if n in diloco.fragments[0].names]
    )
    velocity = torch.zeros_like(anchor)
    for mean in rounds:
        velocity = 0.9 * velocity + mean
        anchor = anchor - 0.4 * (mean + 0.9 * velocity)
    shown = global_weights(diloco, model)
    torch.testing.assert_close(torch.cat([shown[name].reshape(-1) for name in diloco.fragments[0].names]), anchor)
    assert (diloco.stats.catch_up_rounds, diloco.stats.excluded_rounds) == (2, 0)
    assert [event.kind for event in events] == ["send", "apply", "catch_up", "catch_up"]


def test_who_took_part_changes_nothing_for_those_who_did():
    method = isles.Method.streaming(sync_every=3, fragments=2)
    plain, changed = (
        run(method, 9, change)[1] for change in (lambda _, mean: mean, lambda _, mean: Mean(*_fields(mean)))
    )
    assert same(weights_of(plain), weights_of(changed))


def _fields(mean):
    return mean.values, mean.weights, mean.included, mean.missed


@pytest.mark.parametrize("pattern", ["every other", "the first", "all but the last ones"])
@pytest.mark.parametrize(
    "method",
    [
        isles.Method(sync_every=4, fragments=2, outer_lr=1.0, outer_momentum=0.0),
        isles.Method.delayed(sync_every=4, fragments=2, outer_lr=1.0, outer_momentum=0.0, codec="fp32"),
        isles.Method.delayed(sync_every=4, fragments=2, delay_rounds=2, outer_lr=1.0, outer_momentum=0.0, codec="fp32"),
    ],
    ids=["fresh", "delayed", "two rounds late"],
)
def test_what_an_island_learns_is_counted_once_whatever_it_was_left_out_of(method, pattern):
    """The others stand still, and gradients are constant: what is learned is what all steps have learned."""
    excluded = {
        "every other": lambda number: number % 2 == 0,
        "the first": lambda number: number == 1,
        "all but the last ones": lambda number: True,
    }[pattern]

    def sometimes(payload, mean):
        if payload.step > 20 or not excluded(payload.round):
            return mean
        return Mean(torch.zeros_like(mean.values), {1: 1.0}, included=False)

    model = Tower(2)
    start = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    world = Elastic(isles.LocalWorld.alone(), sometimes)
    with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
        for _ in range(30):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 2.0**-6)
            optimizer.step()
    assert diloco.stats.excluded_rounds > 0
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, start[name] - 30 * 2.0**-6, rtol=0, atol=1e-5)
