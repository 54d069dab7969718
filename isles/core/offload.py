"""Outer state off the device: kept in host memory, fetched one inner step before it is needed.

Anchor, velocity and residual of a fragment are needed only at the steps at which it is sent or applied, and the
schedule says in advance which these are. So they can be *offloaded*, to pinned host memory, and only what the coming
step needs is *resident* on the device: prefetched while the inner step before it still runs, written back when the step
is done, if it has changed. On CUDA the copies run on a stream of their own. Without offloading (`outer_device=None`)
the state is on the model's device all the time and nothing is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from isles.core.state import OuterState, load_progress, progress_of, vectors_of


class Offload:
    """The outer states of all fragments; `take` gives one to work on, `write_back` ends the work of a step."""

    def __init__(self, states: list[OuterState], outer_device: torch.device | None) -> None:
        self.states, self.in_use = states, outer_device is not None
        """Where they are kept."""
        self._resident: dict[int, OuterState] = {}
        """What is on the device now, by fragment."""
        self._changed: dict[int, set[str]] = {}
        """Which tensors of those are to be written back."""
        self._devices = [state.anchor.device for state in states]
        gpus = {device for device in self._devices if device.type == "cuda" and self.in_use}
        self._streams = {device: torch.cuda.Stream(device) for device in gpus}
        if outer_device is not None:
            for state in states:
                for name, tensor in vectors_of(state).items():
                    setattr(state, name, _offloaded(tensor, outer_device))

    def prefetch(self, fragments: Iterable[int]) -> None:
        """Starts to copy the states of these fragments to the device, without waiting."""
        for fragment in fragments if self.in_use else ():
            if fragment not in self._resident:
                state, device = self.states[fragment], self._devices[fragment]
                with self._stream(device):
                    here = {n: t.to(device, non_blocking=True, copy=True) for n, t in vectors_of(state).items()}
                self._resident[fragment] = dataclasses.replace(state, **here)  # type: ignore[arg-type]

    def take(self, fragment: int, changing: tuple[str, ...] = ()) -> OuterState:
        """The state of a fragment on the device; tensors that are `changing` in place will have to be written back."""
        if not self.in_use:
            return self.states[fragment]
        self.prefetch([fragment])
        self._changed.setdefault(fragment, set()).update(changing)
        if stream := self._streams.get(self._devices[fragment]):
            current = torch.cuda.current_stream(self._devices[fragment])
            current.wait_stream(stream)
            for tensor in vectors_of(self._resident[fragment]).values():
                tensor.record_stream(current)
        return self._resident[fragment]

    def step_at_home(self, fragment: int, step: Callable[[Tensor, Tensor], None], delta: Tensor) -> None:
        """An outer step by an optimizer that holds the anchor where it is kept. Nothing is resident after it."""
        self.write_back()
        anchor = self.states[fragment].anchor
        step(anchor, delta.to(anchor.device))

    def write_back(self) -> None:
        """Ends the work: what has changed is copied to the host, and memory of the device is free."""
        for fragment, resident in self._resident.items():
            home, device = self.states[fragment], self._devices[fragment]
            if stream := self._streams.get(device):
                stream.wait_stream(torch.cuda.current_stream(device))
            with self._stream(device):
                for name, tensor in vectors_of(resident).items():
                    if name in self._changed.get(fragment, ()):
                        getattr(home, name).copy_(tensor, non_blocking=True)
                        if stream:
                            tensor.record_stream(stream)
            load_progress(home, progress_of(resident))
        self._resident.clear()
        self._changed.clear()

    def settle(self) -> list[OuterState]:
        """All states where they are kept, when everything has been written back."""
        self.write_back()
        for stream in self._streams.values():
            stream.synchronize()
        return self.states

    def _stream(self, device: torch.device) -> AbstractContextManager[Any]:
        stream = self._streams.get(device)
        return torch.cuda.stream(stream) if stream else nullcontext()


def _offloaded(tensor: Tensor, device: torch.device) -> Tensor:
    pinned = tensor.device.type == "cuda" and device.type == "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned).copy_(tensor)
