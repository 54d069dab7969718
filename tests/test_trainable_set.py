"""What is trained is settled when the engine is made; whoever changes it later is told, by the parameter's name.

A parameter that is thawed, replaced, parametrised or frozen in the middle of a run is no longer what the fragments
hold: islands would go on to exchange what nobody trains, and train what nobody exchanges, without a word. So the next
send raises a ValueError, and so does finish() if no send comes before it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import isles

torch.set_num_threads(1)
EVERY = 4


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


def thaw(model, optimizer):
    model[3].bias.requires_grad_(True)
    return "3.bias"


def thaw_and_train(model, optimizer):
    model[3].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model[3].bias]})
    return "3.bias"


def add(model, optimizer):
    """A new layer, an adapter for instance."""
    model.append(nn.Linear(3, 3))
    return "4.weight"


def replace(model, optimizer):
    model[1].weight = nn.Parameter(torch.ones(3, 3))
    return "1.weight"


def replace_and_train(model, optimizer):
    model[1].weight = nn.Parameter(torch.ones(3, 3))
    optimizer.add_param_group({"params": [model[1].weight]})
    return "1.weight"


def normalise(model, optimizer):
    parametrizations.weight_norm(model[1], "weight")
    return "1.weight"


def parametrise(model, optimizer):
    parametrize.register_parametrization(model[1], "weight", Doubled())
    return "1.weight"


def freeze(model, optimizer):
    model[1].bias.requires_grad_(False)
    return "1.bias"


def remove(model, optimizer):
    model[1].bias = None
    return "1.bias"


def names(error, parameter):
    """Whether an error names a parameter, by its name before the change or after it."""
    return parameter in str(error).replace(".parametrizations", "")


CHANGES = [thaw, thaw_and_train, add, replace, replace_and_train, normalise, parametrise, freeze, remove]


class Run:
    """Four layers, of which one bias is frozen; with two fragments something is sent in the middle of a period too."""

    def __init__(self, method):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        self.model[3].bias.requires_grad_(False)
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        self.diloco = isles.DiLoCo(self.model, self.optimizer, method)

    def step(self):
        self.model(torch.ones(2, 3)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


METHODS = {
    "whole model": isles.Method.diloco(sync_every=EVERY),
    "fragments": isles.Method(sync_every=EVERY, fragments=2),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_set_of_parameters_is_found_at_the_next_send(change, name):
    run = Run(METHODS[name])
    for _ in range(EVERY):
        run.step()
    sends = run.diloco.stats.sends
    named = change(run.model, run.optimizer)
    steps = EVERY if name == "whole model" else EVERY // 2  # the next send is that of another fragment, perhaps
    for _ in range(steps - 1):
        run.step()
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the name is looked for below
        run.step()
    assert names(refused.value, named)
    assert run.diloco.stats.sends == sends, "nothing of it is sent"
    run.diloco.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_set_of_parameters_is_found_at_the_end(change):
    run = Run(isles.Method.diloco(sync_every=100))
    run.step()
    named = change(run.model, run.optimizer)
    run.step()
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        run.diloco.finish()
    assert names(refused.value, named)
    run.diloco.close()


def test_a_changed_set_of_parameters_is_found_when_the_block_is_left():
    run = Run(isles.Method.diloco(sync_every=100))
    run.step()
    freeze(run.model, run.optimizer)
    with pytest.raises(ValueError, match=r"1\.bias"), run.diloco:
        run.step()
