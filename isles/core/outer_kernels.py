"""The outer step and the mixing as loops: see `isles.core.outer` for the formulas, `isles.core.fused_outer` for use.

Every product and sum is rounded by itself, as there. The cache of numba looks at the age of this file alone, so nothing
is imported from other files of kernels.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

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
def _nesterov_ahead(anchor, mean, velocity, lr, momentum, new_anchor, new_velocity):
    for i in range(anchor.shape[0]):
        speed = velocity[i] * momentum + mean[i]
        new_velocity[i] = speed
        new_anchor[i] = anchor[i] - (speed * momentum + mean[i]) * lr


@kernel
def _mix(theta, anchor, kept, taken):
    for i in range(theta.shape[0]):
        theta[i] = theta[i] * kept + anchor[i] * taken


@kernel
def _difference(anchor, theta, into):
    largest = np.uint32(0)
    for i in range(anchor.shape[0]):
        value = anchor[i] - theta[i]
        into[i] = value
        largest = max(largest, np.uint32(np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    return largest < np.uint32(0x7F800000)  # the bits of infinity; those of NaN are larger


_VECTOR = "float32[::1]"
KERNELS = {
    "outer": {
        "step": (_step, f"void({_VECTOR}, {_VECTOR}, float32)"),
        "momentum": (_momentum, f"void({_VECTOR}, {_VECTOR}, {_VECTOR}, float32, float32)"),
        "nesterov": (_nesterov, f"void({_VECTOR}, {_VECTOR}, {_VECTOR}, float32, float32)"),
        "nesterov_ahead": (
            _nesterov_ahead,
            f"void({_VECTOR}, {_VECTOR}, {_VECTOR}, float32, float32, {_VECTOR}, {_VECTOR})",
        ),
        "difference": (_difference, f"boolean({_VECTOR}, {_VECTOR}, {_VECTOR})"),
        "mix": (_mix, f"void({_VECTOR}, {_VECTOR}, float32, float32)"),
    }
}
