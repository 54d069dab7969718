"""The outer step and the mixing as loops: see `isles.core.outer` for the formulas, `isles.core.fused_outer` for use.

Every product and sum is rounded by itself, as there. The cache of numba looks at the age of this file alone, so nothing
is imported from other files of kernels.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from numpy import float32

from isles.compiling import kernel


@kernel
def _step(anchor, mean, lr):
    lr = float32(lr)
    for i in range(anchor.shape[0]):
        anchor[i] = anchor[i] - mean[i] * lr


@kernel
def _momentum(anchor, mean, velocity, lr, momentum):
    lr, momentum = float32(lr), float32(momentum)
    for i in range(anchor.shape[0]):
        speed = velocity[i] * momentum + mean[i]
        velocity[i] = speed
        anchor[i] = anchor[i] - speed * lr


@kernel
def _nesterov(anchor, mean, velocity, lr, momentum):
    lr, momentum = float32(lr), float32(momentum)
    for i in range(anchor.shape[0]):
        speed = velocity[i] * momentum + mean[i]
        velocity[i] = speed
        anchor[i] = anchor[i] - (speed * momentum + mean[i]) * lr


@kernel
def _nesterov_into(anchor, mean, velocity, lr, momentum, new_anchor, new_velocity):
    """The same into other memory. (Given the same memory, it would not use vectors.)"""
    lr, momentum = float32(lr), float32(momentum)
    for i in range(anchor.shape[0]):
        speed = velocity[i] * momentum + mean[i]
        new_velocity[i] = speed
        new_anchor[i] = anchor[i] - (speed * momentum + mean[i]) * lr


@kernel
def _mix(theta, anchor, first, alpha):
    kept, taken, anchor_here = float32(alpha), float32(1 - alpha), anchor[first : first + theta.shape[0]]
    for i in range(theta.shape[0]):
        theta[i] = theta[i] * kept + anchor_here[i] * taken


_VECTOR = "float32[::1]"
_WITH_MOMENTUM = f"{_VECTOR}, {_VECTOR}, {_VECTOR}, float64, float64"
KERNELS = {
    "outer": {
        "step": (_step, f"void({_VECTOR}, {_VECTOR}, float64)"),
        "momentum": (_momentum, f"void({_WITH_MOMENTUM})"),
        "nesterov": (_nesterov, f"void({_WITH_MOMENTUM})"),
        "nesterov_into": (_nesterov_into, f"void({_WITH_MOMENTUM}, {_VECTOR}, {_VECTOR})"),
        "mix": (_mix, f"void({_VECTOR}, {_VECTOR}, int64, float64)"),
    }
}
