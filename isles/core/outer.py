"""Outer gradients, the outer optimizer, and mixing: the arithmetic of the engine.

The outer gradient points from the island's weights back to the anchor (old minus new), so a minimiser that subtracts it
moves the anchor towards the islands. With Delta the mean and v the velocity,

    v      <-  mu * v + Delta
    anchor <-  anchor - lr * (Delta + mu * v)      Nesterov
    anchor <-  anchor - lr * v                     plain momentum

which is the form of torch.optim.SGD. lr = 1 and mu = 0 replace the anchor by the average of the islands.

Every product and sum below is an operation of its own, each rounded as IEEE prescribes. A fused multiply-add would be
faster by a little, and would round differently on different processors: islands of unlike hardware would drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isles.core import fused_outer
from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.wire import fused
from isles.wire.codec import Codec
from isles.wire.memory import empty, empty_payload, remember
from isles.wire.packing import is_finite

Position = tuple[Tensor, Tensor | None]
"""An anchor and its velocity, if there is momentum."""


@dataclass(frozen=True)
class OuterSGD:
    """SGD with (Nesterov) momentum on a flat fp32 anchor, in place; the state is the velocity, explicit and per
    fragment.
    """

    lr: float
    momentum: float
    nesterov: bool

    @classmethod
    def of(cls, method: Method) -> OuterSGD:
        return cls(lr=method.outer_lr, momentum=method.outer_momentum, nesterov=method.nesterov)

    def init(self, anchor: Tensor) -> Tensor | None:
        """The velocity before the first update; None where there is no momentum to remember."""
        return remember(anchor.new_zeros(anchor.shape)) if self.momentum else None

    def room_for(self, anchor: Tensor) -> Position:
        """New memory for an anchor and its velocity."""
        room = empty(anchor.numel(), anchor.device)
        return room, empty(anchor.numel(), anchor.device) if self.momentum else None

    def update(self, anchor: Tensor, mean: Tensor, velocity: Tensor | None) -> None:
        """One outer step: changes `anchor` and `velocity`, leaves `mean` alone."""
        if fused_outer.update(anchor, mean, velocity, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov):
            return
        if velocity is None:
            anchor.sub_(mean * self.lr)
            return
        velocity.mul_(self.momentum).add_(mean)
        direction = velocity.mul(self.momentum).add_(mean) if self.nesterov else velocity
        anchor.sub_(direction * self.lr)

    def update_into(self, new: Position, anchor: Tensor, mean: Tensor, velocity: Tensor | None) -> None:
        """The same, but what anchor and velocity are after the step is written to other memory."""
        new_anchor, new_velocity = new
        if velocity is not None and new_velocity is not None:
            room = new_anchor, new_velocity
            if self.nesterov and fused_outer.nesterov_into(
                anchor, mean, velocity, room, lr=self.lr, momentum=self.momentum
            ):
                return
            new_velocity.copy_(velocity)
        self.update(new_anchor.copy_(anchor), mean, new_velocity)


def outer_gradient(anchor: Tensor, fragment: Fragment, residual: Tensor | None) -> tuple[Tensor, bool]:
    """Delta_m = anchor - theta_m, a new vector, with what error feedback has left; and whether it is finite."""
    delta = empty(anchor.numel(), anchor.device)
    pairs = fragment.pairs(anchor)
    if pairs is None:
        torch.sub(anchor, fragment.read(), out=delta)
    else:
        start = 0
        for theta, part in pairs:
            torch.sub(part, theta, out=delta[start : start + part.numel()])
            start += part.numel()
    if residual is not None:
        delta += residual
    return delta, is_finite(delta)


def encoded_outer_gradient(anchor: Tensor, fragment: Fragment, codec: Codec) -> tuple[Tensor, bool] | None:
    """Its payload in one pass over memory: Delta_m itself is written nowhere; and whether it is finite. None where that
    cannot be done (see `isles.wire.fused`).
    """
    tensors = fragment.tensors_in_place()
    if tensors is None or not anchor.is_cpu:
        return None
    payload = empty_payload(codec.num_bytes(fragment.numel))
    finite = fused.encode_difference(codec, anchor, tensors, payload)
    return None if finite is None else (payload, finite)


def mix(fragment: Fragment, anchor: Tensor, alpha: float) -> None:
    """theta_m = alpha * theta_m + (1 - alpha) * anchor."""
    if alpha == 0:
        fragment.write(anchor)
    elif alpha < 1:
        tensors = fragment.tensors_in_place()
        if tensors is not None and fused_outer.mix(tensors, anchor, alpha):
            return
        if (pairs := fragment.pairs(anchor)) is not None:
            for theta, part in pairs:
                mix_vectors(theta, part, alpha)
        else:
            theta = fragment.read()
            mix_vectors(theta, anchor, alpha)
            fragment.write(theta)


def mix_vectors(theta: Tensor, anchor: Tensor, alpha: float) -> None:
    """The same for flat vectors, in place."""
    if not fused_outer.mix([theta], anchor, alpha):
        theta.mul_(alpha).add_(anchor * (1 - alpha))
