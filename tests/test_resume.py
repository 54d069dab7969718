"""A resumed run is the same run: saved after any step, loaded into new objects, it goes on bit for bit as if it had
never stopped. Rounds in flight, eager contributions, what a codec lost and Adam's moments all come back.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import isles
from tests.reference import Tower, same, toy_backward, weights_of

torch.set_num_threads(1)
ISLANDS, STEPS = 2, 11

METHODS = {
    "diloco": isles.Method.diloco(sync_every=4),
    "streaming, all in flight": isles.Method.streaming(sync_every=5, fragments=3, overlap=4),
    "streaming, stochastic, error feedback": isles.Method.streaming(
        sync_every=4, fragments=2, rounding="stochastic", error_feedback=True, codec="int4"
    ),
    "random-drop, error feedback": isles.Method(
        sync_every=3, fragments=2, overlap=2, codec="random-drop", error_feedback=True
    ),
    "gradual": isles.Method.gradual(sync_every=3, fragments=2, dense_start=[(2, 1), (1, 2)], warmup_rounds=2),
    "delayed": isles.Method.delayed(sync_every=3, fragments=2),
    "eager, gradual": isles.Method.eager(sync_every=3, fragments=2, dense_start=[(2, 2)], warmup_rounds=2),
    "delayed twice, mixing": isles.Method.delayed(sync_every=2, fragments=2, delay_rounds=2, mixing=0.3),
    "eager": isles.Method.eager(sync_every=3, fragments=2),
    "eager twice, error feedback": isles.Method.eager(
        sync_every=2, fragments=5, delay_rounds=2, error_feedback=True, mixing=0.5
    ),
}


class Normed(Tower):
    """With statistics that change in training and belong to the island."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("statistics", torch.zeros(4))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))


class Island:
    """Everything that a process would have in memory, new."""

    def __init__(self, world: Any, method: isles.Method, model: nn.Module | None = None) -> None:
        self.world = world
        self.model = Normed() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.diloco = isles.DiLoCo(self.model, self.optimizer, method, world=world, weight=1.0 + world.rank)

    def train(self, until: int) -> list[dict[str, torch.Tensor]]:
        """Goes on to a step, then says what the weights were after each."""
        trajectory = []
        for step in range(self.diloco.step_count + 1, until + 1):
            toy_backward(self.model, self.world.rank, step)
            self.optimizer.step()
            if isinstance(self.model, Normed):
                self.model.statistics += step * (1 + self.world.rank)
                self.model.batches += 1
            trajectory.append(weights_of(self.model))
        return trajectory

    def finish(self) -> dict[str, Any]:
        self.diloco.finish()
        self.diloco.close()
        totals = {name: value for name, value in dict(self.diloco.stats).items() if name != "wait_seconds"}
        return {**totals, **{name: value.clone() for name, value in self.model.state_dict().items()}}


def through_a_file(state: Any) -> Any:
    """As a checkpoint goes: nothing but tensors and plain values gets through with weights_only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(torch.as_tensor(one[key] == other[key]).all()) for key in one)


def never_stopping(method: isles.Method) -> list[tuple[list[dict[str, torch.Tensor]], dict[str, Any]]]:
    def island(world):
        island = Island(world, method)
        return island.train(STEPS), island.finish()

    return isles.run_local(island, ISLANDS)


@pytest.mark.parametrize("replica", [True, False], ids=["with replica", "model and optimizer saved by the user"])
@pytest.mark.parametrize("name", METHODS)
def test_resuming_after_any_step_is_never_stopping(name, replica):
    method = METHODS[name]
    expected = never_stopping(method)

    for stop in range(STEPS + 1):

        def before(world, stop=stop):
            island = Island(world, method)
            island.train(stop)
            state = {"isles": island.diloco.state_dict(replica=replica)}
            if not replica:
                state |= {"model": island.model.state_dict(), "optimizer": island.optimizer.state_dict()}
            island.diloco.close()
            return through_a_file(state)

        checkpoints = isles.run_local(before, ISLANDS)

        def after(world, checkpoints=checkpoints):
            island, state = Island(world, method), checkpoints[world.rank]
            if not replica:
                island.model.load_state_dict(state["model"])
                island.optimizer.load_state_dict(state["optimizer"])
            island.diloco.load_state_dict(state["isles"])
            return island.train(STEPS), island.finish()

        for rank, (trajectory, final) in enumerate(isles.run_local(after, ISLANDS)):
            for step, weights in enumerate(trajectory, start=stop + 1):
                assert same(weights, expected[rank][0][step - 1]), f"stopped after {stop}, island {rank}, step {step}"
            assert equal(final, expected[rank][1]), f"stopped after {stop}, island {rank}, at the end"


@pytest.mark.parametrize("name", METHODS)
def test_saving_changes_nothing_and_can_be_loaded_back_into_the_same_run(name):
    """Saving waits for what is in flight, which must not change what becomes of it; and a run can go back in time."""
    method = METHODS[name]

    def island(world):
        island = Island(world, method)
        trajectory, saved = [], None
        for step in range(1, STEPS + 1):
            trajectory += island.train(step)
            state = island.diloco.state_dict()
            saved = state if step == 4 else saved
        island.diloco.load_state_dict(saved)
        return trajectory, island.train(STEPS), island.finish()

    expected = never_stopping(method)
    for rank, (trajectory, second_time, final) in enumerate(isles.run_local(island, ISLANDS)):
        assert all(same(weights, expected[rank][0][i]) for i, weights in enumerate(trajectory))
        assert all(same(weights, expected[rank][0][4 + i]) for i, weights in enumerate(second_time))
        assert equal(final, expected[rank][1])


def test_what_went_astray_is_remembered():
    """Saved between the moment an island is healed and the moment its other fragments sit out their rounds."""
    method = isles.Method(sync_every=6, fragments=3, overlap=1)

    def broken(world):
        island = Island(world, method)
        island.train(1)
        if world.rank == 1:
            for parameter in island.model.parameters():
                parameter.data.fill_(float("nan"))
        island.train(3)  # fragment 1 is sent after step 2: all fragments are reset then
        return island

    def through(world):
        island = broken(world)
        return island.train(STEPS), island.finish()

    def stopped(world):
        island = broken(world)
        return through_a_file(island.diloco.state_dict())

    expected, checkpoints = isles.run_local(through, ISLANDS), isles.run_local(stopped, ISLANDS)

    def resumed(world):
        island = Island(world, method)
        island.diloco.load_state_dict(checkpoints[world.rank])
        return island.train(STEPS), island.finish()

    for (trajectory, final), (expected_trajectory, expected_final) in zip(
        isles.run_local(resumed, ISLANDS), expected, strict=True
    ):
        assert all(same(*pair) for pair in zip(trajectory, expected_trajectory, strict=True))
        assert equal(final, expected_final)


# ---- what must not pass


def checkpoint(world: Any, method: isles.Method, steps: int) -> dict[str, Any]:
    island = Island(world, method)
    island.train(steps)
    return island.diloco.state_dict()


@pytest.mark.parametrize("name", ["diloco", "streaming, all in flight", "eager"])
@pytest.mark.parametrize("go_on", [True, False], ids=["training on", "finishing at once"])
def test_islands_at_different_steps_are_an_error(name, go_on):
    early = isles.run_local(lambda world: checkpoint(world, METHODS[name], 2), ISLANDS)
    late = isles.run_local(lambda world: checkpoint(world, METHODS[name], 7), ISLANDS)

    def island(world):
        island = Island(world, METHODS[name])
        island.diloco.load_state_dict((early, late)[world.rank][world.rank])
        if go_on:
            island.train(STEPS)
        island.finish()

    with pytest.raises(ValueError, match=r"different steps \(2 and 7\)"):
        isles.run_local(island, ISLANDS)


@pytest.mark.parametrize("name", ["eager", "eager twice, error feedback"])
def test_an_eager_island_that_loads_another_islands_state_is_an_error(name):
    """It would take back contributions that it never made, and the anchors would stay apart for ever."""
    states = isles.run_local(lambda world: checkpoint(world, METHODS[name], 7), ISLANDS)

    def island(world):
        island = Island(world, METHODS[name])
        island.diloco.load_state_dict(states[0])
        island.train(STEPS)

    with pytest.raises(ValueError, match="island"):
        isles.run_local(island, ISLANDS)


def test_a_state_of_another_method_another_model_or_nothing_at_all_is_an_error():
    world = isles.LocalWorld.alone()
    state = checkpoint(world, isles.Method.diloco(sync_every=4), 3)

    other_method = Island(world, isles.Method.diloco(sync_every=5))
    with pytest.raises(ValueError, match=r"another method \(sync_every=4 there, 5 here\)"):
        other_method.diloco.load_state_dict(state)

    other_model = Island(world, isles.Method.diloco(sync_every=4), Tower(3))
    with pytest.raises(ValueError, match="another model"):
        other_model.diloco.load_state_dict(state)

    island = Island(world, isles.Method.diloco(sync_every=4))
    before = weights_of(island.model)
    cut_short = {key: value for key, value in state.items() if key != "fragments"}
    for nonsense in ({}, {"model": {}}, {**state, "version": 2}, cut_short, None, [state]):
        with pytest.raises(ValueError, match="isles"):
            island.diloco.load_state_dict(nonsense)
    assert same(weights_of(island.model), before)
    assert island.diloco.step_count == 0


@pytest.mark.parametrize("what", ["parameters", "buffers", "optimizer"])
def test_a_state_that_does_not_fit_leaves_everything_as_it_was(what):
    """All of it is looked at before any of it is loaded."""
    island = Island(isles.LocalWorld.alone(), isles.Method.diloco(sync_every=2))
    state = checkpoint(isles.LocalWorld.alone(), isles.Method.diloco(sync_every=2), 3)
    del state["replica"][what]
    before = weights_of(island.model)
    with pytest.raises(ValueError, match="isles"):
        island.diloco.load_state_dict(state)
    assert same(weights_of(island.model), before)
    assert island.diloco.step_count == 0


def test_the_global_model_is_never_saved_as_the_islands_own():
    island = Island(isles.LocalWorld.alone(), isles.Method(sync_every=4, fragments=1))
    island.train(6)
    own = weights_of(island.model)
    with island.diloco.global_model():
        try:
            state = island.diloco.state_dict()
        except RuntimeError as error:
            assert "global_model" in str(error)  # noqa: PT017
        else:
            assert same(state["replica"]["parameters"], own)
