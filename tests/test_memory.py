"""What the engine costs in memory is a matter of what is trained: frozen parameters are compared, not copied.

A frozen base model in bf16 with a small adapter is the case: a flat fp32 copy of the base would be twice its size. The
peak of a fresh process is compared before and after. A checkpoint holds copies, on the CPU, and of nothing twice.
"""

import resource

import pytest
import torch
from torch import nn

import isles
from tests import processes

torch.set_num_threads(1)
MEGABYTE = 1 << 20


# ---- frozen parameters


def adapted(frozen_bytes):
    """A small layer that is trained beside a large one that is not; nothing larger is ever made on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    model.base = nn.Parameter(torch.empty(frozen_bytes // 2, dtype=torch.bfloat16), requires_grad=False)
    model.base.data.fill_(0.5)
    return model, torch.optim.SGD(model[0].parameters(), lr=0.1)


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth_of_the_peak(rank, frozen_bytes, sync_initial):
    torch.set_num_threads(1)
    method = isles.Method.diloco(sync_every=2)
    small, optimizer = adapted(1000)
    with isles.DiLoCo(small, optimizer, method, sync_initial=sync_initial):  # whatever is loaded once is loaded now
        small[0](torch.ones(4)).sum().backward()
        optimizer.step()
    model, optimizer = adapted(frozen_bytes)
    before = peak_bytes()
    diloco = isles.DiLoCo(model, optimizer, method, sync_initial=sync_initial)
    made = peak_bytes()
    with diloco:
        model[0](torch.ones(4)).sum().backward()
        optimizer.step()
    return made - before, peak_bytes() - before


@pytest.mark.parametrize("islands", [1, 2])
def test_an_engine_makes_no_copy_of_frozen_parameters(islands, tmp_path):
    frozen = 64 * MEGABYTE
    for made, ended in processes.values(growth_of_the_peak, islands, tmp_path, frozen, False):
        assert made < frozen / 2, f"{made / MEGABYTE:.0f} MB more for DiLoCo()"
        assert ended < frozen / 2, f"{ended / MEGABYTE:.0f} MB more until the end"


def test_sync_initial_makes_no_flat_copy_of_frozen_parameters(tmp_path):
    """They go from island to island here, so something is under way; but never all of them in fp32."""
    frozen = 64 * MEGABYTE
    for made, _ in processes.values(growth_of_the_peak, 2, tmp_path, frozen, True):
        assert made < frozen, f"{made / MEGABYTE:.0f} MB more for DiLoCo()"


# ---- checkpoints


def storages(value, found=None):
    """The memory under every tensor of a nested state, by address: bytes."""
    found = {} if found is None else found
    if isinstance(value, torch.Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        assert value.device.type == "cpu"
    elif isinstance(value, dict):
        for part in value.values():
            storages(part, found)
    elif isinstance(value, (list, tuple)):
        for part in value:
            storages(part, found)
    return found


METHODS = {
    "nothing in flight": isles.Method.diloco(sync_every=2),
    "all in flight": isles.Method.streaming(sync_every=4, fragments=2, overlap=3),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_holds_copies_and_no_more_of_them_than_it_needs(name):
    """Weights, two moments of Adam, anchor, outer momentum: five times the weights, and once more what is in flight.
    The sharded form has places for a round in flight and for the own part of it, whether there is one or not.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights == 32 * MEGABYTE
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = isles.DiLoCo(model, optimizer, METHODS[name])
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for form in ({}, {"sharded": True}):
        state, another = diloco.state_dict(**form), diloco.state_dict(**form)
        saved, saved_again = storages(state), storages(another)
        live = storages([*model.parameters(), *optimizer.state.values()])
        assert not live.keys() & saved.keys(), form
        assert not saved_again.keys() & saved.keys(), f"each state has its own: {form}"
        factor = sum(saved.values()) / weights
        most = 7.01 if form else 6.2
        assert factor < most, f"{factor:.2f} times the weights: {form}"
    diloco.close()
