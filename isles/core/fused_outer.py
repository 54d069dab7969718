"""The outer step in one pass over memory, and the mixing in another.

`OuterSGD.update` in PyTorch is five passes with Nesterov momentum, and theta = alpha * theta + (1 - alpha) * anchor
three. These do the same, in place, to the last bit, and say whether they did: that is so where the kernels are compiled
(`isles.wire.fused.warm_up`) and all tensors are plain fp32 memory of the CPU. Elsewhere use PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from isles.compiling import kernels, register
from isles.wire.fused import memory_of
from isles.wire.packing import empty

GROUP = "outer"
register("isles.core.outer_kernels", [GROUP])


def update(
    anchor: Tensor, mean: Tensor, velocity: Tensor | None, *, lr: float, momentum: float, nesterov: bool
) -> bool:
    """One outer step, as `OuterSGD.update`: changes `anchor` and `velocity`, leaves `mean` alone."""
    group = kernels(GROUP)
    if group is None or (position := memory_of(anchor)) is None or (step := memory_of(mean)) is None:
        return False
    assert len(step) == len(position)
    if velocity is None:
        group["step"](position, step, lr)
        return True
    if (speed := memory_of(velocity)) is None:
        return False
    assert len(speed) == len(position)
    group["nesterov" if nesterov else "momentum"](position, step, speed, lr, momentum)
    return True


def updated(
    anchor: Tensor, mean: Tensor, velocity: Tensor, *, lr: float, momentum: float
) -> tuple[Tensor, Tensor] | None:
    """Anchor and velocity after a step with Nesterov momentum, in new memory."""
    group = kernels(GROUP)
    before = [memory for tensor in (anchor, mean, velocity) if (memory := memory_of(tensor)) is not None]
    if group is None or len(before) < 3:
        return None
    assert len({len(memory) for memory in before}) == 1
    after, speed = empty(anchor.numel()), empty(anchor.numel())
    group["nesterov_ahead"](*before, lr, momentum, after.numpy(), speed.numpy())
    return after, speed


def mix(thetas: Sequence[Tensor], anchor: Tensor, alpha: float) -> bool:
    """theta = alpha * theta + (1 - alpha) * anchor, theta being several tensors one after the other."""
    group = kernels(GROUP)
    if group is None or (whole := memory_of(anchor)) is None:
        return False
    parts = [part for theta in thetas if (part := memory_of(theta)) is not None]
    if len(parts) < len(thetas):
        return False
    kernel, first = group["mix"], 0
    for part in parts:
        kernel(part, whole, first, alpha)
        first += len(part)
    assert first == len(whole)
    return True
