"""What the engine says about its own traffic is what goes through the world, and every event is told in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import isles
from isles.wire.message import HEADER_BYTES
from tests.reference import Tower, toy_backward

torch.set_num_threads(1)


class Recording:
    """A world that writes down what goes through it."""

    def __init__(self, world: Any) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        self.payloads: list[Any] = []
        self.handles: list[Any] = []

    def start(self, payload: Any) -> Any:
        self.payloads.append(payload)
        self.handles.append(self.world.start(payload))
        return self.handles[-1]

    def gather(self, data: bytes) -> list[bytes]:
        return self.world.gather(data)


def train(world: Any, method: isles.Method, steps: int, model: nn.Module | None = None, **options: Any) -> isles.DiLoCo:
    model = Tower(2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with isles.DiLoCo(model, optimizer, method, world=world, **options) as diloco:
        for step in range(1, steps + 1):
            toy_backward(model, world.rank, step)
            optimizer.step()
    return diloco


@pytest.mark.parametrize(
    ("update", "sync_initial"), [("fresh", False), ("delayed", False), ("fresh", True), ("eager", False)]
)
def test_bytes_are_those_that_crossed_the_link(update, sync_initial):
    """Also those before the first round (`sync_initial`) and after the last (eager anchors are averaged at the end)."""
    method = isles.Method(sync_every=3, fragments=2, codec="e3m0", update=update)

    def island(world):
        recording = Recording(world)
        model = Tower(2, seed=world.rank if sync_initial else 0)
        stats = train(recording, method, 7, model=model, sync_initial=sync_initial).stats
        return stats, recording

    weights = sum(parameter.nbytes for parameter in Tower(2).parameters()) if sync_initial else 0
    for rank, (stats, recording) in enumerate(isles.run_local(island, 3)):
        copied = (2 * weights, 0) if rank == 0 else (0, weights)  # island 0's initial weights go to the two others
        assert stats.bytes_sent - copied[0] == sum(handle.bytes_sent for handle in recording.handles) > 0
        assert stats.bytes_received - copied[1] == sum(handle.bytes_received for handle in recording.handles)
        outer = [payload for payload in recording.payloads if payload.round >= 1]
        assert stats.sends == stats.applies == len(outer) == 5
        assert stats.payload_bytes == sum(payload.body.numel() for payload in outer)
        assert stats.wait_seconds >= 0.0
        assert stats.nonfinite_rounds == 0


@pytest.mark.parametrize("codec", sorted(isles.codecs))
def test_bytes_of_two_islands_are_header_and_payload(codec):
    method = isles.Method(sync_every=2, fragments=1, codec=codec)
    parameters = sum(parameter.numel() for parameter in Tower(2).parameters())
    num_bytes = isles.codecs[codec].encode(torch.zeros(parameters)).numel()
    for diloco in isles.run_local(lambda world: train(world, method, 6), 2):
        assert diloco.stats.bytes_sent == diloco.stats.bytes_received == 3 * (HEADER_BYTES + num_bytes)
        assert diloco.stats.payload_bits_per_parameter == pytest.approx(8 * num_bytes / parameters)


@pytest.mark.parametrize(("parameters", "bits"), [(100_000, 4.15), (1_000_003, 4.15)])
def test_e3m0_takes_little_more_than_four_bits(parameters, bits):
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(parameters))

    method = isles.Method.streaming(sync_every=2)
    for diloco in isles.run_local(lambda world: train(world, method, 3, Flat()), 2):
        assert 4.0 < diloco.stats.payload_bits_per_parameter <= bits


def test_stats_can_be_logged_as_a_dictionary():
    stats = train(isles.LocalWorld.alone(), isles.Method.diloco(sync_every=2), 4).stats
    as_dictionary = dict(stats)
    for name in ("bytes_sent", "bytes_received", "sends", "applies", "wait_seconds", "payload_bits_per_parameter"):
        assert as_dictionary[name] == getattr(stats, name) == stats[name]
    assert dict(isles.Stats())["payload_bits_per_parameter"] == 0.0
    with pytest.raises(KeyError):
        stats["nonsense"]


def test_every_event_is_told_in_order():
    method = isles.Method(sync_every=4, fragments=2, overlap=3)

    def island(world):
        events: list[isles.Event] = []
        diloco = train(world, method, 9, on_event=events.append)
        return events, diloco

    for events, diloco in isles.run_local(island, 2):
        assert [(event.kind, event.step, event.fragment, event.round) for event in events] == [
            ("send", 2, 1, 1),
            ("send", 4, 0, 1),
            ("apply", 5, 1, 1),
            ("send", 6, 1, 2),
            ("apply", 7, 0, 1),
            ("send", 8, 0, 2),
            ("apply", 9, 1, 2),
            ("apply", 9, 0, 2),  # by finish()
        ]
        closing = sum(HEADER_BYTES + 4 * fragment.numel for fragment in diloco.fragments)  # what step 9 has added
        assert sum(event.num_bytes for event in events) == diloco.stats.bytes_sent - closing
        assert all(event.seconds >= 0 for event in events)
        assert sum(event.seconds for event in events if event.kind == "apply") == pytest.approx(
            diloco.stats.wait_seconds
        )
