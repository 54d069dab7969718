"""Outer state off the device (`outer_device`), and islands with an overlap of their own."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import isles

METHODS = {
    "gradual": isles.Method.gradual(sync_every=4, fragments=3, dense_start=[(2, 2)], warmup_rounds=2),
    "diloco": isles.Method.diloco(sync_every=4),
    "streaming": isles.Method.streaming(sync_every=5, fragments=3, overlap=2, mixing=0.5),
    "feedback": isles.Method.streaming(sync_every=5, fragments=3, overlap=1, codec="int4", error_feedback=True),
    "eager": isles.Method.eager(sync_every=3, fragments=2),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def train(world, method, steps=17, resume_at=None, **options):
    replica = model()
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    diloco = isles.DiLoCo(replica, optimizer, method, world=world, **options)
    for step in range(steps):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * world.rank + step))
        replica(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == resume_at:
            saved = diloco.state_dict()
            diloco.close()
            diloco = isles.DiLoCo(replica, optimizer, method, world=world, sync_initial=True, **options)
            diloco.load_state_dict(saved)
    anchors = [anchor.clone() for anchor in diloco._rounds.anchors()]
    diloco.finish()
    diloco.close()
    return torch.cat([p.detach().flatten() for p in replica.parameters()]), anchors, diloco


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("resume_at", [None, 8])
def test_where_the_outer_state_lies_changes_no_bit(method, resume_at):
    here = isles.run_local(lambda world: train(world, METHODS[method]), 2)
    offloaded = isles.run_local(lambda world: train(world, METHODS[method], outer_device="cpu", resume_at=resume_at), 2)
    for mine, theirs in zip(here, offloaded, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert all(torch.equal(a, b) for a, b in zip(mine[1], theirs[1], strict=True))


def test_only_what_the_coming_step_needs_is_resident():
    replica = model()
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    world = isles.LocalWorld.alone()
    with isles.DiLoCo(replica, optimizer, METHODS["streaming"], world=world, outer_device="cpu") as diloco:
        fetched = []
        for step in range(1, 16):
            replica(torch.ones(1, 6)).sum().backward()
            optimizer.step()
            due = (*diloco.schedule.sends(step + 1), *diloco.schedule.applies(step + 1))
            fetched.append(set(diloco._rounds.offload._resident))
            assert fetched[-1] == {one.fragment for one in due}
    assert set() in fetched
    assert set.union(*fetched) == {0, 1, 2}


def test_a_device_that_is_none():
    with pytest.raises(ValueError, match="outer_device='moon' must be a device"):
        train(isles.LocalWorld.alone(), METHODS["diloco"], outer_device="moon")


def test_islands_with_their_own_overlap_agree_on_the_global_model():
    method = isles.Method.streaming(sync_every=6, fragments=2, overlap=1, mixing=0.5)
    own = {0: None, 1: 4}
    results = isles.run_local(lambda world: train(world, method, overlap=own[world.rank]), 2)
    assert torch.equal(results[0][0], results[1][0])
    together = isles.run_local(lambda world: train(world, method), 2)
    assert not torch.equal(results[0][0], together[0][0]), "the slower island works on with older weights"
    uniform = isles.run_local(lambda world: train(world, dataclasses.replace(method, overlap=4), steps=17), 2)
    everybody = isles.run_local(lambda world: train(world, method, overlap=4), 2)
    assert torch.equal(uniform[0][0], everybody[0][0]), "an own overlap means what the method's means"


def test_an_own_overlap_is_resumed_and_checked():
    method = isles.Method.streaming(sync_every=6, fragments=2, overlap=1)
    own = {0: 1, 1: 4}
    straight = isles.run_local(lambda world: train(world, method, overlap=own[world.rank]), 2)
    resumed = isles.run_local(lambda world: train(world, method, overlap=own[world.rank], resume_at=8), 2)
    assert torch.equal(straight[0][0], resumed[0][0])
    saved = copy.deepcopy(straight[1][2].state_dict())
    replica = model()
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    another = isles.DiLoCo(replica, optimizer, method, world=isles.LocalWorld.alone())
    with pytest.raises(ValueError, match="this island's overlap=4 there, 1 here"):
        another.load_state_dict(saved)


@pytest.mark.parametrize("overlap", [-1, 6, 1.5, True])
def test_an_own_overlap_that_cannot_be(overlap):
    with pytest.raises(ValueError, match="from 0 to sync_every - 1 = 5"):
        train(isles.LocalWorld.alone(), isles.Method.streaming(sync_every=6), overlap=overlap)


def test_eager_updates_have_no_overlap_of_their_own():
    with pytest.raises(ValueError, match="with update='fresh'"):
        train(isles.LocalWorld.alone(), METHODS["eager"], overlap=1)
