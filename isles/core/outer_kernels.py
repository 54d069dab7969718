"""The outer step and the mixing as loops: see `isles.core.outer` for the formulas, `isles.core.fused_outer` for use.

Every product and sum is rounded by itself, as there. The cache of numba looks at the age of this file alone, so nothing
is imported from other files of kernels.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from isles.compiling import kernel


@kernel
def _step(anchor, mean, lr):
    for i in range(anchor.shape[0]):
        anchor[i] = anchor[i] - mean[i] * lr


@kernel
def _momentum(anchor, mean, velocity, lr, momentum):
    for i in range(anchor.shape[0]):
        speed = velocity[i] * momentum + mean[i]
        velocity[i] = speed
        anchor[i] = anchor[i] - speed * lr


@kernel
def _nesterov(anchor, mean, velocity, lr, momentum):
    for i in range(anchor.shape[0]):
        speed = velocity[i] * momentum + mean[i]
        velocity[i] = speed
        anchor[i] = anchor[i] - (speed * momentum + mean[i]) * lr


@kernel
def _mix(theta, anchor, kept, taken):
    for i in range(theta.shape[0]):
        theta[i] = theta[i] * kept + anchor[i] * taken


_VECTOR = "float32[::1]"
KERNELS = {
    "outer": {
        "step": (_step, f"void({_VECTOR}, {_VECTOR}, float32)"),
        "momentum": (_momentum, f"void({_VECTOR}, {_VECTOR}, {_VECTOR}, float32, float32)"),
        "nesterov": (_nesterov, f"void({_VECTOR}, {_VECTOR}, {_VECTOR}, float32, float32)"),
        "mix": (_mix, f"void({_VECTOR}, {_VECTOR}, float32, float32)"),
    }
}
