"""Outer state off the device: kept in host memory, fetched one inner step before it is needed.

Anchor, velocity and residual of a fragment are needed only at the steps at which it is sent or applied, and the
schedule says in advance which these are. So they can lie on a *shelf*, pinned host memory, and only what the coming
step needs is on the device: fetched while the inner step before it still runs, put back when the step is done.

Without a shelf (`outer_device=None`) the state is on the model's device all the time and nothing is copied. On CUDA the
copies run on a stream of their own. The code is the same for every pair of devices; on a CPU it only costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from isles.core.state import OuterState

TENSORS = ("anchor", "velocity", "residual")


class Shelf:
    """The outer states of all fragments; `take` gives one to work on, `put_back` ends the work of a step."""

    def __init__(self, states: list[OuterState], outer_device: torch.device | None) -> None:
        self._states, self.in_use = states, outer_device is not None
        self._desk: dict[int, OuterState] = {}
        """What is on the device now, by fragment."""
        self._devices = [state.anchor.device for state in states]
        self._streams = {
            device: torch.cuda.Stream(device) for device in set(self._devices) if device.type == "cuda" and self.in_use
        }
        if outer_device is not None:
            for state in states:
                for name, tensor in _tensors(state):
                    setattr(state, name, _shelved(tensor, outer_device))

    def prefetch(self, fragments: Iterable[int]) -> None:
        """Starts to bring the states of these fragments to the device, without waiting."""
        if not self.in_use:
            return
        for fragment in fragments:
            if fragment not in self._desk:
                state, device = self._states[fragment], self._devices[fragment]
                here: dict[str, Any] = {}
                with self._beside(device):
                    for name, tensor in _tensors(state):
                        here[name] = tensor.to(device, non_blocking=True, copy=True)
                self._desk[fragment] = dataclasses.replace(state, **here)

    def take(self, fragment: int) -> OuterState:
        """The state of a fragment on the device; changes in place will be put back. Rounds in flight are the same."""
        if not self.in_use:
            return self._states[fragment]
        self.prefetch([fragment])
        if stream := self._streams.get(self._devices[fragment]):
            current = torch.cuda.current_stream(self._devices[fragment])
            current.wait_stream(stream)
            for _, tensor in _tensors(self._desk[fragment]):
                tensor.record_stream(current)
        return self._desk[fragment]

    def put_back(self) -> None:
        """Ends the work: what was on the device is put back on the shelf, and its memory is free."""
        for fragment, desk in self._desk.items():
            device = self._devices[fragment]
            if stream := self._streams.get(device):
                stream.wait_stream(torch.cuda.current_stream(device))
            with self._beside(device):
                for name, tensor in _tensors(desk):
                    getattr(self._states[fragment], name).copy_(tensor, non_blocking=True)
                    if stream:
                        tensor.record_stream(stream)
            self._states[fragment].void = desk.void
        self._desk.clear()

    def settle(self) -> None:
        """Until everything is on the shelf, for whoever reads it there."""
        self.put_back()
        for stream in self._streams.values():
            stream.synchronize()

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        stream = self._streams.get(device)
        return torch.cuda.stream(stream) if stream else nullcontext()


def _tensors(state: OuterState) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name in TENSORS if (tensor := getattr(state, name)) is not None]


def _shelved(tensor: Tensor, device: torch.device) -> Tensor:
    pinned = tensor.device.type == "cuda" and device.type == "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned).copy_(tensor)
