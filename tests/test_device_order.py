"""The order of work on a device: every wait that the engine has is needed, the pretend device refuses what it should,
and what a device holds at the most.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

import isles
from isles.core import device as devices
from isles.core.encoding import Encoder
from isles.core.fragments import Fragment
from isles.core.offload import Offload
from isles.core.state import OuterState
from tests import pretend, processes
from tests.test_device import both, stack

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
    results = processes.values(broken, 2, tmp_path, which, outer_device)
    assert all(results), "both islands notice, or lose the one that does"
    assert any(WAITS[which] in each for wrong in results for each in wrong), results


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


# ---- memory

WIDTH, LAYERS = 56, 12


def memory(rank, method, outer_device):
    """Peak bytes of the bare loop, and with isles; the largest temporary of isles, and the largest payload."""
    pretend.install()
    devices.LEAST_PIECE = 128
    machine = pretend.machine
    model = pretend.on_device(stack(WIDTH, LAYERS))
    rows = torch.ones(2, WIDTH).to("pretend")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step():
        time.sleep(0.05)  # compute: a step takes longer than what goes on beside it, which gives its memory back
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    machine.peak_bytes = 0
    step()
    bare = machine.peak_bytes
    optimizer.register_step_post_hook(lambda *_: setattr(machine, "watching", True))
    diloco = isles.DiLoCo(model, optimizer, method, world=isles.TorchWorld(), outer_device=outer_device)
    optimizer.register_step_post_hook(lambda *_: setattr(machine, "watching", False))
    machine.peak_bytes = 0
    with pretend.no_waiting():
        for _ in range(method.sync_every + 1):
            step()
        machine.largest_temporary = 0  # in its first rounds an eager island's own outer gradient is what it applies
        for _ in range(method.sync_every + 1):
            step()
    payload = max(diloco._rounds.codec.num_bytes(fragment.numel) for fragment in diloco.fragments)
    peak, fragments = machine.peak_bytes, len(diloco.fragments)
    diloco.finish()
    return peak / bare, machine.largest_temporary, payload, fragments, pretend.settled()


MEMORY = {
    "streaming, on the host": (isles.Method.streaming(sync_every=24, fragments=12, overlap=2), "cpu", 1.05),
    "a whole round late, on the host": (isles.Method.distant(sync_every=24, fragments=12), "cpu", 1.05),
    "eager, on the host": (isles.Method.eager(sync_every=24, fragments=12), "cpu", 1.10),
    "streaming": (isles.Method.streaming(sync_every=24, fragments=12, overlap=2), None, 1.55),
    "eager": (isles.Method.eager(sync_every=24, fragments=12), None, 1.60),
}
"""And the most that the peak of the device may be, by the peak of the bare loop. A fragment is a twelfth of the model.
Per value of the fragment that is due there are, on the host: the anchor, 4 bytes of the model's 16 per value, and with
eager updates velocity and mean, 12; a payload, and temporaries in pieces. On the device anchor and velocity are there
for all fragments, 8 of 16, and with eager updates a payload for each."""


@pytest.mark.parametrize("name", MEMORY)
def test_what_the_device_holds_at_the_most(name, tmp_path):
    method, outer_device, most = MEMORY[name]
    for ratio, temporary, payload, fragments, wrong in processes.values(memory, 2, tmp_path, method, outer_device):
        assert fragments == 12
        assert wrong == []
        assert temporary <= payload
        assert ratio <= most, f"{ratio:.3f} of the bare loop"


# ---- what it costs without kernels


def cost(rank):
    """Launches of an encode in PyTorch, and bytes a value that they read and write."""
    device, numel = pretend.install(), 128 * 128
    model = torch.nn.Linear(numel, 1, bias=False)
    fragment = Fragment(pretend.on_device(model).named_parameters())
    codec, anchor = isles.codecs["e3m0"], torch.zeros(numel).to(device)
    payload = torch.empty(codec.num_bytes(numel), dtype=torch.uint8, device=device)
    machine = pretend.machine
    machine.launches = machine.bytes_moved = 0
    Encoder(codec, keep=False)._encode_on_device(fragment, anchor, None, None, payload)
    return machine.launches, machine.bytes_moved / numel


def test_what_encoding_costs_in_pytorch(tmp_path):
    """The numbers of docs/accelerators.md and of isles doctor."""
    ((launches, num_bytes),) = processes.values(cost, 1, tmp_path)
    assert (launches, round(num_bytes)) == (41, 159)


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
