"""Loops in one pass over memory: tensors in front, the kernels of `isles.wire.kernels`, compiled by numba, behind.

What codecs do is written twice: in PyTorch, which is the definition and runs everywhere, and as kernels for the CPU.
Both give the same bits, so it never matters which one runs, only how fast. `Codec.encode`, `decode` and `accumulate` ask
here first. The answer is None where a kernel does not apply: it is not compiled, the codec has none, or the tensor is
not plain memory of the CPU. Then PyTorch does the work.

`warm_up` compiles, or loads from numba's cache on disk, before training begins; nothing else does. Without numba, or
with ISLES_FUSED=0 in the environment, there are no kernels, and one line in the log says so. Any number of threads may
be in here, and none of them holds the GIL while a kernel runs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isles.wire.packing import Array, memory_of

if TYPE_CHECKING:
    from isles.wire.codec import Codec

logger = logging.getLogger("isles")
ROW = 128
STORED: dict[str, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "bf16": np.dtype(np.uint16)}
"""What a payload is made of, where that is not bytes."""
GROUPS = ("fp32", "bf16", "int8", "int4", "e3m0")
"""Kernels come in groups: one for each of these codecs, and one for the outer step."""
OUTER = "outer"

Kernels = Mapping[str, Callable[..., Any]]
_ready: dict[str, Kernels] = {}
_said: set[str] = set()
_lock = threading.Lock()
_rows: list[Array] = []
"""Memory for a row, which nobody uses at the moment."""


# ---- compiling


def kernels(group: str) -> Kernels | None:
    """The functions of a group by name, if they are compiled."""
    return _ready.get(group)


def warm_up(groups: Collection[str] | None = None) -> bool:
    """Compiles the kernels of all groups, or of some, and returns whether they are ready. A second call costs nothing.

    Groups may be the `kernels` of codecs: the empty name, of those that have none, is passed over.
    """
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
    """Decorator: a function for numba. It runs without the GIL, and rounds as written: no fused multiply-add.

    The cache is beside the module, or in the user's cache directory where that cannot be written; where neither can be,
    every process compiles for itself.
    """
    import numba

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place for a cache
        return numba.njit(**options)(function)


def _say(level: int, line: str) -> None:
    """Once in a process, however many islands live in it."""
    if line not in _said:
        _said.add(line)
        logger.log(level, line)


# ---- codecs


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
