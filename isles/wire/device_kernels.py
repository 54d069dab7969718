"""Tensors in front, the kernels of `isles.wire.triton_kernels` behind: codecs and the outer step on an accelerator.

It is for devices what `isles.wire.fused` is for the CPU, and gives the same bits. Nothing here waits for the device: a
result that the host will want, whether all was finite, is left in a tensor.

    encode_difference(codec, anchor, thetas, payload, finite)     2 launches, whatever the number of tensors
    weighted_mean(codec, bodies, weights, out)                    3 launches, whatever the number of payloads
    outer_step_and_mix(anchor, mean, velocity, thetas, ...)       1 launch

`encodes` and `decodes` say for which codecs, and `available` on which devices: those of Triton, and the CPU when
Triton's interpreter is on (TRITON_INTERPRET=1 before it is imported), which is how the bits are tested without a GPU.
Importing this module needs no Triton. Without it, PyTorch does the work.

Tensors whose addresses a kernel needs are listed in a table in device memory. It is made once for the same list:
weights stay where they are, so in training this is a look-up.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isles.wire.device_traffic import Traffic, count, counted_interpreter, counting
from isles.wire.packing import Array, largest_scale

if TYPE_CHECKING:
    from isles.wire.codec import Codec

__all__ = [
    "Traffic",
    "available",
    "counting",
    "decodes",
    "encode",
    "encode_difference",
    "encodes",
    "fits",
    "interpreted",
    "merge",
    "outer_step_and_mix",
    "weighted_mean",
]
logger = logging.getLogger("isles")
ROW, ROWS = 128, 16
"""Values in a row, and rows in a tile: what one program works on."""
LIMITS = {"e3m0": 1, "int8": 127, "int4": 7, "bf16": 0}
"""Codecs that have kernels, with the largest value in units of the scale; bf16 has no scale."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TABLES = 1024
"""So many are remembered."""

_tables: OrderedDict[tuple[Any, ...], tuple[Tensor, ...]] = OrderedDict()
_lock = threading.RLock()


# ---- where, and for which codecs


def available(where: Tensor | torch.device) -> bool:
    """Whether there are kernels for tensors on this device."""
    device = where.device if isinstance(where, Tensor) else where
    if os.environ.get("ISLES_FUSED") == "0" or not _has_triton():
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
    """Whether kernels run in Triton's interpreter, on the CPU."""
    if not _has_triton():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


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
        logger.warning("Triton's kernels do not run on %s, codecs run in PyTorch there: %r", device, error)
        return False


# ---- the kernels


def encode_difference(codec: Codec, anchor: Tensor, thetas: Sequence[Tensor], payload: Tensor, finite: Tensor) -> None:
    """Writes the payload of anchor - theta, theta being several tensors in a row, and whether all of it is finite.

    No thetas at all: the payload of `anchor`. `finite` is one int32, 1 or 0.
    """
    finite.fill_(1)
    count(1, written=4)
    if anchor.numel():
        table, ranges = _places(thetas, anchor)
        rows = _rows_of(codec)
        arguments = (anchor, table, ranges, payload, finite, anchor.numel())
        _launch("encode_difference", anchor, *arguments, LARGEST_SCALE=largest_scale(max(rows["LIMIT"], 1)), **rows)


def weighted_mean(
    codec: Codec,
    bodies: Sequence[Tensor],
    weights: Sequence[float],
    out: Tensor,
    factors: Sequence[float] | None = None,
) -> None:
    """The mean of payloads in fp32, added up in the given order, as `isles.wire.reduction.weighted_mean` does it."""
    from isles.wire.reduction import multipliers

    parts, total = multipliers(weights, factors)
    present = [(body, part) for body, part in zip(bodies, parts, strict=True) if part > 0]
    if not present:
        out.zero_()
        count(1, written=4 * out.numel())
        return
    finite = torch.ones(1, dtype=torch.int32, device=out.device)
    count(1, written=4)
    listed = [(body, part, part / total) for body, part in present]
    _merge(codec, listed, out, finite, "zero", total)
    _merge(codec, listed, out, finite, "zero", 1.0, repair=True)  # the sum was too large for fp32, the mean is not


def outer_step_and_mix(
    anchor: Tensor,
    mean: Tensor,
    velocity: Tensor | None,
    thetas: Sequence[Tensor],
    lr: float,
    momentum: float,
    nesterov: bool,
    alpha: float,
) -> None:
    """`OuterSGD.update` and `mix` of `isles.core.outer`, in place, in one pass; theta is several tensors in a row."""
    if not anchor.numel():
        return
    how = "none" if velocity is None else "nesterov" if nesterov else "plain"
    mixing = "all" if alpha == 0 else "some" if alpha < 1 else "none"
    numbers = [_fp32(number) for number in (lr, momentum, alpha, 1 - alpha)]
    arguments = (anchor, mean, anchor if velocity is None else velocity, *_places(thetas, anchor), anchor.numel())
    _launch("outer_step_and_mix", anchor, *arguments, *numbers, MOMENTUM=how, MIXING=mixing, TILE=ROW * ROWS)


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
    finite = torch.ones(1, dtype=torch.int32, device=into.device)
    count(1, written=4)
    first = "into" if start is None else "nothing" if math.copysign(1, start) < 0 else "zero"
    body = body if _is_stored(codec, body) else body.clone()
    _merge(codec, [(body, weight, weight)], into, finite, first, divisor)
    return bool(finite.item())


def _merge(
    codec: Codec,
    listed: Sequence[tuple[Tensor, float, float]],
    into: Tensor,
    finite: Tensor,
    start: str,
    divisor: float,
    repair: bool = False,
) -> None:
    if not into.numel():
        return
    numbers = [number for body, *weights in listed for number in (body.data_ptr(), *map(_bits, weights))]
    for body, *_ in listed:
        assert (body.device, body.numel()) == (into.device, codec.num_bytes(into.numel()))
        assert _is_stored(codec, body)
    (table,) = _table(into.device, ("bodies", *numbers), lambda: [np.array(numbers, np.int64)])
    modes = {"START": start, "DIVIDE": divisor != 1, "REPAIR": repair}
    arguments = (table, into, finite, into.numel(), len(listed), _fp32(divisor))
    _launch("merge", into, *arguments, **modes, **_rows_of(codec))


def _rows_of(codec: Codec) -> dict[str, Any]:
    width = 2 * ROW if codec.kernels == "bf16" else codec.block_bytes
    return {"CODEC": codec.kernels, "LIMIT": LIMITS[codec.kernels], "WIDTH": width, "ROWS": ROWS}


def _is_stored(codec: Codec, payload: Tensor) -> bool:
    """Whether kernels can work on this memory: contiguous bytes that begin where a value of the codec can."""
    return payload.is_contiguous() and (codec.kernels != "bf16" or payload.data_ptr() % 2 == 0)


def _launch(name: str, where: Tensor, *arguments: Any, **options: Any) -> None:
    """One program for each tile, on the current stream of the device. No fused multiply-add: the CPU has none."""
    from isles.wire import triton_kernels

    kernel, programs = getattr(triton_kernels, name), -(-where.numel() // (ROW * ROWS))
    count(1)
    if where.device.type == "cpu":
        with _lock, counted_interpreter():  # it keeps what it is doing in global variables
            kernel[(programs,)](*arguments, **options)
    else:
        with torch.get_device_module(where.device).device(where.device):
            kernel[(programs,)](*arguments, enable_fp_fusion=False, **options)


# ---- tables of addresses


def _places(tensors: Sequence[Tensor], whole: Tensor) -> tuple[Tensor, Tensor]:
    """Where tensors are that stand for a vector, one after the other, and which of them meet each tile of it."""
    assert all(each.is_contiguous() and each.device == whole.device for each in tensors)
    listed = [(each.data_ptr(), each.numel(), KINDS[each.dtype]) for each in tensors if each.numel()]

    def build() -> list[Array]:
        sizes = np.array([numel for _, numel, _ in listed], np.int64)
        ends = np.cumsum(sizes)
        assert not listed or ends[-1] == whole.numel()
        kinds = [(address, end - numel, end, kind) for (address, numel, kind), end in zip(listed, ends, strict=True)]
        tiles = np.arange(0, whole.numel(), ROW * ROWS)
        begin = np.searchsorted(ends, tiles, side="right")
        last = np.searchsorted(ends, np.minimum(tiles + ROW * ROWS, whole.numel()) - 1, side="right")
        ranges = np.stack([begin, last + 1 if listed else last], axis=1)
        return [np.array(kinds or [(0, 0, 0, 0)], np.int64), ranges.astype(np.int64)]

    table, ranges = _table(whole.device, ("places", whole.numel(), *listed), build)
    return table, ranges


def _table(device: torch.device, content: tuple[Any, ...], build: Callable[[], list[Array]]) -> tuple[Tensor, ...]:
    """Arrays in device memory, remembered by their content and by the stream that they were copied on."""
    stream = 0 if device.type == "cpu" else torch.get_device_module(device).current_stream(device).stream_id
    key = (device, stream, ROWS, *content)
    with _lock:
        if key not in _tables:
            arrays = [torch.from_numpy(array) for array in build()]
            if device.type != "cpu":  # from pinned memory, so that the host does not wait
                arrays = [array.pin_memory().to(device, non_blocking=True) for array in arrays]
            _tables[key] = tuple(arrays)
            if len(_tables) > TABLES:
                _tables.popitem(last=False)
        _tables.move_to_end(key)
        return _tables[key]


def _bits(number: float) -> int:
    """Of the nearest fp32 number."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


def _fp32(number: float) -> float:
    """The nearest fp32 number."""
    return float(np.float32(number))
