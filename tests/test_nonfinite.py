"""An island whose weights are no longer finite harms nobody: it finds out before it sends anything, sits out the round,
goes on from the global weights, and takes part again.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import isles
from tests.reference import Tower, same, toy_backward, weights_of
from tests.test_stats import Recording

torch.set_num_threads(1)
ASTRAY = 1
"""The island to which it happens, the second of three."""
EVERY, ROUNDS = 4, 4


def all_finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in weights.values())


def spoil(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model.layers[0].weight[3, 3] = value


def train(
    world: Any, method: isles.Method, value: float | None = None, *, at: int = 2, name: int | None = None
) -> dict[str, Any]:
    """Trains; the island that goes astray has `value` in its weights after step `at`. `name` is whose data it has."""
    model, recording, rank = Tower(2), Recording(world), world.rank if name is None else name
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights_by_step, anchors_by_step = [], []
    with isles.DiLoCo(model, optimizer, method, world=recording) as diloco:
        for step in range(1, ROUNDS * EVERY + 1):
            toy_backward(model, rank, step)
            if not all_finite(weights_of(model)):
                for parameter in model.parameters():  # as a backward pass would: one NaN spoils every gradient
                    parameter.grad.fill_(math.nan)
            optimizer.step()
            if rank == ASTRAY and step == at and value is not None:
                spoil(model, value)
            weights_by_step.append(weights_of(model))
            with diloco.global_model():
                anchors_by_step.append(weights_of(model))
    moments = {
        f"{key} {number}": value
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    return {
        "weights": weights_by_step,
        "anchors": anchors_by_step,
        "final": weights_of(model),
        "moments": moments,
        "payloads": recording.payloads,
        "stats": diloco.stats,
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("update", ["fresh", "delayed", "eager"])
@pytest.mark.parametrize("codec", ["fp32", "e3m0"])
def test_it_sits_out_the_round_and_comes_back(value, update, codec, caplog):
    method = isles.Method(sync_every=EVERY, fragments=1, update=update, codec=codec, error_feedback=True)
    with caplog.at_level(logging.WARNING, logger="isles"):
        results = isles.run_local(lambda world: train(world, method, value), 3)

    for rank, result in enumerate(results):
        healthy = result["weights"] if rank != ASTRAY else result["weights"][EVERY - 1 :]
        assert all(all_finite(weights) for weights in healthy + result["anchors"] + [result["final"]])
        assert same(result["final"], results[0]["final"])
        assert result["stats"].nonfinite_rounds == (1 if rank == ASTRAY else 0)
        rounds = [payload for payload in result["payloads"] if payload.round >= 1]
        for payload in rounds:
            seen = payload.codec.decode(payload.body, payload.numel)
            assert torch.isfinite(seen).all(), "it was found before anything was sent"
            assert payload.weight == (0.0 if rank == ASTRAY and payload.round == 1 else 1.0)
        assert len(rounds) == ROUNDS
    assert all_finite(results[ASTRAY]["moments"])
    assert any(f"island {ASTRAY}" in record.getMessage() for record in caplog.records)
    assert all("island 0" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("codec", ["fp32", "e3m0"])
def test_the_others_go_on_as_if_it_were_not_there(codec):
    method = isles.Method(sync_every=EVERY, fragments=1, codec=codec)
    three = isles.run_local(lambda world: train(world, method, math.nan), 3)
    two = isles.run_local(lambda world: train(world, method, name=2 * world.rank), 2)
    for step in range(2 * EVERY - 1):  # in the second round it is back
        assert same(three[0]["weights"][step], two[0]["weights"][step])
        assert same(three[2]["weights"][step], two[1]["weights"][step])
    assert not same(three[0]["weights"][2 * EVERY - 1], two[0]["weights"][2 * EVERY - 1])


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("at", [2, 3, 4, 5, 6])
def test_with_fragments_and_overlap_whenever_it_happens(overlap, mixing, at):
    method = isles.Method(sync_every=EVERY, fragments=3, overlap=overlap, mixing=mixing, codec="e3m0")
    results = isles.run_local(lambda world: train(world, method, math.nan, at=at), 3)
    for rank, result in enumerate(results):
        assert all(all_finite(anchors) for anchors in result["anchors"])
        assert all(same(mine, other) for mine, other in zip(result["anchors"], results[0]["anchors"], strict=True))
        settled = result["weights"] if rank != ASTRAY else result["weights"][at + EVERY + overlap :]
        assert all(all_finite(weights) for weights in settled), "all fragments are healed within a period"
        assert same(result["final"], results[0]["final"])
    assert results[ASTRAY]["stats"].nonfinite_rounds >= 1
    assert all_finite(results[ASTRAY]["moments"])


def test_every_round_that_is_sat_out_is_counted():
    method = isles.Method(sync_every=EVERY, fragments=3)
    result = isles.run_local(lambda world: train(world, method, math.nan), 3)[ASTRAY]
    rounds_sat_out = sum(payload.weight == 0 for payload in result["payloads"] if payload.round >= 1)
    assert result["stats"].nonfinite_rounds == rounds_sat_out == 3


def test_everybody_astray_at_once_goes_back_to_the_global_weights():
    method = isles.Method(sync_every=2, fragments=1)

    def island(world):
        model = Tower(1)
        start = weights_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, method, world=world):
            for step in (1, 2):
                toy_backward(model, world.rank, step)
                optimizer.step()
                if step == 1:
                    model.head.weight.data.fill_(math.nan)
            assert same(weights_of(model), start)

    isles.run_local(island, 2)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "e3m0"])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_finite_weights_so_far_away_that_the_difference_is_not(codec, error_feedback):
    """The weights are finite, the outer gradient is not: 3e38 - (-3e38)."""
    method = isles.Method(sync_every=1, fragments=1, codec=codec, error_feedback=error_feedback)

    def island(world):
        model = nn.Linear(4, 4, bias=False)
        nn.init.constant_(model.weight, 3e38)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
            if world.rank == 0:
                model.weight.data[0, 0] = -3e38
            optimizer.step()
            return weights_of(model), diloco.stats.nonfinite_rounds

    (one, counted_one), (two, counted_two) = isles.run_local(island, 2)
    for weights in (one, two):  # island 1 has not moved, and island 0 does not count
        assert torch.equal(weights["weight"], torch.full((4, 4), 3e38))
    assert (counted_one, counted_two) == (1, 0)


def test_an_optimizer_with_an_overflown_second_moment_recovers_too():
    """A gradient of 1e25 overflows Adam's second moment, not the first. Healing one without the other would turn a
    frozen weight into a step of first moment / epsilon, finite and enormous, which the other islands would average.
    """
    method = isles.Method(sync_every=2, fragments=1)

    def island(world):
        model = Tower(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        largest = 0.0
        with isles.DiLoCo(model, optimizer, method, world=world):
            for step in range(1, 13):
                toy_backward(model, world.rank, step)
                if (world.rank, step) == (ASTRAY, 1):
                    model.head.weight.grad[0, 0] = 1e25
                if (world.rank, step) == (ASTRAY, 2):
                    model.layers[0].weight.grad[0, 0] = math.nan
                optimizer.step()
                largest = max(largest, *(float(p.detach().abs().max()) for p in model.parameters()))
        return largest

    for largest in isles.run_local(island, 3):
        assert largest < 10.0


def test_batch_norm_statistics_of_an_island_astray_are_left_out_of_the_mean():
    def island(world):
        model = nn.BatchNorm1d(2)
        model.running_mean.fill_([1.0, math.nan, 3.0][world.rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, isles.Method.diloco(), world=world):
            pass
        return model.running_mean.clone()

    for mean in isles.run_local(island, 3):
        assert torch.equal(mean, torch.full((2,), 2.0))


@pytest.mark.parametrize("weight", [1e39, 1e-50])
def test_weights_of_islands_matter_only_relative_to_each_other(weight):
    """They may be numbers of tokens or fractions of a data set; the mean is in fp32 and must not overflow from them."""
    method = isles.Method(sync_every=2, fragments=1)

    def island(world, scale):
        model = Tower(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, method, world=world, weight=scale * (1 + world.rank)):
            for step in range(1, 5):
                toy_backward(model, world.rank, step)
                optimizer.step()
        return weights_of(model)

    plain = isles.run_local(lambda world: island(world, 1.0), 2)
    for result in isles.run_local(lambda world: island(world, weight), 2):
        assert all_finite(result)
        torch.testing.assert_close(result, plain[0], rtol=1e-5, atol=1e-6)
