"""The outer step in one pass over memory, and the mixing in another.

`OuterSGD.update` in PyTorch is five passes with Nesterov momentum, and theta = alpha * theta + (1 - alpha) * anchor
three. These do the same, in place, to the last bit, and say whether they did: that is so where the kernels are compiled
(`isles.wire.fused.warm_up`) and all tensors are plain fp32 memory of the CPU. Elsewhere use PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from isles.compiling import kernels, register
from isles.wire.memory import Array, memory_of

GROUP = "outer"
register("isles.core.outer_kernels", [GROUP])


def update(
    anchor: Tensor, mean: Tensor, velocity: Tensor | None, *, lr: float, momentum: float, nesterov: bool
) -> bool:
    """One outer step, as `OuterSGD.update`: changes `anchor` and `velocity`, leaves `mean` alone."""
    group = kernels(GROUP)
    memory = _memory_of_all(anchor, mean, *([] if velocity is None else [velocity]))
    if group is None or memory is None:
        return False
    if velocity is None:
        group["step"](*memory, lr)
    else:
        group["nesterov" if nesterov else "momentum"](*memory, lr, momentum)
    return True


def nesterov_into(
    anchor: Tensor, mean: Tensor, velocity: Tensor, new: tuple[Tensor, Tensor], *, lr: float, momentum: float
) -> bool:
    """A step with Nesterov momentum that writes anchor and velocity to other memory."""
    group, memory = kernels(GROUP), _memory_of_all(anchor, mean, velocity, *new)
    if group is None or memory is None:
        return False
    group["nesterov_into"](*memory[:3], lr, momentum, *memory[3:])
    return True


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


def _memory_of_all(*tensors: Tensor) -> list[Array] | None:
    """Arrays of one length; None if one of these is not such memory."""
    memory = [array for tensor in tensors if (array := memory_of(tensor)) is not None]
    if len(memory) < len(tensors):
        return None
    assert all([len(array) == len(memory[0]) for array in memory])
    return memory
