"""Loops in one pass over memory: tensors in front, the kernels of `isles.wire.kernels`, compiled by numba, behind.

What codecs do is defined in PyTorch, which runs everywhere, and written again as kernels: for the CPU, and for
accelerators (`isles.wire.device_kernels`). All give the same bits. `Codec.encode`, `decode` and `accumulate` ask here
first. The answer is None where a kernel does not apply (not compiled, none for this codec, or not plain memory of the
CPU or of a device that has kernels); then PyTorch does the work.

`warm_up` compiles, or loads from numba's cache on disk, before training begins; nothing else does. Without numba, or
with ISLES_FUSED=0 in the environment, there are no kernels, and one line in the log says so. Any number of threads may
be in here, and none of them holds the GIL while a kernel runs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isles.wire import device_kernels
from isles.wire.packing import Array, memory_of, memory_of_all

if TYPE_CHECKING:
    from isles.wire.codec import Codec

logger = logging.getLogger("isles")
ROW = 128
GROUPS, OUTER = ("fp32", "bf16", "int8", "int4", "e3m0"), "outer"
"""Kernels come in groups: one for each of these codecs, and one for the outer step."""
STORED: dict[str, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "bf16": np.dtype(np.uint16)}
"""What a payload is made of, where that is not bytes."""

Kernels = Mapping[str, Callable[..., Any]]
_ready: dict[str, Kernels] = {}
_said: set[str] = set()
_lock = threading.Lock()


def kernels(group: str) -> Kernels | None:
    """The functions of a group by name, if they are compiled."""
    return _ready.get(group)


def warm_up(groups: Collection[str] | None = None) -> bool:
    """Compiles the kernels of all groups, or of some ("" means none), once; returns whether they are ready."""
    known = (*GROUPS, OUTER)
    wanted = set(known if groups is None else groups) - {""}
    if unknown := sorted(wanted - set(known)):
        raise ValueError(f"no kernels called {', '.join(unknown)}: choose from {', '.join(known)}")
    with _lock:
        if os.environ.get("ISLES_FUSED") == "0":
            _say(logging.INFO, "ISLES_FUSED=0: kernels are off, codecs run in PyTorch")
        elif importlib.util.find_spec("numba") is None:
            _say(logging.INFO, "no numba (pip install 'isles[fast]'): codecs run in PyTorch, more slowly")
        else:
            try:
                for group in sorted(wanted - _ready.keys()):
                    _ready[group] = _compile(group)
            except Exception as error:  # whatever is wrong with numba here, there is a way without it
                _say(logging.WARNING, f"kernels do not compile here, codecs run in PyTorch: {error!r}")
            return wanted <= _ready.keys()
        return False


def _compile(group: str) -> Kernels:
    from isles.wire.kernels import KERNELS

    for function, signature in KERNELS[group].values():
        if not function.signatures:
            function.compile(signature)
            function.disable_compile()  # anything else than the one signature is an error, not a surprise of a second
    return {name: function for name, (function, _) in KERNELS[group].items()}


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator: a function for numba. It runs without the GIL, and rounds as written: no fused multiply-add."""
    import numba

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither here nor in the user's cache directory can files be written: no cache
        return numba.njit(**options)(function)


def _say(level: int, line: str) -> None:
    """Once in a process, however many islands live in it."""
    if line not in _said:
        _said.add(line)
        logger.log(level, line)


def encode(codec: Codec, values: Tensor, payload: Tensor) -> bool | None:
    """Writes the payload of a flat fp32 tensor; returns whether all values are finite."""
    if _on_device(values):
        return device_kernels.encode(codec, values, payload)
    group = None if codec.stochastic else kernels(codec.kernels)
    given, stored = memory_of(values), _stored(codec, payload)
    if group is None or given is None or stored is None:
        return None
    return group["encode"](given, stored)


def encode_difference(codec: Codec, anchor: Tensor, thetas: Iterable[Tensor]) -> tuple[Tensor, bool] | None:
    """The payload of anchor - theta, theta being several tensors in a row, and whether all of it is finite."""
    group = None if codec.stochastic else kernels(codec.kernels)
    arrays = memory_of_all([anchor, *thetas])
    if group is None or arrays is None:
        return None
    whole, *parts = arrays
    payload = np.empty(codec.num_bytes(len(whole)), np.uint8)
    stored, row = payload.view(STORED.get(codec.kernels, np.uint8)), np.empty((1, ROW), np.float32)
    finite, first = True, 0
    for part in parts:
        finite &= group["encode_difference"](whole, part, first, row, stored)
        first += len(part)
    assert first == len(whole)
    return torch.from_numpy(payload), finite


def decode(codec: Codec, payload: Tensor, values: Tensor) -> bool:
    """Writes the values of a payload; returns whether it did."""
    return merge(codec, payload, values, 1.0, fresh=True, divisor=1.0, start=-0.0) is not None


def merge(
    codec: Codec, payload: Tensor, into: Tensor, weight: float, fresh: bool, divisor: float, start: float = 0.0
) -> bool | None:
    """into = (into + weight * decoded) / divisor, `start` for into where `fresh`; returns whether all is finite."""
    if _on_device(into):
        return device_kernels.merge(codec, payload, into, weight, start if fresh else None, divisor)
    group, target = kernels(codec.kernels), memory_of(into)
    if group is None or target is None:
        return None
    stored = _stored(codec, payload)
    if stored is None:  # maybe a piece of a longer buffer, at an odd address: a copy of it begins where it should
        stored = _stored(codec, payload.clone())
    return None if stored is None else group["merge"](stored, target, weight, fresh, start, divisor)


def _stored(codec: Codec, payload: Tensor) -> Array | None:
    """A payload as an array of what it is made of; None if it is not plain memory, or begins at an odd address."""
    given, kind = memory_of(payload, torch.uint8), STORED.get(codec.kernels)
    if given is None or kind is None:
        return given
    return given.view(kind) if payload.data_ptr() % kind.itemsize == 0 else None


def _on_device(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_cpu
