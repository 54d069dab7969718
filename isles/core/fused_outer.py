"""The outer step in one pass over memory, and the mixing in another.

`OuterSGD.update` in PyTorch is five passes with Nesterov momentum, and theta = alpha * theta + (1 - alpha) * anchor
three. These do the same, in place, to the last bit. They apply where `available` says so: the kernels are compiled
(`isles.wire.fused.warm_up`), and all tensors are flat fp32 memory of the CPU. Elsewhere use PyTorch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isles.compiling import kernels, register
from isles.wire.fused import applies
from isles.wire.packing import empty

GROUP = "outer"
register("isles.core.outer_kernels", [GROUP])


def available(*tensors: Tensor) -> bool:
    """Whether `update` and `mix` can be called with these tensors."""
    if kernels(GROUP) is None or not applies(*tensors):
        return False
    return all([tensor.dtype == torch.float32 and tensor.dim() == 1 for tensor in tensors])


def difference(anchor: Tensor, theta: Tensor, into: Tensor) -> bool:
    """into = anchor - theta; returns whether all of it is finite."""
    group = kernels(GROUP)
    assert group is not None
    assert anchor.shape == theta.shape == into.shape
    return bool(group["difference"](anchor.numpy(), theta.numpy(), into.numpy()))


def update(
    anchor: Tensor, mean: Tensor, velocity: Tensor | None, *, lr: float, momentum: float, nesterov: bool
) -> None:
    """One outer step, as `OuterSGD.update`: changes `anchor` and `velocity`, leaves `mean` alone."""
    group = kernels(GROUP)
    assert group is not None
    assert mean.shape == anchor.shape
    if velocity is None:
        group["step"](anchor.numpy(), mean.numpy(), np.float32(lr))
        return
    assert velocity.shape == anchor.shape
    step = group["nesterov" if nesterov else "momentum"]
    step(anchor.numpy(), mean.numpy(), velocity.numpy(), np.float32(lr), np.float32(momentum))


def updated(anchor: Tensor, mean: Tensor, velocity: Tensor, *, lr: float, momentum: float) -> tuple[Tensor, Tensor]:
    """Anchor and velocity after a step with Nesterov momentum, in new memory."""
    group = kernels(GROUP)
    assert group is not None
    assert mean.shape == anchor.shape == velocity.shape
    after, speed = empty(anchor.numel()), empty(anchor.numel())
    numbers = np.float32(lr), np.float32(momentum)
    group["nesterov_ahead"](anchor.numpy(), mean.numpy(), velocity.numpy(), *numbers, after.numpy(), speed.numpy())
    return after, speed


def mix(theta: Tensor, anchor: Tensor, alpha: float) -> None:
    """theta = alpha * theta + (1 - alpha) * anchor."""
    group = kernels(GROUP)
    assert group is not None
    assert theta.shape == anchor.shape
    group["mix"](theta.numpy(), anchor.numpy(), np.float32(alpha), np.float32(1 - alpha))
