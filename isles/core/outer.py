"""Outer gradients, the outer optimizer, and mixing: the arithmetic of the engine.

The outer gradient points from the island's weights back to the anchor (old minus new), so a minimiser that subtracts it
moves the anchor towards the islands. With Delta the mean and v the velocity,

    v      <-  mu * v + Delta
    anchor <-  anchor - lr * (Delta + mu * v)      Nesterov
    anchor <-  anchor - lr * v                     plain momentum

which is the form of torch.optim.SGD. lr = 1 and mu = 0 replace the anchor by the average of the islands. `OuterSGD` is
that; `TorchOuter` is any other optimizer of torch's, with Delta as the gradient of the anchor.

Every product and sum of `OuterSGD` is rounded by itself, as IEEE prescribes. A fused multiply-add would round
differently on different processors: islands of unlike hardware would drift apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isles.core.device import pieces
from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.wire import device_kernels, fused
from isles.wire.codec import Codec
from isles.wire.packing import empty, is_finite, memory_of_all
from isles.wire.reduction import Gathered

Position = tuple[Tensor, Tensor | None]
"""An anchor and its velocity, if there is momentum."""
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
EXAMPLE = "lambda anchors: torch.optim.AdamW(anchors, lr=0.1)"
MAKE_OPTIMIZER = f"a function from a list of anchors to a torch.optim.Optimizer, such as {EXAMPLE}"


class OuterSGD:
    """SGD with (Nesterov) momentum on a flat fp32 anchor, in place; its state, the velocity, is the caller's.

    Learning rate and momentum are those of the round, `Method.outer_at`.
    """

    def __init__(self, *, momentum: bool, nesterov: bool) -> None:
        self.momentum, self.nesterov = momentum, nesterov
        self.room: Callable[[int, torch.device], Tensor] = empty
        """Makes memory for so many values; pinned, where a device copies from it."""
        self._spare: dict[int, list[Position]] = defaultdict(list)
        """Used memory, by the number of values: several times as fast as new memory, which the system has to clear."""

    @classmethod
    def of(cls, method: Method) -> OuterSGD:
        return cls(momentum=method.outer_momentum > 0, nesterov=method.nesterov)

    def init(self, anchor: Tensor) -> Tensor | None:
        """The velocity before the first update; None where there is no momentum to remember."""
        return torch.zeros_like(anchor) if self.momentum else None

    def update(self, anchor: Tensor, mean: Tensor, velocity: Tensor | None, lr: float, momentum: float) -> None:
        """One outer step: changes `anchor` and `velocity`, leaves `mean` alone."""
        if not anchor.is_cpu:
            for place in pieces(anchor.numel()):
                part = None if velocity is None else velocity[place]
                self._update(anchor[place], mean[place], part, lr, momentum)
        elif velocity is None or not (
            self.nesterov and _run_kernel("nesterov", [anchor, mean, velocity], lr, momentum)
        ):
            self._update(anchor, mean, velocity, lr, momentum)

    def _update(self, anchor: Tensor, mean: Tensor, velocity: Tensor | None, lr: float, momentum: float) -> None:
        """The same in PyTorch."""
        if velocity is None:
            anchor.sub_(mean * lr)
            return
        velocity.mul_(momentum).add_(mean)
        direction = velocity.mul(momentum).add_(mean) if self.nesterov else velocity
        anchor.sub_(direction * lr)

    def update_and_mix(
        self,
        anchor: Tensor,
        mean: Tensor | Gathered,
        velocity: Tensor | None,
        lr: float,
        momentum: float,
        thetas: Sequence[Tensor],
        alpha: float,
        more: Sequence[tuple[Tensor, float]] = (),
    ) -> None:
        """The outer step and `mix` in one pass over the memory of a device, with a mean or from the payloads of which
        it is to be made. `thetas_on_device` says where that can be done.
        """
        device_kernels.outer_step_and_mix(anchor, mean, velocity, thetas, lr, momentum, self.nesterov, alpha, more)

    def update_aside(
        self, anchor: Tensor, mean: Tensor, velocity: Tensor | None, lr: float, momentum: float
    ) -> Position:
        """The same in other memory, so that it may be done before its time: anchor and velocity after the step."""
        spare, size = self._spare[anchor.numel()], (anchor.numel(), anchor.device)
        room = self.room
        new_anchor, new_velocity = spare.pop() if spare else (room(*size), room(*size) if self.momentum else None)
        if velocity is not None and new_velocity is not None:
            vectors = [anchor, mean, velocity, new_anchor, new_velocity]
            if self.nesterov and _run_kernel("nesterov_into", vectors, lr, momentum):
                return new_anchor, new_velocity
            new_velocity.copy_(velocity)
        self.update(new_anchor.copy_(anchor), mean, new_velocity, lr, momentum)
        return new_anchor, new_velocity

    def give_back(self, anchor: Tensor, velocity: Tensor | None) -> None:
        """Memory for a later `update_aside`."""
        self._spare[anchor.numel()].append((anchor, velocity))


class TorchOuter:
    """Any optimizer of torch's as the outer one, made by the user from all anchors; it works where these are kept."""

    def __init__(self, make: MakeOptimizer, anchors: list[Tensor]) -> None:
        self._make, self._anchors = make, anchors
        self.optimizer = make(list(anchors))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            made = type(self.optimizer).__name__
            raise ValueError(f"outer_optimizer={make!r} made {made}: it must be {MAKE_OPTIMIZER}")
        held = {id(tensor) for group in self.optimizer.param_groups for tensor in group["params"]}
        if held != {id(anchor) for anchor in anchors}:
            what = "the optimizer that outer_optimizer made does not hold the anchors that it was given"
            raise ValueError(f"{what}, all of them and nothing else: make it from its argument, as in {EXAMPLE}")

    def describe(self) -> str:
        """What has to be the same on all islands."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return f"{type(self.optimizer).__name__} {groups}"

    def update(self, anchor: Tensor, mean: Tensor) -> None:
        """One outer step of one fragment; the others have no gradient, and torch's optimizers leave them alone."""
        anchor.grad = mean
        try:
            self.optimizer.step()
        finally:
            anchor.grad = None

    def state_of(self, index: int) -> dict[str, Any]:
        """What the optimizer remembers of a fragment; zeros before its first step, so that there is always the same."""
        if self.has_stepped(index):
            return dict(self.optimizer.state[self._anchors[index]])
        anchor = torch.zeros_like(self._anchors[index])
        probe = self._make([anchor])
        anchor.grad = torch.zeros_like(anchor)
        probe.step()
        return {n: value.zero_() if isinstance(value, Tensor) else value for n, value in probe.state[anchor].items()}

    def has_stepped(self, index: int) -> bool:
        return bool(self.optimizer.state.get(self._anchors[index]))

    def load_state(self, index: int, state: dict[str, Any]) -> None:
        """Puts the memory of a fragment back; an empty one means that it has not taken a step."""
        self.optimizer.state.pop(self._anchors[index], None)
        if state:
            self.optimizer.state[self._anchors[index]] = state


def outer_gradient(anchor: Tensor, fragment: Fragment, residual: Tensor | None) -> tuple[Tensor, bool]:
    """Delta_m = anchor - theta_m, a new vector, with what error feedback has left; and whether it is finite."""
    delta = empty(anchor.numel(), anchor.device)
    pairs, rooms = fragment.pairs(anchor), fragment.pairs(delta)
    if pairs is None or rooms is None:
        torch.sub(anchor, fragment.read(), out=delta)
    else:
        for (theta, part), (_, room) in zip(pairs, rooms, strict=True):
            torch.sub(part, theta, out=room)
    if residual is not None:
        delta += residual
    return delta, is_finite(delta)


def encoded_outer_gradient(anchor: Tensor, fragment: Fragment, codec: Codec) -> tuple[Tensor, bool] | None:
    """Its payload in one pass over memory, and whether it is finite; None where `isles.wire.fused` cannot do that."""
    tensors = fragment.tensors_in_place()
    return None if tensors is None else fused.encode_difference(codec, anchor, tensors)


def thetas_on_device(fragment: Fragment, anchor: Tensor) -> list[Tensor] | None:
    """The tensors of a fragment, if kernels of their device can work on them in place."""
    thetas = None if anchor.is_cpu else fragment.tensors_in_place()
    if thetas is None or not device_kernels.available(anchor) or not device_kernels.fits(thetas, anchor):
        return None
    return thetas


def mix(fragment: Fragment, anchor: Tensor, alpha: float) -> None:
    """theta_m = alpha * theta_m + (1 - alpha) * anchor."""
    if alpha == 0:
        fragment.write(anchor)
    elif alpha < 1:
        tensors = fragment.tensors_in_place()
        if tensors is not None and mix_in_place(tensors, anchor, alpha):
            return
        if (pairs := fragment.pairs(anchor, any_precision=not anchor.is_cpu)) is None:
            fragment.write(fragment.read().mul_(alpha).add_(anchor * (1 - alpha)))
            return
        for theta, part in pairs:
            for place in [slice(None)] if anchor.is_cpu else pieces(part.numel()):
                if theta.dtype is part.dtype:
                    theta[place].mul_(alpha).add_(part[place] * (1 - alpha))
                else:
                    theta[place].copy_(theta[place].float().mul_(alpha).add_(part[place] * (1 - alpha)))


def mix_in_place(thetas: Sequence[Tensor], anchor: Tensor, alpha: float) -> bool:
    """The same in one pass, theta being several tensors one after the other; returns whether it was done."""
    group, arrays = fused.kernels(fused.OUTER), memory_of_all([anchor, *thetas])
    if group is None or arrays is None:
        return False
    whole, *parts = arrays
    first = 0
    for part in parts:
        group["mix"](part, whole, first, alpha)
        first += len(part)
    assert first == len(whole)
    return True


def _run_kernel(name: str, vectors: Sequence[Tensor], *numbers: float) -> bool:
    """Runs a kernel of the outer step, if it is compiled and all vectors are plain memory; returns whether it did."""
    group, arrays = fused.kernels(fused.OUTER), memory_of_all(vectors)
    if group is None or arrays is None:
        return False
    assert len(set(map(len, arrays))) == 1
    group[name](*arrays, *numbers)
    return True


def move_along(fragment: Fragment, old: Tensor, new: Tensor) -> None:
    """theta_m = theta_m + (anchor_new - anchor_old): an island that was not in the round keeps its outer gradient."""
    fragment.write(fragment.read() + (new - old))
