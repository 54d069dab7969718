"""The engine on an accelerator, the pretend device of `tests.pretend`: it gives the CPU's weights, bit for bit, and the
host never waits for the device in the loop. Every wait between streams that is there is needed.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import isles
from isles.core import device as devices
from isles.core.offload import Offload
from isles.core.state import OuterState
from tests import pretend, processes

STEPS = 50
METHODS = {
    "streaming": isles.Method.streaming(sync_every=10, fragments=3, overlap=2, mixing=0.5),
    "one step late": isles.Method.streaming(sync_every=6, fragments=2, overlap=1),
    "whole round late": isles.Method.distant(sync_every=8, fragments=2),
    "diloco": isles.Method.diloco(sync_every=10, codec="e3m0"),
    "gradual": isles.Method.gradual(sync_every=8, fragments=2, overlap=2, dense_start=[(2, 2)], warmup_rounds=2),
    "delayed": isles.Method.delayed(sync_every=6, fragments=2, codec="e3m0"),
    "eager": isles.Method.eager(sync_every=6, fragments=2, codec="e3m0"),
    "feedback": isles.Method.streaming(sync_every=8, fragments=2, overlap=2, codec="int4", error_feedback=True),
    "int8": isles.Method.streaming(sync_every=10, fragments=2, overlap=3, codec="int8"),
    "bf16": isles.Method.streaming(sync_every=10, fragments=2, overlap=3, codec="bf16"),
    "stochastic": isles.Method.streaming(sync_every=10, fragments=2, overlap=2, rounding="stochastic"),
}


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def stack(width: int = 20, layers: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, dtype) for _ in range(layers)))


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().cpu().flatten() for parameter in model.parameters()])


def train(rank, world, method, on_device, steps=STEPS, watch=None, dtype=torch.float32, **options):
    """Weights after the last step and after finish(), and anchors. `watch` is called after every step."""
    model = stack(dtype=dtype)
    rows = [torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * rank + step)) for step in range(steps)]
    rows = [each.to(dtype) for each in rows]
    if on_device:
        pretend.on_device(model)
        rows = [each.to("pretend") for each in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = isles.DiLoCo(model, optimizer, method, world=world, **options)

    def loop():
        for step in range(steps):
            model(rows[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch(step + 1, model, diloco)

    if on_device:
        with pretend.no_waiting():
            loop()
    else:
        loop()
    trained = weights_of(model)
    anchors = torch.cat([anchor.cpu() for anchor in diloco._rounds.anchors()])
    diloco.finish()
    diloco.close()
    return trained, anchors, weights_of(model), diloco.stats


def both(rank, name, dtype, options):
    """One island of two, on the CPU and then on the device. Returns what differs, and what the device complains of."""
    devices.LEAST_PIECE = 128  # several pieces in a fragment, the last one not full
    pretend.install()  # before autograd has started a thread for every device
    host = train(rank, isles.TorchWorld(), METHODS[name], False, dtype=dtype, **options)
    device = train(rank, isles.TorchWorld(), METHODS[name], True, dtype=dtype, **options)
    wrong = pretend.settled()
    for mine, other, what in zip(host[:3], device[:3], ("weights", "anchors", "the final model"), strict=True):
        if not torch.equal(mine, other):
            wrong.append(f"{what} differ from the CPU's")
    assert host[3].applies == device[3].applies > 0
    assert pretend.machine.host_waits > 0, "threads beside the loop waited for the device"
    return wrong


@pytest.mark.parametrize("outer_device", [None, "cpu"])
@pytest.mark.parametrize("name", METHODS)
def test_a_device_trains_as_the_cpu_does_and_the_host_never_waits(name, outer_device, tmp_path):
    options = {"outer_device": outer_device}
    for wrong in processes.values(both, 2, tmp_path, name, torch.float32, options):
        assert wrong == []


def test_parameters_of_other_precisions(tmp_path):
    for wrong in processes.values(both, 2, tmp_path, "streaming", torch.bfloat16, {}):
        assert wrong == []


# ---- every wait is needed


class Happened(pretend.Event):
    """An event that nobody waits for."""


def without(which):
    """Takes one kind of wait out of the engine."""
    side, use, hold = devices.SideStream, devices.SideStream.use, devices.SideStream.hold
    if which == "before theta is read":
        side.follow = use
    elif which == "until theta has been read":
        side.hold = lambda self, event, *tensors: hold(self, event, *tensors) if tensors else None
    elif which == "until the result is there":
        side.hold = lambda self, event, *tensors: hold(self, Happened() if tensors else event, *tensors)
    elif which == "until memory may be dropped":
        side.hold = lambda self, event, *tensors: hold(self, event)
    elif which == "until the payload is on the host":
        pretend.Event.synchronize = lambda self: None


WAITS = {
    "before theta is read": "without having waited for it",
    "until theta has been read": "writes what stream 2 still reads",
    "until the result is there": "without having waited for it",
    "until memory may be dropped": "was dropped while stream 1 used it",
    "until the payload is on the host": "",  # rubbish is sent: a wrong checksum, other weights
}
"""And how it shows."""


def broken(rank, which, outer_device):
    without(which)
    try:
        return both(rank, "streaming", torch.float32, {"outer_device": outer_device})
    except (RuntimeError, ValueError) as error:  # of one island; the other one loses it
        return [str(error), *pretend.machine.violations]


@pytest.mark.parametrize("outer_device", [None, "cpu"])
@pytest.mark.parametrize("which", WAITS)
def test_a_wait_that_is_missing_is_noticed(which, outer_device, tmp_path):
    for wrong in processes.values(broken, 2, tmp_path, which, outer_device):
        assert any(WAITS[which] in each for each in wrong), wrong


def offloaded(rank, which):
    """What was written back is read at home by another thread, and fetched again."""
    device = pretend.install()
    anchor = torch.arange(1000.0).to(device)
    sides = devices.sides_of([device])
    offload = Offload([OuterState(anchor, None, None)], torch.device("cpu"), sides)
    if which == "before it is written back":
        devices.SideStream.follow = devices.SideStream.use
    if which == "until it is at home":
        pretend.Event.synchronize = lambda self: None
    with pretend.no_waiting():
        offload.take(0, changing=("anchor",)).anchor.add_(1.0)
        offload.write_back()
        again = offload.take(0).anchor
        home = []
        thread = threading.Thread(target=lambda: home.append(offload.at_home(0).anchor.clone()))
        thread.start()
        thread.join()
    expected = torch.arange(1000.0) + 1.0
    assert torch.equal(again.cpu(), expected)
    return [] if torch.equal(home[0], expected) else ["rubbish"]


def test_what_is_written_back_is_there_when_it_is_read(tmp_path):
    assert processes.values(offloaded, 1, tmp_path, "") == [[]]
    assert processes.values(offloaded, 1, tmp_path, "until it is at home") == [["rubbish"]]
    (outcome,) = processes.run(offloaded, 1, tmp_path, "before it is written back")
    assert "without having waited for it" in outcome.message


# ---- the device itself


def rules(rank):
    """What the pretend device refuses, one after the other."""
    device = pretend.install()
    values, side, caught = torch.ones(8).to(device), pretend.Stream(), {}

    def attempt(name, action):
        try:
            with pretend.no_waiting():
                action()
            caught[name] = ""
        except pretend.Violation as violation:
            caught[name] = str(violation)

    attempt("item", lambda: values[0].item())
    attempt("bool", lambda: bool(values.sum() > 0))
    attempt("cpu", lambda: values.cpu())
    attempt("numbers", lambda: torch.where(values > 0, values, torch.tensor(1.0)))
    attempt("list", lambda: torch.tensor([1.0, 2.0], device=device))
    attempt("mask", lambda: values[values > 0])
    attempt("to pageable", lambda: torch.empty(8).copy_(values, non_blocking=True))
    attempt("from pageable", lambda: values.copy_(torch.ones(8), non_blocking=True))
    attempt("host memory", lambda: values + torch.ones(8))
    attempt("unwritten", lambda: torch.empty(8, device=device) + 1)
    attempt("event", lambda: pretend.Event().synchronize())
    attempt("pinned", lambda: torch.empty(8, pin_memory=True).copy_(values, non_blocking=True))
    attempt("other stream", lambda: in_stream(side, lambda: values.add_(1.0)))
    attempt(
        "other stream, waited for", lambda: (side.wait_stream(pretend.current_stream()), in_stream(side, values.neg))
    )
    attempt("back", lambda: values.add_(1.0))
    return caught


def in_stream(stream, action):
    with pretend.stream_context(stream):
        action()


def test_what_the_pretend_device_refuses(tmp_path):
    (caught,) = processes.values(rules, 1, tmp_path)
    assert caught.pop("pinned") == caught.pop("other stream, waited for") == ""
    for name in ("item", "bool", "cpu", "numbers", "list", "mask", "to pageable", "from pageable"):
        assert "the host waits" in caught.pop(name), name
    assert "waits for an event" in caught.pop("event")
    assert "memory of the host" in caught.pop("host memory")
    assert "nobody has written" in caught.pop("unwritten")
    assert "without having waited for it" in caught.pop("other stream")
    assert "still reads" in caught.pop("back")
    assert caught == {}
