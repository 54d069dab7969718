"""Tensors and the memory behind them, as the flat arrays that kernels work on.

    empty(numel)         room for a new vector
    memory_of(tensor)    the array of a tensor, where it is plain memory of the CPU; None elsewhere
    remember(tensor)     that array is kept, and found at once from now on, as long as the tensor lives

To get from a tensor to an array is a matter of a microsecond, but between two visits of the engine a training step has
driven all code and data that takes part in it out of the cache, and then it is twenty: as much as a kernel takes on a
small fragment. So what is used round after round is remembered.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

_arrays: dict[int, tuple[weakref.ref[Tensor], torch.dtype, Array]] = {}
"""By the identity of a tensor, while it lives."""


def empty(numel: int, device: torch.device | None = None) -> Tensor:
    """Room for a new fp32 vector. For large ones on a CPU, numpy asks the kernel for large pages, which halves the time
    of the first pass over them.
    """
    if device is not None and device.type != "cpu":
        return torch.empty(numel, device=device)
    array = np.empty(numel, np.float32)
    return _keep(torch.from_numpy(array), array)


def empty_payload(num_bytes: int) -> Tensor:
    """Room for so many bytes, in the memory of the CPU."""
    array = np.empty(num_bytes, np.uint8)
    return _keep(torch.from_numpy(array), array)


def memory_of(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Array | None:
    """The memory of a tensor of this type as a flat array that kernels can work on, if it is such memory."""
    known = _arrays.get(id(tensor))
    if known is not None and known[0]() is tensor:
        return known[2] if known[1] is dtype else None
    if type(tensor) is not Tensor or tensor.dtype is not dtype or not tensor.is_cpu or tensor.requires_grad:
        return None
    array: Array = tensor.numpy()
    return array.reshape(-1) if array.flags.carray else None


def remember(tensor: Tensor) -> Tensor:
    """The same tensor, whose memory, if it is fp32, is found at once from now on. It must stay where it is."""
    array = memory_of(tensor.detach())  # of an alias: an array keeps the tensor alive that it is made of
    return tensor if array is None else _keep(tensor, array)


def _keep(tensor: Tensor, array: Array) -> Tensor:
    key = id(tensor)
    _arrays[key] = weakref.ref(tensor, lambda _: _arrays.pop(key, None)), tensor.dtype, array
    return tensor
