"""Outer state off the device: kept in host memory, fetched one inner step before it is needed.

Anchor, velocity and residual of a fragment are needed only at the steps at which it is sent or applied, and the
schedule says in advance which these are. So they can be *offloaded*, to pinned host memory, and only what the coming
step needs is *resident* on the device: prefetched on the side stream (`isles.core.device`) while the inner step before
it still runs, and written back when the step is done, if it has changed. A send needs no velocity. Where the outer step
is taken on the host, beside the loop, an apply needs the new anchor alone. Without offloading (`outer_device=None`) the
state is on the model's device all the time and nothing is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from isles.core.device import HAPPENED, Event, SideStream, Upload, pinned
from isles.core.outer import Position
from isles.core.state import VECTORS, OuterState, load_progress, progress_of, vectors_of


class Offload:
    """The outer states of all fragments; `take` gives one to work on, `write_back` ends the work of a step."""

    def __init__(self, states: list[OuterState], outer_device: torch.device | None, sides: list[SideStream]) -> None:
        self.states, self.in_use = states, outer_device is not None
        """Where they are kept."""
        self._sides = sides
        self._resident: dict[int, OuterState] = {}
        """What is on the device now, by fragment."""
        self._arrives: dict[int, Event] = {}
        """When it is there."""
        self._changed: dict[int, set[str]] = {}
        """Which tensors of those are to be written back."""
        self._written: dict[int, Event] = {}
        """When what was written back is in host memory."""
        if outer_device is not None:
            for state, side in zip(states, sides, strict=True):
                for name, tensor in vectors_of(state).items():
                    setattr(state, name, _offloaded(tensor, outer_device, side))

    def prefetch(self, fragment: int, names: Collection[str] = VECTORS) -> None:
        """Starts to copy the state of a fragment to the device, or these vectors and the anchor, without waiting."""
        if not self.in_use:
            return
        home, side = self.states[fragment], self._sides[fragment]
        if fragment not in self._resident:
            nothing = dict.fromkeys(VECTORS)
            self._resident[fragment] = dataclasses.replace(home, **nothing)  # type: ignore[arg-type]
        resident = self._resident[fragment]
        missing = {
            name: vector
            for name, vector in vectors_of(home).items()
            if name in ("anchor", *names) and getattr(resident, name) is None
        }
        if missing:
            with side.use():
                for name, vector in missing.items():
                    setattr(resident, name, vector.to(side.device, non_blocking=True, copy=True))
                self._arrives[fragment] = side.mark()

    def peek(self, fragment: int) -> OuterState:
        """The state of a fragment for its plain values: nothing is fetched."""
        return self._resident.get(fragment, self.states[fragment])

    def take(
        self, fragment: int, names: Collection[str] = VECTORS, *, changing: Collection[str] = (), aside: bool = False
    ) -> OuterState:
        """The state of a fragment on the device, or these vectors of it and the anchor, for the training stream or, if
        `aside`, for the side stream. Tensors that are `changing` in place will have to be written back.
        """
        if not self.in_use:
            return self.states[fragment]
        self.prefetch(fragment, names)
        self._changed.setdefault(fragment, set()).update(changing)
        resident = self._resident[fragment]
        if not aside:
            self._sides[fragment].hold(self._arrives[fragment], *vectors_of(resident).values())
        return resident

    def at_home(self, fragment: int) -> OuterState:
        """The state where it is kept, for a thread beside the loop: waits until what was written back is there."""
        self._written.get(fragment, HAPPENED).synchronize()
        return self.states[fragment]

    def replace(self, fragment: int, stepped: Position, arriving: Upload | None) -> Position:
        """Puts another anchor and velocity in the place of those that are kept, and returns these. `arriving` is the
        new anchor on its way to the device.
        """
        home, side = self.states[fragment], self._sides[fragment]
        old = home.anchor, home.velocity
        home.anchor, home.velocity = stepped
        if self.in_use:
            resident = self._resident.setdefault(fragment, dataclasses.replace(home, residual=None))
            here = (arriving or Upload(side, home.anchor)).result()
            resident.anchor, resident.velocity = here if side.asynchronous else here.clone(), None
            self._changed.get(fragment, set()).difference_update(("anchor", "velocity"))
            self._arrives.setdefault(fragment, HAPPENED)
        return old

    def step_at_home(self, fragment: int, step: Callable[[Tensor, Tensor], None], delta: Tensor) -> None:
        """An outer step by an optimizer that holds the anchor where it is kept. Nothing is resident after it."""
        self.write_back()
        anchor = self.at_home(fragment).anchor
        step(anchor, delta.to(anchor.device))

    def write_back(self) -> None:
        """Ends the work: what has changed is copied to the host, and memory of the device is free."""
        for fragment in self._resident:
            self.write(fragment)
            load_progress(self.states[fragment], progress_of(self._resident[fragment]))
        self._resident.clear()
        self._arrives.clear()

    def write(self, fragment: int) -> None:
        """Starts to copy what has changed of a fragment to where it is kept."""
        changed = self._changed.pop(fragment, None)
        if not changed or fragment not in self._resident:
            return
        home, side = self.states[fragment], self._sides[fragment]
        with side.follow():
            for name, tensor in vectors_of(self._resident[fragment]).items():
                if name in changed:
                    getattr(home, name).copy_(tensor, non_blocking=True)
            self._written[fragment] = side.mark()

    def settle(self) -> list[OuterState]:
        """All states where they are kept, when everything has been written back. The host waits for that."""
        self.write_back()
        for event in self._written.values():
            event.synchronize()
        self._written.clear()
        for side in set(self._sides):
            side.join()
        return self.states


def _offloaded(tensor: Tensor, device: torch.device, side: SideStream) -> Tensor:
    if side.asynchronous and device.type == "cpu":
        return pinned(tensor.numel(), tensor.dtype).copy_(tensor)
    return torch.empty_like(tensor, device=device).copy_(tensor)
