"""Codecs in one pass: tensors in front, the loops of `isles.wire.kernels` behind.

`Codec.encode`, `decode` and `accumulate` ask here first. The answer is None where a kernel does not apply: it is not
compiled (see `isles.compiling`; `warm_up` compiles), the codec has none, or the tensor is not plain memory of the
CPU. Then the PyTorch code of the codec does the same, to the last bit.

Any number of threads may be in here, and none of them holds the GIL while a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isles.compiling import kernels, register, warm_up
from isles.wire.memory import Array, memory_of

if TYPE_CHECKING:
    from isles.wire.codec import Codec

__all__ = ["GROUPS", "decode", "encode", "encode_difference", "merge", "warm_up"]

ROW = 128
STORED: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(np.uint16),
    "fp16": np.dtype(np.uint16),
}
"""What a payload is made of, where that is not bytes."""
GROUPS = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "e3m0")
register("isles.wire.kernels", GROUPS)


_rows: list[Array] = []
"""Memory for a row, which nobody uses at the moment."""


def encode(codec: Codec, values: Tensor, payload: Tensor) -> bool | None:
    """Writes the payload of a flat fp32 tensor; returns whether all values are finite."""
    group = None if codec.stochastic else kernels(codec.kernels)
    if group is None:
        return None
    given, stored = memory_of(values), _stored(codec, payload)
    if given is None or stored is None:
        return None
    return group["encode"](given, stored)  # type: ignore[no-any-return]


def encode_difference(codec: Codec, anchor: Tensor, thetas: Sequence[Tensor], payload: Tensor) -> bool | None:
    """Writes the payload of anchor - theta, theta being several tensors one after the other; returns whether all of it
    is finite.
    """
    group = None if codec.stochastic else kernels(codec.kernels)
    if group is None:
        return None
    whole, stored = memory_of(anchor), _stored(codec, payload)
    parts = [part for theta in thetas if (part := memory_of(theta)) is not None]
    if whole is None or stored is None or len(parts) < len(thetas):
        return None
    encode, finite, first = group["encode_difference"], True, 0
    try:
        row = _rows.pop()
    except IndexError:  # all of them are in use
        row = np.empty((1, ROW), np.float32)
    for part in parts:
        finite &= encode(whole, part, first, row, stored)
        first += len(part)
    _rows.append(row)
    assert first == len(whole)
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
    target = None if group is None else memory_of(into)
    if group is None or target is None:
        return None
    stored = _stored(codec, payload)
    if stored is None:  # maybe a piece of a longer buffer, at an odd address: a copy of it begins where it should
        stored = _stored(codec, payload.clone())
        if stored is None:
            return None
    return group["merge"](stored, target, weight, fresh, start, divisor)  # type: ignore[no-any-return]


def _stored(codec: Codec, payload: Tensor) -> Array | None:
    """A payload as an array of what it is made of; None if it is not plain memory, or begins at an odd address."""
    given = memory_of(payload, torch.uint8)
    kind = STORED.get(codec.kernels)
    if given is None or kind is None:
        return given
    return given.view(kind) if payload.data_ptr() % kind.itemsize == 0 else None
