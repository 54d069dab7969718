"""Every trainable parameter of any model is in exactly one fragment, and layers are found without being told where."""

from __future__ import annotations

import logging
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import isles
from isles.core.fragments import cut, find_layers
from tests.reference import Tower

torch.set_num_threads(1)


def names(model: nn.Module, **knobs) -> list[list[str]]:
    return [fragment.names for fragment in cut(model, isles.Method(**knobs))]


def tops(fragments: list[list[str]], depth: int) -> list[list[str]]:
    """The modules at the given depth that a fragment is made of, such as layers.3."""
    return [list(dict.fromkeys(".".join(name.split(".")[:depth]) for name in fragment)) for fragment in fragments]


def check_cover(model: nn.Module, fragments: list[list[str]]) -> None:
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted(chain(*fragments)) == sorted(trainable)


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(width, width), nn.LayerNorm(width)


class Stack(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm, self.head = (
            nn.Embedding(90, 6),
            layers,
            nn.LayerNorm(6),
            nn.Linear(6, 9),
        )


OUTSIDE = ["embedding.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"]

# ---- how layers are dealt out


@pytest.mark.parametrize("container", ["ModuleList", "Sequential", "ModuleDict"])
def test_layers_are_found_in_every_container(container):
    blocks = [Block() for _ in range(6)]
    layers = {
        "ModuleList": lambda: nn.ModuleList(blocks),
        "Sequential": lambda: nn.Sequential(*blocks),
        "ModuleDict": lambda: nn.ModuleDict({str(i): block for i, block in enumerate(blocks)}),
    }[container]()
    model = Stack(layers)
    strided = names(model, fragments=4)
    assert strided[0] == OUTSIDE
    assert tops(strided[1:], 2) == [["layers.0", "layers.3"], ["layers.1", "layers.4"], ["layers.2", "layers.5"]]
    sequential = names(model, fragments=4, pattern="sequential")
    assert tops(sequential[1:], 2) == [["layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4", "layers.5"]]
    check_cover(model, strided)


def test_by_layers_per_fragment():
    model = Stack(nn.ModuleList(Block() for _ in range(8)))
    strided = tops(names(model, fragment_layers=3)[1:], 2)
    assert strided == [[f"layers.{i}" for i in range(p, 8, 3)] for p in range(3)], "the papers' default"
    assert [len(share) for share in tops(names(model, fragment_layers=3, pattern="sequential")[1:], 2)] == [2, 3, 3]
    assert len(names(model, fragment_layers=1)) == 9
    assert len(names(model, fragment_layers=100)) == 2


@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_more_fragments_than_layers_leaves_some_empty_and_says_so(pattern, caplog):
    model = Stack(nn.ModuleList(Block() for _ in range(3)))
    with caplog.at_level(logging.WARNING, logger="isles"):
        fragments = names(model, fragments=7, pattern=pattern)
    assert len(fragments) == 7
    assert sum(not fragment for fragment in fragments) == 3
    assert any("3 of 7 fragments are empty" in record.getMessage() for record in caplog.records)
    check_cover(model, fragments)


def test_one_fragment_is_everything_and_without_an_outside_all_share_the_layers():
    assert names(Stack(nn.ModuleList([Block()])), fragments=1) == [
        [name for name, _ in Stack(nn.ModuleList([Block()])).named_parameters()]
    ]
    bare = nn.Sequential(*(Block() for _ in range(4)))
    assert tops(names(bare, fragments=2), 1) == [["0", "2"], ["1", "3"]]


def test_frozen_parameters_are_left_out():
    model = Stack(nn.ModuleList(Block() for _ in range(4)))
    model.embedding.weight.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    fragments = names(model, fragments=3)
    assert fragments[0] == OUTSIDE[1:]
    assert tops(fragments[1:], 2) == [["layers.0", "layers.3"], ["layers.2"]]
    check_cover(model, fragments)


def test_lists_of_names_are_taken_as_they_are():
    model = Tower(2)
    lists = [["head.bias", "layers.1.weight"], ["head.weight"], ["layers.0.weight", "layers.0.bias", "layers.1.bias"]]
    lists.append(["embedding.weight"])
    assert names(model, fragments=lists) == lists


def test_without_a_stack_the_parts_are_of_near_equal_size():
    model = nn.Module()
    for index, size in enumerate([500, 300, 300, 200, 200, 100, 100, 50, 50]):
        model.register_parameter(f"part{index}", nn.Parameter(torch.zeros(size)))
    assert find_layers(model) == []
    fragments = cut(model, isles.Method(fragments=3))
    assert sorted(fragment.numel for fragment in fragments) == [600, 600, 600]
    assert len(names(model, fragment_layers=3)) == 1
    check_cover(model, [fragment.names for fragment in fragments])


# ---- reading and writing


def test_a_fragment_is_one_vector_that_can_be_read_and_written():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(3.0))
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.short = nn.Parameter(torch.tensor([1.5, 2.5]).bfloat16())
            self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
            self.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())

    model = Odd()
    (fragment,) = cut(model, isles.Method(fragments=1))
    vector = fragment.read()
    assert (vector.dtype, vector.shape, fragment.numel) == (torch.float32, (129,), 129)
    assert torch.equal(vector[:3], torch.tensor([3.0, 1.5, 2.5]))
    assert torch.equal(vector[-6:], torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]))
    fragment.write(vector * 2)
    assert torch.equal(fragment.read(), vector * 2)
    assert model.short.dtype == torch.bfloat16
    assert model.channels_last.is_contiguous(memory_format=torch.channels_last)


# ---- any model


@st.composite
def any_model(draw) -> nn.Module:
    def module(depth: int) -> nn.Module:
        kind = draw(st.sampled_from(["linear", "norm", "block", "list", "dict", "sequential"][: 6 if depth else 3]))
        if kind == "linear":
            return nn.Linear(draw(st.integers(1, 4)), 2)
        if kind == "norm":
            return nn.LayerNorm(draw(st.integers(1, 9)))
        if kind == "block":
            return Block(draw(st.integers(1, 4)))
        children = [module(depth - 1) for _ in range(draw(st.integers(0, 4)))]
        if kind == "dict":
            return nn.ModuleDict({f"child{i}": child for i, child in enumerate(children)})
        return nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)

    model = nn.Module()
    for i in range(draw(st.integers(1, 3))):
        model.add_module(f"part{i}", module(depth=2))
    everything = list(model.modules())
    for i in range(draw(st.integers(0, 2))):  # ties: the same module in a second place
        model.add_module(f"tied{i}", draw(st.sampled_from(everything[1:])))
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.integers(0, 9)) > 0)
    model.register_parameter("always", nn.Parameter(torch.zeros(1)))
    return model


@settings(max_examples=120, deadline=None, derandomize=True)
@given(any_model(), st.none() | st.integers(1, 6), st.integers(1, 4), st.sampled_from(["strided", "sequential"]))
def test_any_model_is_covered_exactly(model, fragments, fragment_layers, pattern):
    method = isles.Method(fragments=fragments, fragment_layers=fragment_layers, pattern=pattern)
    result = cut(model, method)
    check_cover(model, [fragment.names for fragment in result])
    held = [id(parameter) for fragment in result for parameter in fragment.parameters]
    assert len(held) == len(set(held))
    if fragments is not None:
        assert len(result) == fragments
