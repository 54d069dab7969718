"""Codecs in one pass: tensors in front, the loops of `isles.wire.kernels` behind.

`Codec.encode`, `decode` and `accumulate` ask here first. The answer is None where a kernel does not apply: it is not
compiled (see `isles.compiling`; `warm_up` compiles), the codec has none, or the tensor is not plain memory of the
CPU. Then the PyTorch code of the codec does the same, to the last bit.

Kernels work on rows of 128 values. A last row that is not full is filled up with zeros in a buffer of its own, as
the codecs do it with their last block. Nothing is shared between calls, so any number of threads may be in here, and
none of them holds the GIL while a kernel runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isles.compiling import kernels, register, warm_up

if TYPE_CHECKING:
    from isles.wire.codec import Codec

__all__ = ["GROUPS", "applies", "decode", "encode", "merge", "warm_up"]

ROW = 128
STORED = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.uint16}
"""What a payload is made of, where that is not bytes."""
GROUPS = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "e3m0")
register("isles.wire.kernels", GROUPS)


def applies(*tensors: Tensor) -> bool:
    """Whether kernels can work on the memory of these tensors."""
    for tensor in tensors:
        if (
            not tensor.is_cpu
            or not tensor.is_contiguous()
            or type(tensor) is not Tensor
            or tensor.requires_grad
            or tensor.data_ptr() % tensor.itemsize
        ):
            return False
    return True


def encode(codec: Codec, values: Tensor, payload: Tensor) -> bool | None:
    """Writes the payload of a flat fp32 tensor; returns whether all values are finite."""
    group = None if codec.stochastic else kernels(codec.kernels)
    if group is None or values.dtype != torch.float32 or not applies(values, payload):
        return None
    stored = _stored(codec, payload)
    if stored is None:
        return None
    given = values.numpy()
    full = len(given) // ROW * ROW
    rows = stored[: _stored_length(codec, full)]
    width = _stored_length(codec, ROW)
    finite: bool = group["encode"](given[:full].reshape(-1, ROW), rows.reshape(-1, width))
    if full < len(given):
        last, into = np.zeros((1, ROW), np.float32), np.empty((1, width), stored.dtype)
        last[0, : len(given) - full] = given[full:]
        finite &= group["encode"](last, into)
        stored[len(rows) :] = into[0, : len(stored) - len(rows)]
    return finite


def decode(codec: Codec, payload: Tensor, values: Tensor) -> bool:
    """Writes the values of a payload; returns whether it did."""
    return _merge(codec, payload, values, 1.0, fresh=True, start=-0.0, divisor=1.0) is not None


def merge(codec: Codec, payload: Tensor, into: Tensor, weight: float, fresh: bool, divisor: float) -> bool | None:
    """into = (into + weight * decoded) / divisor, where `fresh` takes into as zero; returns whether all is finite."""
    return _merge(codec, payload, into, weight, fresh, 0.0, divisor)


def _merge(
    codec: Codec, payload: Tensor, into: Tensor, weight: float, fresh: bool, start: float, divisor: float
) -> bool | None:
    group = kernels(codec.kernels)
    if group is None or into.dtype != torch.float32 or not applies(into, payload):
        return None
    stored = _stored(codec, payload)
    if stored is None:  # a piece of a longer buffer: a copy of it begins where it should
        stored = _stored(codec, payload.clone())
        assert stored is not None
    numbers = np.float32(weight), fresh, np.float32(start), np.float32(divisor)
    target = into.numpy()
    full = len(target) // ROW * ROW
    rows = stored[: _stored_length(codec, full)]
    width = _stored_length(codec, ROW)
    finite: bool = group["merge"](rows.reshape(-1, width), target[:full].reshape(-1, ROW), *numbers)
    if full < len(target):
        last, given = np.zeros((1, ROW), np.float32), np.zeros((1, width), stored.dtype)
        last[0, : len(target) - full] = target[full:]
        given[0, : len(stored) - len(rows)] = stored[len(rows) :]
        group["merge"](given, last, *numbers)
        target[full:] = last[0, : len(target) - full]
        finite &= bool(np.isfinite(target[full:]).all())
    return finite


def _stored(codec: Codec, payload: Tensor) -> np.ndarray[Any, Any] | None:
    """A payload as an array of what it is made of; None if it begins at an odd address."""
    kind = np.dtype(STORED.get(codec.kernels, np.uint8))
    return payload.numpy().view(kind) if payload.data_ptr() % kind.itemsize == 0 else None


def _stored_length(codec: Codec, numel: int) -> int:
    return codec.num_bytes(numel) // np.dtype(STORED.get(codec.kernels, np.uint8)).itemsize
