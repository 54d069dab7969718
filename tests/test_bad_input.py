"""Every mistake that a user can make is one clear `ValueError`: what was wrong, with the value, and what to do."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

import isles
from tests.reference import Tower, toy_backward

torch.set_num_threads(1)

# ---- Method: field, value, words that the message must have (besides the name of the field)

NOT_A_POSITIVE_INTEGER = [0, -1, 1.5, 10.0, "10", None, True, math.nan, math.inf, [10]]
NOT_A_NUMBER = ["0.5", None, math.nan, math.inf, -math.inf, [0.5], True, 1j, 10**400]

WRONG: list[tuple[str, Any, tuple[str, ...]]] = [
    *(("sync_every", value, ("integer", "at least 1", repr(value))) for value in NOT_A_POSITIVE_INTEGER),
    *(("fragments", value, ("integer", "list of lists")) for value in (0, -2, 2.0, True, "all", {"a": 1}, math.nan)),
    ("fragments", [], ("at least one",)),
    ("fragments", [[]], ("[0]", "non-empty")),
    ("fragments", [["a"], []], ("[1]", "non-empty")),
    ("fragments", ["weight"], ("[0]", "'weight'", "list of parameter names")),
    ("fragments", [["a", 1]], ("[0]", "parameter names")),
    ("fragments", [3, 4], ("[0]", "parameter names")),
    ("fragments", [["a", "b"], ["c", "b", "a"]], ("more than once", "a, b")),
    ("fragments", [["a", "a"]], ("more than once", "a")),
    *(("fragment_layers", value, ("integer", "at least 1", repr(value))) for value in NOT_A_POSITIVE_INTEGER),
    *(("pattern", value, ("strided", "sequential")) for value in ("random", "", None, 3, "Strided", ["strided"])),
    *(("offsets", value, ("0 to 99", "one per fragment")) for value in ([100], [-1], [0.0], ["0"], [True], [None])),
    *(("offsets", value, ("list", "one per fragment")) for value in (7, "0", {0: 1}, math.nan, b"\x01", [])),
    *(("overlap", value, ("0 to 99", "sync_every - 1", repr(value))) for value in (100, -1, 0.5, "1", None, True)),
    *(("mixing", value, ("number", "from 0", "to 1")) for value in (*NOT_A_NUMBER, -0.1, 1.01)),
    *(("codec", value, ("fp32", "e3m0", repr(value))) for value in ("fp64", "", "E3M0", None, 4, ["fp32"])),
    ("codec", isles.codecs["fp32"], ("fp32", "e3m0")),
    *(("rounding", value, ("nearest", "stochastic")) for value in ("up", None, True, 0)),
    *(("error_feedback", value, ("True or False",)) for value in (1, 0, "yes", None, 0.5)),
    *(("outer_lr", value, ("number", "greater than 0")) for value in (*NOT_A_NUMBER, 0, 0.0, -0.4)),
    *(("outer_momentum", value, ("number", "below 1")) for value in (*NOT_A_NUMBER, 1, 1.0, -0.1, 2)),
    *(("nesterov", value, ("True or False",)) for value in (1, 0, "no", None)),
    *(
        ("dense_start", value, ("pairs (rounds, steps of each)", "1 to 100 (sync_every)"))
        for value in (3, "50x3", None, [50, 3], [(50,)], [(0, 3)], [(50, 0)], [(50, 101)], [(5, 3.0)])
    ),
    *(("warmup_rounds", value, ("integer", "at least 0", repr(value))) for value in (-1, 2.0, "20", None, True)),
    *(("update", value, ("fresh", "delayed", "eager")) for value in ("late", None, "Eager", 1, ["eager"])),
    *(("delay_rounds", value, ("integer", "at least 1", repr(value))) for value in NOT_A_POSITIVE_INTEGER),
]

DO_NOT_GO_TOGETHER = [
    ({"fragments": 3, "offsets": [0, 1]}, ("offsets has 2 entries for 3 fragments",)),
    ({"fragments": [["a"], ["b"]], "offsets": [0]}, ("offsets has 1 entries for 2 fragments",)),
    ({"sync_every": 10, "offsets": [10]}, ("offsets", "0 to 9")),
    ({"sync_every": 1, "overlap": 1}, ("overlap=1", "0 to 0")),
    ({"update": "delayed", "overlap": 1}, ("overlap=1", "delayed", "fresh")),
    ({"update": "eager", "overlap": 5}, ("overlap=5", "eager", "fresh")),
    ({"update": "fresh", "delay_rounds": 2}, ("delay_rounds=2", "delayed", "eager")),
]


def test_the_table_has_every_field():
    assert {field for field, _, _ in WRONG} == set(isles.Method().as_dict())


@pytest.mark.parametrize(("field", "value", "words"), WRONG, ids=lambda item: str(item)[:30])
def test_wrong_value_of_a_field(field, value, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the words are checked below)
        isles.Method(**{field: value})
    message = str(caught.value)
    assert field in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(("knobs", "words"), DO_NOT_GO_TOGETHER, ids=str)
def test_values_that_do_not_go_together(knobs, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        isles.Method(**knobs)
    assert [word for word in words if word not in str(caught.value)] == []


def test_method_is_frozen_and_takes_keywords_that_exist():
    with pytest.raises(AttributeError):
        isles.Method().sync_every = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        isles.Method(100)  # type: ignore[misc]
    for preset in (isles.Method, isles.Method.diloco, isles.Method.streaming, isles.Method.delayed, isles.Method.eager):
        with pytest.raises(TypeError, match="sync_evry"):
            preset(sync_evry=3)


def test_lists_given_to_a_method_can_be_changed_afterwards():
    names, offsets = [["a"], ["b"]], [0, 1]
    method = isles.Method(fragments=names, offsets=offsets)
    names[0].append("b")
    offsets[0] = 10**6
    assert (method.fragments, method.offsets) == ((("a",), ("b",)), (0, 1))
    assert hash(method) == hash(isles.Method(fragments=[["a"], ["b"]], offsets=(0, 1)))


# ---- the model, the optimizer, and lists of names


def start(model: Any = None, optimizer: Any = None, method: Any = None, **options: Any) -> isles.DiLoCo:
    model = Tower(1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if optimizer is None else optimizer
    return isles.DiLoCo(model, optimizer, isles.Method() if method is None else method, **options)


ALL = [name for name, _ in Tower(1).named_parameters()]


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        ([ALL[:2], ALL[3:]], ("leave out", ALL[2])),
        ([ALL[1:-1]], ("leave out", ALL[0], ALL[-1])),
        ([ALL, ["nonsense", "head.wait"]], ("no trainable parameter", "nonsense", "head.wait")),
        ([[*ALL[:-1], "Head.bias"]], ("no trainable parameter", "Head.bias")),
    ],
)
def test_lists_that_are_no_exact_cover_name_the_parameters(fragments, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        start(method=isles.Method(fragments=fragments))
    assert [word for word in words if word not in str(caught.value)] == []


def test_tied_and_frozen_parameters_in_lists():
    model = Tower(1)
    model.twin = model.head
    with pytest.raises(ValueError, match=r"more than once.*tied.*head\.weight"):
        start(model, method=isles.Method(fragments=[ALL, ["twin.weight"]]))
    model = Tower(1)
    model.head.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter.*head\.bias"):
        start(model, method=isles.Method(fragments=[ALL]))


def test_offsets_must_fit_what_the_model_is_cut_into():
    with pytest.raises(ValueError, match="offsets has 5 entries for 3 fragments"):
        start(Tower(2), method=isles.Method(fragment_layers=1, offsets=range(5)))


def test_a_model_without_trainable_parameters():
    frozen = Tower(1).requires_grad_(False)
    for model in (frozen, nn.ReLU()):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        with pytest.raises(ValueError, match=r"no trainable parameters.*requires_grad"):
            start(model, optimizer)


def test_complex_parameters_would_lose_half_of_themselves():
    model = Tower(1)
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"phase.*complex"):
        start(model)


def test_an_optimizer_that_does_not_hold_the_parameters():
    model = Tower(1)
    for held in (Tower(1).parameters(), model.layers.parameters()):
        with pytest.raises(ValueError, match=r"optimizer does not hold.*embedding\.weight.*from this model"):
            start(model, torch.optim.SGD(held, lr=1.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": Tower(1).parameters()}, ("model", "torch.nn.Module")),
        ({"model": Tower}, ("model", "torch.nn.Module")),
        ({"optimizer": "adam"}, ("optimizer", "torch.optim.Optimizer")),
        ({"optimizer": torch.optim.SGD}, ("optimizer", "torch.optim.Optimizer")),
        ({"method": "streaming"}, ("method", "isles.Method", "streaming")),
        ({"method": isles.Method.streaming}, ("method", "isles.Method")),
        ({"method": {"sync_every": 10}}, ("method", "isles.Method")),
        ({"world": 2}, ("world", "2")),
        ({"world": "gloo"}, ("world", "gloo")),
        ({"world": isles.LocalWorld}, ("world",)),
        ({"on_event": "print"}, ("on_event", "print")),
        ({"sync_initial": "no"}, ("sync_initial", "no")),
        *(({"weight": value}, ("weight", "greater than 0")) for value in (0, -1.0, math.nan, math.inf, "1", True)),
        ({"weight": None}, ("weight", "greater than 0")),
        ({"weight": 10**400}, ("weight", "greater than 0")),
        ({"weight": torch.tensor([1.0, 2.0])}, ("weight", "greater than 0")),
    ],
    ids=lambda item: next(iter(item)),  # not the value, whose address would be another one in every test process
)
def test_arguments_of_the_wrong_kind(options, words):
    given = {"model": Tower(1), "method": isles.Method(), **options}
    if "optimizer" not in given:
        given["optimizer"] = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        if isinstance(given["model"], nn.Module):
            given["optimizer"] = torch.optim.SGD(given["model"].parameters(), lr=1.0)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        isles.DiLoCo(given.pop("model"), given.pop("optimizer"), given.pop("method"), **given)
    assert [word for word in words if word not in str(caught.value)] == []


# ---- islands that do not fit together


@pytest.mark.parametrize(
    ("islands_differ_in", "words"),
    [
        ({"method": [isles.Method(), isles.Method(mixing=0.5, overlap=2)]}, ("overlap=0 and 2", "mixing=0.0 and 0.5")),
        ({"model": [Tower(1), Tower(2)]}, ("different models",)),
        ({"model": [Tower(1), Tower(1, seed=1)]}, ("different parameters", "sync_initial=True")),
        ({"sync_initial": [True, False]}, ("sync_initial",)),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_islands_that_differ(islands_differ_in, words):
    def island(world):
        start(**{name: values[world.rank] for name, values in islands_differ_in.items()}, world=world)

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        isles.run_local(island, 2)
    assert [word for word in ("islands 0 and 1", *words) if word not in str(caught.value)] == []


def test_frozen_parameters_must_be_the_same_too():
    def island(world):
        model = Tower(1)
        model.head.bias.requires_grad_(False).fill_(world.rank)
        start(model, world=world)

    with pytest.raises(ValueError, match="different parameters"):
        isles.run_local(island, 2)


# ---- the world


def test_processes_that_torchrun_has_started_and_nobody_has_joined_are_told(monkeypatch):
    """Each would train alone, and nobody would notice."""
    for name, value in {"TORCHELASTIC_RUN_ID": "isles", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"started 2 processes.*init_process_group\(\)"):
        start()
    start(world=isles.LocalWorld.alone()).close()
    monkeypatch.setenv("WORLD_SIZE", "1")
    start().close()


# ---- run_local


@pytest.mark.parametrize("islands", [0, -1, 2.0, "2", None, True])
def test_run_local_needs_a_number_of_islands(islands):
    with pytest.raises(ValueError, match=r"islands=.* integer of at least 1"):
        isles.run_local(lambda world: None, islands)


def test_run_local_needs_a_function_and_a_form_of_reduction_that_exists():
    with pytest.raises(ValueError, match="function"):
        isles.run_local(3, 2)
    with pytest.raises(ValueError, match=r"all-gather.*reduce-scatter"):
        isles.run_local(lambda world: None, 2, reduction="ring")


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("when", [0, 1, 4, 5])
def test_the_first_exception_is_raised_and_no_thread_is_left(culprit, when):
    threads, others = set(threading.enumerate()), []

    def island(world):
        if (world.rank, when) == (culprit, 0):
            raise ZeroDivisionError(f"island {world.rank}")
        model = Tower(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            with isles.DiLoCo(model, optimizer, isles.Method(sync_every=2, fragments=2), world=world):
                for step in range(1, 8):
                    if (world.rank, step) == (culprit, when):
                        raise ZeroDivisionError(f"island {world.rank}")
                    toy_backward(model, world.rank, step)
                    optimizer.step()
        except isles.LostPeerError as error:
            others.append((world.rank, str(error)))
            raise

    with pytest.raises(ZeroDivisionError, match=f"island {culprit}"):
        isles.run_local(island, 3)
    assert sorted(rank for rank, _ in others) == [rank for rank in range(3) if rank != culprit], "the others stop"
    assert all(f"island {culprit}" in message for _, message in others)
    assert set(threading.enumerate()) <= threads


def test_an_island_that_leaves_early_is_an_error_for_those_who_wait_for_it():
    def island(world):
        with start(method=isles.Method.diloco(sync_every=2), world=world) as diloco:
            for _ in range(2 + 2 * world.rank):
                diloco.optimizer.step()

    with pytest.raises((isles.LostPeerError, isles.MismatchError)):
        isles.run_local(island, 2)
