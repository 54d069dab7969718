"""What must be true of the engine whatever the settings, proven by comparison with something simpler.

every step averaged, plain SGD      is data-parallel SGD
one fragment, no overlap            is DiLoCo, ten lines
the outer optimizer                 is torch.optim.SGD
any setting of any knob             is the reference, written from the papers' formulas (tests/reference.py)
fresh and delayed anchors           are the same on all islands at every step
eager anchors                       become the same once updates stop
finish()                            leaves one model
global_model()                      shows the anchors and leaves no trace
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import isles
from isles.core.fragments import cut
from isles.core.outer import OuterSGD
from tests.reference import Reference, Tower, largest_difference, same, toy_backward, toy_inner_step, weights_of
from tests.starts import dense_starts

torch.set_num_threads(1)
CODECS = sorted(isles.codecs)


def data_for(island: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * island + step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))


def backward(model: nn.Module, island: int, step: int) -> None:
    inputs, targets = data_for(island, step)
    nn.functional.mse_loss(model(inputs), targets).backward()


# ---- special cases that are known algorithms


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 3.0)])
def test_averaging_after_every_step_is_data_parallel_sgd(weights):
    steps, islands = 12, len(weights)
    method = isles.Method(sync_every=1, fragments=1, outer_lr=1.0, outer_momentum=0.0)

    def island(world):
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        with isles.DiLoCo(model, optimizer, method, world=world, weight=weights[world.rank]):
            for step in range(steps):
                backward(model, world.rank, step)
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(model)

    parallel = small_net()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.3)
    for step in range(steps):
        for rank in range(islands):
            inputs, targets = data_for(rank, step)
            loss = nn.functional.mse_loss(parallel(inputs), targets)
            (loss * weights[rank] / sum(weights)).backward()
        optimizer.step()
        optimizer.zero_grad()

    # Not bit for bit: here gradients are averaged, there weights, and the two round differently.
    for result in isles.run_local(island, islands):
        assert largest_difference(result, weights_of(parallel)) < 2e-6


def test_one_fragment_without_overlap_is_diloco_in_ten_lines():
    islands, rounds, every = 3, 4, 5

    def island(world):
        model = small_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        with isles.DiLoCo(model, optimizer, isles.Method.diloco(sync_every=every), world=world):
            for step in range(rounds * every):
                backward(model, world.rank, step)
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(model)

    models = [small_net() for _ in range(islands)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    anchors = [p.detach().clone() for p in models[0].parameters()]
    velocities = [torch.zeros_like(anchor) for anchor in anchors]
    for step in range(rounds * every):
        for rank in range(islands):
            backward(models[rank], rank, step)
            optimizers[rank].step()
            optimizers[rank].zero_grad()
        if (step + 1) % every == 0:
            for anchor, velocity, *replicas in zip(anchors, velocities, *(m.parameters() for m in models), strict=True):
                delta = sum(anchor - theta.detach() for theta in replicas) / islands
                velocity.mul_(0.9).add_(delta)
                anchor.sub_((delta + velocity * 0.9) * 0.7)
                for theta in replicas:
                    theta.data.copy_(anchor)

    for result in isles.run_local(island, islands):
        assert same(result, weights_of(models[0]))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False), (0.0, True)], ids=str)
def test_outer_optimizer_is_the_one_of_torch(momentum, nesterov):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    outer = OuterSGD(momentum=momentum > 0, nesterov=nesterov)
    anchor, theirs = start.clone(), nn.Parameter(start.clone())
    velocity = outer.init(anchor)
    sgd = torch.optim.SGD([theirs], lr=0.4, momentum=momentum, nesterov=nesterov and momentum > 0)
    for _ in range(20):
        delta = torch.randn(1000, generator=generator)
        before = delta.clone()
        outer.update(anchor, delta, velocity, 0.4, momentum)
        theirs.grad = before
        sgd.step()
        assert torch.equal(delta, before), "the mean is shared by all islands, so it must be left alone"
        # Not bit for bit: torch fuses multiply and add where the processor can.
        torch.testing.assert_close(anchor, theirs.detach(), rtol=1e-5, atol=1e-5)


# ---- every setting of every knob, against the reference


@st.composite
def any_method(draw, updates: tuple[str, ...]):
    """Knobs, the number of layers of the model, the islands' weights, and the form of the exchange."""
    update = draw(st.sampled_from(updates))
    every = draw(st.integers(1, 12 if update == "fresh" else 5))
    fragments = draw(st.integers(1, 6))
    knobs = {
        "sync_every": every,
        "fragments": fragments,
        "pattern": draw(st.sampled_from(["strided", "sequential"])),
        "offsets": draw(st.none() | st.lists(st.integers(0, every - 1), min_size=fragments, max_size=fragments)),
        "overlap": draw(st.integers(0, every - 1)) if update == "fresh" else 0,
        "mixing": draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        "codec": draw(st.sampled_from(CODECS)),
        "rounding": draw(st.sampled_from(["nearest", "stochastic"])),
        "error_feedback": draw(st.booleans()),
        "outer_lr": draw(st.sampled_from([0.4, 1.0])),
        "outer_momentum": draw(st.sampled_from([0.0, 0.9])),
        "nesterov": draw(st.booleans()),
        "dense_start": draw(dense_starts(every, most_steps=12)),
        "warmup_rounds": draw(st.sampled_from([0, 0, 2, 5])),
        "update": update,
        "delay_rounds": 1 if update == "fresh" else draw(st.integers(1, 2)),
    }
    weights = draw(st.lists(st.sampled_from([1.0, 2.0, 0.3]), min_size=1, max_size=4))
    form = draw(st.sampled_from(["all-gather", "reduce-scatter"]))
    return knobs, draw(st.integers(1, 4)), weights, form


def case(layers: int = 3, weights: tuple[float, ...] = (1.0, 2.0), form: str = "all-gather", **knobs):
    """An example that must be in every sweep, whatever hypothesis thinks of."""
    return {"outer_momentum": 0.9, **knobs}, layers, list(weights), form


def check_against_the_reference(knobs, layers, weights, form) -> None:
    method = isles.Method(**knobs)
    rounds = 3 if method.update == "fresh" else 3 + method.delay_rounds
    steps = sum(r * h for r, h in method.dense_start) + rounds * method.sync_every + method.overlap + 1

    def island(world):
        model = Tower(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        weights_by_step, anchors_by_step = [], []
        with isles.DiLoCo(model, optimizer, method, world=world, weight=weights[world.rank]) as diloco:
            for step in range(1, steps + 1):
                toy_backward(model, world.rank, step)
                optimizer.step()
                weights_by_step.append(weights_of(model))
                with diloco.global_model():
                    anchors_by_step.append(weights_of(model))
        return weights_by_step, anchors_by_step, weights_of(model)

    model = Tower(layers)
    fragments = [fragment.names for fragment in cut(model, method)]
    offsets = method.offsets or [p * method.sync_every // len(fragments) for p in range(len(fragments))]
    codec = dataclasses.replace(isles.codecs[method.codec], stochastic=method.rounding == "stochastic")
    if method.error_feedback:
        codec = codec.contracting()
    shared = ("sync_every", "overlap", "mixing", "error_feedback", "outer_lr", "outer_momentum", "nesterov", "update")
    shared += ("dense_start", "warmup_rounds")
    reference = Reference(
        start=weights_of(model),
        inner_step=toy_inner_step,
        fragments=fragments,
        offsets=offsets,
        weights=weights,
        codec=codec,
        delay_rounds=method.delay_rounds,
        reencode_mean=form == "reduce-scatter" and len(weights) > 1,
        **{name: getattr(method, name) for name in shared},
    )
    results = isles.run_local(island, len(weights), reduction=form)
    for step, expected in enumerate(reference.run(steps), start=1):
        for rank, (weights_by_step, anchors_by_step, _) in enumerate(results):
            assert same(weights_by_step[step - 1], expected[rank]), f"island {rank} leaves the reference at step {step}"
            if method.update != "eager":
                assert same(anchors_by_step[step - 1], results[0][1][step - 1]), f"anchors part at step {step}"
    end = reference.finish()
    for _, _, final in results:
        assert same(final, results[0][2]), "finish() has to leave the same model everywhere"
        # Eager anchors are averaged, but only if they differ: that may be a bit in the last place away from the mean.
        assert largest_difference(final, end) <= (1e-6 if method.update == "eager" else 0.0)


SWEEP = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False)


@settings(SWEEP, max_examples=80)
@given(any_method(("fresh",)))
@example(case(sync_every=7, fragments=3, overlap=6, mixing=0.5))  # no multiple, and all fragments in flight at once
@example(case(sync_every=4, fragments=6, layers=2, overlap=3, codec="e3m0"))  # more fragments than there are parts
@example(case(sync_every=1, fragments=4, codec="int8"))
@example(case(sync_every=6, fragments=4, overlap=5, dense_start=[(2, 1), (3, 3)], warmup_rounds=3, mixing=0.25))
@example(case(sync_every=6, fragments=2, offsets=(5, 5), overlap=2, error_feedback=True, codec="int4"))
def test_streaming_is_the_reference(settings_of_a_run):
    check_against_the_reference(*settings_of_a_run)


@settings(SWEEP, max_examples=60)
@given(any_method(("delayed", "eager")))
@example(case(sync_every=3, fragments=3, update="eager", codec="e3m0", mixing=0.5, weights=(1.0, 2.0, 0.3)))
@example(case(sync_every=2, fragments=5, update="eager", delay_rounds=2, codec="e3m0", error_feedback=True))
@example(case(sync_every=3, fragments=2, update="delayed", delay_rounds=2, form="reduce-scatter", weights=(1.0,) * 4))
def test_delayed_and_eager_are_the_reference(settings_of_a_run):
    check_against_the_reference(*settings_of_a_run)


# ---- agreement of the islands


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("delay_rounds", "mixing", "error_feedback"), [(1, 0.0, False), (2, 0.0, False), (1, 0.5, False), (1, 0.0, True)]
)
def test_eager_anchors_agree_once_updates_stop(codec, delay_rounds, mixing, error_feedback):
    """Own contributions come early and the others' late, but it is the same sum in the end."""
    method = isles.Method(
        sync_every=2,
        fragments=2,
        update="eager",
        delay_rounds=delay_rounds,
        mixing=mixing,
        codec=codec,
        error_feedback=error_feedback,
        outer_momentum=0.5,
    )
    busy, quiet = 12, 100

    def island(world):
        model = Tower(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, method, world=world, weight=1.0 + world.rank) as diloco:
            for step in range(1, busy + quiet + 1):
                toy_backward(model, world.rank, step)
                if step > busy:
                    optimizer.zero_grad(set_to_none=False)
                optimizer.step()
                if step == busy:
                    with diloco.global_model():
                        while_busy = weights_of(model)
            with diloco.global_model():
                at_rest = weights_of(model)
        return while_busy, at_rest

    (busy_0, rest_0), (busy_1, rest_1), (_, rest_2) = isles.run_local(island, 3)
    assert largest_difference(busy_0, busy_1) > 1e-2, "islands that never differed prove nothing"
    # Not bit for bit: the islands add the same numbers in different orders.
    assert largest_difference(rest_0, rest_1) < 1e-5
    assert largest_difference(rest_0, rest_2) < 1e-5
