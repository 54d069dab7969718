"""Tables in device memory that tell kernels where things are: tensors of a fragment, payloads of a round.

A kernel has one argument for any number of tensors: a list of their addresses. The list is copied to the device once
and found again by what is in it. Weights stay where they are, so in training this is a look-up. A list that is new is
copied from pinned memory, and the host does not wait for it.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isles.wire.packing import Array

ROW, ROWS = 128, 16
"""Values in a row, and rows in a tile: what one program works on."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Precisions of tensors, as kernels know them."""
TABLES = 1024
"""So many are remembered."""

_tables: OrderedDict[tuple[Any, ...], tuple[Tensor, ...]] = OrderedDict()
_lock = threading.Lock()


def table_of_tensors(tensors: Sequence[Tensor], whole: Tensor) -> tuple[Tensor, Tensor]:
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

    table, ranges = _table(whole.device, ("tensors", whole.numel(), *listed), build)
    return table, ranges


def table_of_payloads(bodies: Sequence[tuple[Tensor, float, float]], device: torch.device) -> Tensor:
    """Three integers a payload: its address, and the bits of the two weights that it may be added with."""
    numbers = [number for body, *weights in bodies for number in (body.data_ptr(), *map(_bits, weights))] or [0]
    return _table(device, ("payloads", *numbers), lambda: [np.array(numbers, np.int64)])[0]


def _table(device: torch.device, content: tuple[Any, ...], build: Callable[[], list[Array]]) -> tuple[Tensor, ...]:
    """Arrays in device memory, remembered by their content and by the stream that they were copied on."""
    stream = 0 if device.type == "cpu" else torch.get_device_module(device).current_stream(device).stream_id
    key = (device, stream, ROWS, *content)
    with _lock:
        if key not in _tables:
            arrays = [torch.from_numpy(array) for array in build()]
            if device.type != "cpu":  # from pinned memory, so that the host does not wait
                pinned = [torch.empty(array.shape, dtype=array.dtype, pin_memory=True) for array in arrays]
                arrays = [
                    room.copy_(array).to(device, non_blocking=True) for room, array in zip(pinned, arrays, strict=True)
                ]
            _tables[key] = tuple(arrays)
            if len(_tables) > TABLES:
                _tables.popitem(last=False)
        _tables.move_to_end(key)
        return _tables[key]


def _bits(number: float) -> int:
    """Of the nearest fp32 number."""
    return struct.unpack("<i", struct.pack("<f", number))[0]
