"""Islands joined by a store: the same run as in a fixed set, to the last bit, where nobody is left out; and what
happens when islands come late, leave early or are slow.
"""

import collections
import functools
import math
import threading

import pytest
import torch

import isles
from isles.elastic.objects import Announcement, Contribution, Seal, island_name, seal_name
from isles.elastic.store import open_store
from tests.reference import Tower, same, toy_backward, weights_of
from tests.stores import KINDS, in_order, new_store, threads

torch.set_num_threads(1)
METHODS = {
    "diloco": isles.Method.diloco(sync_every=5),
    "streaming": isles.Method.streaming(sync_every=6, fragments=3, overlap=2),
    "distant": isles.Method.distant(sync_every=6, fragments=2),
    "delayed": isles.Method.delayed(sync_every=4, fragments=2),
    "delayed, dense": isles.Method.delayed(sync_every=4, fragments=2, dense_start=[(3, 2)], mixing=0.5),
    "gradual": isles.Method.gradual(sync_every=10, fragments=2),
    "error feedback": isles.Method.streaming(sync_every=6, fragments=3, overlap=2, error_feedback=True),
}
STEPS = 27


def island(world, method, steps, make=lambda made: made(), **options):
    """Trains the toy problem; returns what it was after every step, and after the end."""
    model = Tower(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    history = []
    with make(functools.partial(isles.DiLoCo, model, optimizer, method, world=world, **options)) as diloco:
        for step in range(1, steps + 1):
            toy_backward(model, world.rank, step)
            optimizer.step()
            history.append(weights_of(model))
    return [*history, weights_of(model)], diloco


def everybody(store, count, method, steps=STEPS, weights=None, **options):
    """Islands with unlimited patience."""
    url, client = store
    worlds = [isles.StoreWorld(url, quorum=count, patience=math.inf, timeout=60, **client) for _ in range(count)]
    weights = weights or [1.0] * count
    calls = [
        functools.partial(island, world, method, steps, turn, weight=weight, **options)
        for world, turn, weight in zip(worlds, in_order(count), weights, strict=True)
    ]
    return threads(*calls)


def equals_local(store, count, method, weights=None, **options):
    weights = weights or [1.0] * count
    local = isles.run_local(lambda world: island(world, method, STEPS, weight=weights[world.rank], **options), count)
    for (one, ours), (other, _) in zip(everybody(store, count, method, weights=weights, **options), local, strict=True):
        assert all(map(same, one, other))
        assert (ours.stats.excluded_rounds, ours.stats.catch_up_rounds) == (0, 0)
        assert ours.clock == ours.step_count == STEPS
        assert ours.stats.islands == count


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", METHODS)
def test_a_store_gives_what_threads_give_bit_for_bit(name, count, tmp_path):
    with new_store("memory", tmp_path) as store:
        equals_local(store, count, METHODS[name])


@pytest.mark.parametrize("codec", isles.codecs)
def test_with_every_codec(codec, tmp_path):
    with new_store("memory", tmp_path) as store:
        equals_local(store, 2, isles.Method.streaming(sync_every=6, fragments=2, overlap=1, codec=codec))


@pytest.mark.parametrize("kind", KINDS)
def test_in_every_kind_of_store(kind, tmp_path):
    with new_store(kind, tmp_path) as store:
        equals_local(store, 3, METHODS["streaming"], weights=[1.0, 3.0, 0.5])


def test_with_an_outer_optimizer_of_ones_own(tmp_path):
    with new_store("memory", tmp_path) as store:
        make = lambda anchors: torch.optim.AdamW(anchors, lr=0.1)
        equals_local(store, 2, METHODS["streaming"], outer_optimizer=make)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("snapshot_every", [2, 1000])
def test_whoever_joins_late_has_the_anchors_of_the_others(name, snapshot_every, tmp_path):
    """By a snapshot and the rounds after it, or by all rounds."""
    method = METHODS[name]
    with new_store("memory", tmp_path) as (url, _):
        far, joined = threading.Event(), threading.Event()

        def first():
            model = Tower(3)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            world = isles.StoreWorld(url, patience=60.0, snapshot_every=snapshot_every, timeout=60)
            with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
                for step in range(1, 61):
                    toy_backward(model, 0, step)
                    optimizer.step()
                    if step == 30:
                        far.set()
                        joined.wait()
            return weights_of(model), diloco

        def second():
            far.wait()
            model = Tower(3)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()  # its own weights do not matter
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            world = isles.StoreWorld(url, patience=60.0, snapshot_every=snapshot_every, timeout=60)
            diloco = isles.DiLoCo(model, optimizer, method, world=world)
            begun = diloco.clock
            joined.set()
            with diloco:
                while diloco.clock < 60:
                    toy_backward(model, 1, diloco.step_count + 1)
                    optimizer.step()
            return weights_of(model), diloco, begun

        (one, diloco), (other, late, begun) = threads(first, second)
        assert same(one, other)
        assert 20 <= begun <= 30
        assert late.world.rank == 1
        assert late.clock == diloco.clock == 60
        assert diloco.stats.islands == late.stats.islands == 2


def test_every_step_of_a_slow_island_is_counted_once(tmp_path):
    """The others do not wait for it. What it learned goes into later rounds, and the seals count every step."""
    method = isles.Method(sync_every=4, fragments=2, overlap=1, outer_lr=1.0, outer_momentum=0.0)
    with new_store("memory", tmp_path) as (url, _):
        stop = threading.Event()

        def fast():
            model = Tower(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with isles.DiLoCo(
                model, optimizer, method, world=isles.StoreWorld(url, patience=0.02, timeout=60)
            ) as diloco:
                while not stop.is_set():
                    toy_backward(model, 0, diloco.step_count + 1)
                    optimizer.step()
            return diloco

        def slow():
            model = Tower(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            world = isles.StoreWorld(url, patience=0.02, timeout=60)
            with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
                for step in range(1, 21):
                    toy_backward(model, 1, step)
                    stop.wait(0.05)
                    optimizer.step()
                stop.set()
            return diloco

        quick, late = threads(fast, slow)
        assert late.clock > late.step_count == 20
        store, number = open_store(url), 1
        counted = collections.defaultdict(lambda: [0, 0])
        while (data := store.get(seal_name(number))) is not None:
            seal = Seal.parse(data, seal_name(number))
            for each in seal.contributions:  # an island that was away for long comes back under another number
                name = island_name(each.island)
                counted[Announcement.parse(store.get(name), name).token][seal.fragment] += each.steps
            number += 1
        assert sorted(counted.values()) == sorted([[20, 20], [quick.step_count] * 2])


def test_an_island_that_ends_early_is_in_what_the_others_go_on_with(tmp_path):
    method = isles.Method.streaming(sync_every=6, fragments=3, overlap=2)
    with new_store("memory", tmp_path) as (url, _):
        worlds = [isles.StoreWorld(url, patience=60.0, timeout=60) for _ in range(2)]
        both, turns = threading.Barrier(2), in_order(2)

        def together(turn, made):
            diloco = turn(made)
            both.wait()
            return diloco

        makes = [functools.partial(together, turn) for turn in turns]
        calls = [functools.partial(island, *each) for each in zip(worlds, [method] * 2, [40, 10], makes, strict=True)]
        (_, stays), (_, ends) = threads(*calls)
        assert (stays.clock, ends.clock) == (40, 10)
        assert (stays.stats.excluded_rounds, ends.stats.excluded_rounds) == (0, 0)
        assert stays.stats.islands == 1
        assert stays.stats.wait_seconds < 60.0  # it did not wait for one that had left
        store = open_store(url)
        steps = [0, 0, 0]
        for number in range(1, 30):
            if (data := store.get(seal_name(number))) is not None:
                seal = Seal.parse(data, seal_name(number))
                steps[seal.fragment] += sum(each.steps for each in seal.contributions if each.island == 1)
        assert steps == [10, 10, 10]


def test_when_all_have_gone_the_next_one_goes_on(tmp_path):
    method = METHODS["streaming"]
    with new_store("folder", tmp_path) as (url, _):
        first, diloco = island(isles.StoreWorld(url), method, 20)
        model = Tower(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, method, world=isles.StoreWorld(url)) as again:
            assert same(weights_of(model), first[-1])
            assert again.clock >= diloco.clock - 1
            assert again.world.rank == 1
            toy_backward(model, 0, 1)
            optimizer.step()


def test_an_island_whose_weights_are_not_finite_sits_out(tmp_path):
    method = isles.Method.streaming(sync_every=4, fragments=2, overlap=1)
    with new_store("memory", tmp_path) as (url, _):

        def broken(world, turn):
            model = Tower(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with turn(lambda: isles.DiLoCo(model, optimizer, method, world=world)) as diloco:
                for step in range(1, 21):
                    toy_backward(model, world.rank, step)
                    if step == 9 and world.rank == 1:
                        next(model.parameters()).grad.fill_(math.nan)
                    optimizer.step()
            return weights_of(model), diloco

        worlds = [isles.StoreWorld(url, quorum=2, patience=math.inf, timeout=60) for _ in range(2)]
        calls = [functools.partial(broken, world, turn) for world, turn in zip(worlds, in_order(2), strict=True)]
        (one, well), (other, ill) = threads(*calls)
        assert same(one, other)
        assert all(bool(torch.isfinite(value).all()) for value in one.values())
        assert (well.stats.nonfinite_rounds, ill.stats.nonfinite_rounds > 0) == (0, True)


def test_moments_of_the_optimizer_can_be_saved_and_put_back(tmp_path):
    method = METHODS["streaming"]
    with new_store("folder", tmp_path) as (url, _):
        model = Tower(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with isles.DiLoCo(model, optimizer, method, world=isles.StoreWorld(url)) as diloco:
            for step in range(1, 15):
                toy_backward(model, 0, step)
                optimizer.step()
            saved = diloco.state_dict()
        torch.save(saved, tmp_path / "state.pt")
        model = Tower(3)
        other = torch.optim.AdamW(model.parameters(), lr=0.01)
        with isles.DiLoCo(model, other, method, world=isles.StoreWorld(url)) as again:
            before = weights_of(model)
            again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            assert same(weights_of(model), before)
            moments = [[state["exp_avg"] for state in each.state.values()] for each in (optimizer, other)]
            assert len(moments[0]) == len(moments[1]) > 0
            assert all(map(torch.equal, *moments))
        with pytest.raises(ValueError, match="not a state of an island of a StoreWorld"):
            isles.DiLoCo(model, other, method, world=isles.StoreWorld(url)).load_state_dict({"version": 3})


def test_threads_end_with_the_island(tmp_path):
    method, before = METHODS["streaming"], set(threading.enumerate())
    with new_store("memory", tmp_path) as (url, _):
        island(isles.StoreWorld(url), method, 5)
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
            assert not thread.is_alive()


def test_events_tell_who_joined_sealed_and_left(tmp_path):
    events = []
    with new_store("memory", tmp_path) as (url, _):
        island(isles.StoreWorld(url), isles.Method.diloco(sync_every=3), 6, on_event=events.append)
    kinds = [event.kind for event in events]
    assert kinds == ["join", "send", "apply", "seal", "send", "apply", "seal", "leave"]


def with_a_bad_one(url, robust, bad):
    """Three islands, of which the last one may have gradients a million times too large."""

    def member(world, turn):
        model = Tower(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with turn(lambda: isles.DiLoCo(model, optimizer, METHODS["streaming"], world=world)):
            for step in range(1, STEPS + 1):
                toy_backward(model, world.rank, step)
                if bad and world.rank == 2:
                    for parameter in model.parameters():
                        parameter.grad.mul_(1e6)
                optimizer.step()
        return weights_of(model)

    worlds = [isles.StoreWorld(url, quorum=3, patience=math.inf, timeout=60, robust=robust) for _ in range(3)]
    calls = [functools.partial(member, world, turn) for world, turn in zip(worlds, in_order(3), strict=True)]
    return threads(*calls)


def test_robust_bounds_what_one_bad_island_can_do(tmp_path):
    runs = {}
    for robust, bad in ((False, False), (True, False), (False, True), (True, True)):
        with new_store("memory", tmp_path) as (url, _):
            one, *others = with_a_bad_one(url, robust, bad)
            assert all(same(one, other) for other in others)
            runs[robust, bad] = torch.cat([value.flatten() for value in one.values()])
    start = torch.cat([parameter.detach().flatten() for parameter in Tower(3).parameters()])
    moved = {key: float((value - start).norm()) for key, value in runs.items()}
    assert moved[False, True] > 1000 * moved[False, False]
    assert moved[True, True] < 3 * moved[False, False]
    assert 0.5 * moved[False, False] < moved[True, False] < 1.5 * moved[False, False]


def test_robust_is_a_setting_of_the_run(tmp_path):
    with new_store("folder", tmp_path) as (url, _):
        island(isles.StoreWorld(url, robust=True), METHODS["streaming"], 5)
        with pytest.raises(isles.MismatchError, match="robust=True there, None here"):
            island(isles.StoreWorld(url), METHODS["streaming"], 5)


def test_fragments_with_nothing_in_them_are_passed_over(tmp_path):
    """What is outside the layers is frozen, so the first fragment is empty."""
    method = isles.Method.streaming(sync_every=6, fragments=4, overlap=2)

    def frozen(world, turn=lambda made: made()):
        model = Tower(3)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("layers"))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        with turn(lambda: isles.DiLoCo(model, optimizer, method, world=world)) as diloco:
            for step in range(1, STEPS + 1):
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.full_like(parameter, 2.0 ** -(3 + world.rank) * (step % 3))
                optimizer.step()
        assert any(fragment.is_empty for fragment in diloco.fragments)
        return weights_of(model)

    with new_store("memory", tmp_path) as (url, _):
        worlds = [isles.StoreWorld(url, quorum=2, patience=math.inf, timeout=60) for _ in range(2)]
        calls = [functools.partial(frozen, world, turn) for world, turn in zip(worlds, in_order(2), strict=True)]
        for one, other in zip(threads(*calls), isles.run_local(frozen, 2), strict=True):
            assert same(one, other)


def test_a_mean_that_a_snapshot_has_overtaken_fails_nothing(tmp_path):
    """An island that was away loads a snapshot while means of the rounds before it still wait to be computed."""
    with new_store("memory", tmp_path) as (url, _):
        world = isles.StoreWorld(url)
        model = Tower(3)
        with isles.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), METHODS["streaming"], world=world):
            gone = (Contribution(7, 1.0, 6, 200, "0" * 64),)
            assert world._session.driver.codec.do(world._session._average, 1, gone).result().superseded
