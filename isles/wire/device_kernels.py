"""Tensors in front, the kernels of `isles.wire.triton_kernels` behind: codecs and the outer step on an accelerator.

It is for devices what `isles.wire.fused` is for the CPU, and gives the same bits. The host does not wait for the
device: whether all was finite, which it will want to know, is left in a tensor. (Only `encode` and `merge` wait, with
which codecs do what they do on a CPU.)

    encode_difference(codec, anchor, thetas, payload, finite)     2 launches, whatever the number of tensors
    weighted_mean(gathered, out)                                  3 launches, whatever the number of payloads
    outer_step_and_mix(anchor, mean, velocity, thetas, ...)       1 launch; 3 where the mean is that of payloads

`encodes` and `decodes` say for which codecs, and `available` on which devices: those of Triton, and the CPU when
Triton's interpreter is on (TRITON_INTERPRET=1 before it is imported), which is how the bits are tested without a GPU.
Importing this module needs no Triton. Without it, PyTorch does the work.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isles.wire import device_tables
from isles.wire.device_tables import KINDS, ROW, table_of_payloads, table_of_tensors
from isles.wire.device_traffic import Traffic, count, counted_interpreter, counting
from isles.wire.packing import largest_scale

if TYPE_CHECKING:
    from isles.wire.codec import Codec
    from isles.wire.reduction import Gathered

__all__ = [
    "Traffic",
    "accumulate",
    "available",
    "compiling",
    "counting",
    "decodes",
    "encode",
    "encode_difference",
    "encodes",
    "fits",
    "give_up",
    "interpreted",
    "merge",
    "outer_step_and_mix",
    "weighted_mean",
]
logger = logging.getLogger("isles")
LIMITS = {"e3m0": 1, "int8": 127, "int4": 7, "bf16": 0}
"""Codecs that have kernels, with the largest value in units of the scale; bf16 has no scale."""
_given_up: set[torch.device] = set()
_interpreter = threading.Lock()
"""It keeps what it is doing in global variables."""


# ---- where, and for which codecs


def available(where: Tensor | torch.device) -> bool:
    """Whether there are kernels for tensors on this device."""
    device = where.device if isinstance(where, Tensor) else where
    if os.environ.get("ISLES_FUSED") == "0" or not _has_triton() or device in _given_up:
        return False
    return interpreted() if device.type == "cpu" else _works(device)


def encodes(codec: Codec, where: Tensor | torch.device) -> bool:
    """Whether `encode_difference` can do this codec there."""
    return not codec.stochastic and decodes(codec, where)


def decodes(codec: Codec, where: Tensor | torch.device) -> bool:
    """Whether `weighted_mean` can; how a payload was rounded does not matter for that."""
    return codec.kernels in LIMITS and available(where)


def fits(thetas: Sequence[Tensor], anchor: Tensor) -> bool:
    """Whether theta can be read and written by kernels: plain contiguous memory beside the anchor, of a known kind."""
    return all(
        type(each.data) is Tensor and each.device == anchor.device and each.is_contiguous() and each.dtype in KINDS
        for each in thetas
    )


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. (Triton itself takes a second to import.)"""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y") and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _works(device: torch.device) -> bool:
    """Tries a kernel, once in a process: Triton may be there and the device not one of its."""
    if device.type not in ("cuda", "xpu"):
        return False
    from isles.wire.codecs import codecs

    try:
        anchor, finite = torch.ones(ROW, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        payload = torch.empty(codecs["e3m0"].num_bytes(ROW), dtype=torch.uint8, device=device)
        encode_difference(codecs["e3m0"], anchor, [], payload, finite)
        return bool(finite.item())
    except Exception as error:  # whatever is wrong with Triton here, there is a way without it
        give_up(device, error)
        return False


def give_up(device: torch.device, error: Exception) -> None:
    """From now on there are no kernels for this device."""
    _given_up.add(device)
    logger.warning("Triton's kernels do not run on %s, codecs run in PyTorch there: %r", device, error)


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels that this thread calls inside are compiled, or loaded from Triton's cache on disk, and do not run."""
    _mode.compiles = True
    try:
        yield
    finally:
        _mode.compiles = False


class _Mode(threading.local):
    compiles = False


_mode = _Mode()

# ---- the kernels


def encode_difference(codec: Codec, anchor: Tensor, thetas: Sequence[Tensor], payload: Tensor, finite: Tensor) -> None:
    """Writes the payload of anchor - theta, theta being several tensors in a row, and whether all of it is finite.

    No thetas at all: the payload of `anchor`. `finite` is one int32, 1 or 0.
    """
    finite.fill_(1)
    count(1, written=4)
    if anchor.numel():
        table, ranges = table_of_tensors(thetas, anchor)
        rows = _rows_of(codec)
        arguments = (anchor, table, ranges, payload, finite, anchor.numel())
        _launch("encode_difference", anchor, *arguments, LARGEST_SCALE=largest_scale(max(rows["LIMIT"], 1)), **rows)


def weighted_mean(gathered: Gathered, out: Tensor) -> None:
    """The mean of payloads in fp32, added up in their order, as `isles.wire.reduction.weighted_mean` does it."""
    payloads, finite = _payloads(gathered, out), _flag(out.device)
    _merge(gathered.codec, payloads, out, finite, "zero")
    _merge(gathered.codec, payloads._replace(divisor=1.0), out, finite, "zero", column=2)


def outer_step_and_mix(
    anchor: Tensor,
    mean: Tensor | Gathered,
    velocity: Tensor | None,
    thetas: Sequence[Tensor],
    lr: float,
    momentum: float,
    nesterov: bool,
    alpha: float,
    more: Sequence[tuple[Tensor, float]] = (),
) -> None:
    """`OuterSGD.update` and `mix` of `isles.core.outer`, in place, in one pass; theta is several tensors in a row.

    The mean of payloads is nowhere in memory. They are read twice, the first time to see whether their sum is too large
    for fp32. `more` are payloads with weights, which are added to that mean, or stand for it where there is none.
    """
    if not anchor.numel():
        return
    modes = {
        "MOMENTUM": "none" if velocity is None else "nesterov" if nesterov else "plain",
        "MIXING": "all" if alpha == 0 else "some" if alpha < 1 else "none",
    }
    if isinstance(mean, Tensor):
        assert not more
        source, payloads, finite = mean, _Payloads(anchor, 0, 1.0), anchor
        rows = {"CODEC": "mean", "LIMIT": 0, "WIDTH": 0, "ROWS": device_tables.ROWS}
    else:
        if not (any(mean.weights) or more):
            raise ValueError("all payloads have weight zero: there is no mean to take an outer step with")
        source, payloads, finite = anchor, _payloads(mean, anchor, more), _flag(anchor.device)
        rows = _rows_of(mean.codec)
        if payloads.number:
            _merge(mean.codec, payloads, anchor, finite, "zero", store=False)
    vectors = (anchor, source, anchor if velocity is None else velocity, *table_of_tensors(thetas, anchor))
    start = 0.0 if isinstance(mean, Tensor) or any(mean.weights) else -0.0
    numbers = [_fp32(number) for number in (start, payloads.divisor, lr, momentum, alpha, 1 - alpha)]
    counts = (anchor.numel(), payloads.number, len(more))
    _launch("outer_step_and_mix", anchor, *vectors, payloads.table, finite, *counts, *numbers, **modes, **rows)


def encode(codec: Codec, values: Tensor, payload: Tensor) -> bool | None:
    """For `fused.encode`: the payload of a flat fp32 tensor; returns whether all values are finite. The host waits."""
    if not encodes(codec, values) or not _is_stored(codec, payload):
        return None
    finite = torch.empty(1, dtype=torch.int32, device=values.device)
    encode_difference(codec, values, [], payload, finite)
    return bool(finite.item())


def merge(codec: Codec, body: Tensor, into: Tensor, weight: float, start: float | None, divisor: float) -> bool | None:
    """For `fused.merge`: into = (start + weight * decoded) / divisor; without a start, into stands for it.

    Returns whether all is finite. The host waits.
    """
    if not decodes(codec, into):
        return None
    finite = _flag(into.device)
    first = "into" if start is None else "nothing" if math.copysign(1, start) < 0 else "zero"
    body = body if _is_stored(codec, body) else body.clone()
    _merge(codec, _listed(codec, [(body, weight, weight)], divisor, into), into, finite, first)
    return bool(finite.item())


def accumulate(codec: Codec, body: Tensor, into: Tensor, weight: float, *, fresh: bool = False) -> None:
    """into += weight * decoded, in place; with `fresh`, into = weight * decoded. The host does not wait."""
    payload = _listed(codec, [(body, weight, weight)], 1.0, into)
    _merge(codec, payload, into, _flag(into.device), "nothing" if fresh else "into")


class _Payloads(NamedTuple):
    """Payloads that are added up: their table, how many of them are averaged, and what their sum is divided by."""

    table: Tensor
    number: int
    divisor: float


def _payloads(gathered: Gathered, like: Tensor, more: Sequence[tuple[Tensor, float]] = ()) -> _Payloads:
    """Those that count, each with two weights. The second one, with divisor 1, is for a sum too large for fp32: the
    mean is not. Behind them come `more`, which are no part of the mean.
    """
    from isles.wire.reduction import multipliers

    parts, total = multipliers(gathered.weights, gathered.factors)
    present = [(body, part, part / total) for body, part in zip(gathered.bodies, parts, strict=True) if part > 0]
    added = [(body, weight, weight) for body, weight in more]
    return _listed(gathered.codec, [*present, *added], total or 1.0, like)._replace(number=len(present))


def _listed(codec: Codec, bodies: Sequence[tuple[Tensor, float, float]], divisor: float, like: Tensor) -> _Payloads:
    for body, *_ in bodies:
        assert (body.device, body.numel()) == (like.device, codec.num_bytes(like.numel()))
        assert _is_stored(codec, body)
    return _Payloads(table_of_payloads(bodies, like.device), len(bodies), divisor)


def _merge(
    codec: Codec,
    payloads: _Payloads,
    into: Tensor,
    finite: Tensor,
    start: str,
    *,
    column: int = 1,
    store: bool = True,
) -> None:
    if into.numel():
        modes = {"START": start, "STORE": store}
        arguments = (payloads.table, into, finite, into.numel(), payloads.number, column, _fp32(payloads.divisor))
        _launch("merge", into, *arguments, **modes, **_rows_of(codec))


def _flag(device: torch.device) -> Tensor:
    count(1, written=4)
    return torch.ones(1, dtype=torch.int32, device=device)


def _rows_of(codec: Codec) -> dict[str, Any]:
    width = 2 * ROW if codec.kernels == "bf16" else codec.block_bytes
    return {"CODEC": codec.kernels, "LIMIT": LIMITS[codec.kernels], "WIDTH": width, "ROWS": device_tables.ROWS}


def _is_stored(codec: Codec, payload: Tensor) -> bool:
    """Whether kernels can work on this memory: contiguous bytes that begin where a value of the codec can."""
    return payload.is_contiguous() and (codec.kernels != "bf16" or payload.data_ptr() % 2 == 0)


def _launch(name: str, where: Tensor, *arguments: Any, **options: Any) -> None:
    """One program for each tile, on the current stream of the device. No fused multiply-add: the CPU has none."""
    from isles.wire import triton_kernels

    kernel, programs = getattr(triton_kernels, name), -(-where.numel() // (ROW * device_tables.ROWS))
    count(1)
    if where.device.type == "cpu":
        with _interpreter, counted_interpreter():
            kernel[(programs,)](*arguments, **options)
        return
    with torch.get_device_module(where.device).device(where.device):
        if _mode.compiles:
            compiled = kernel.warmup(*arguments, grid=(programs,), enable_fp_fusion=False, **options)
            compiled.run  # noqa: B018  (which loads it)
        else:
            kernel[(programs,)](*arguments, enable_fp_fusion=False, **options)


def _fp32(number: float) -> float:
    """The nearest fp32 number."""
    return float(np.float32(number))
