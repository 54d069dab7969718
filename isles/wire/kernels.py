"""The codecs of `isles.wire.codecs` as loops: one pass over memory each way.

Read `codecs.py` first: it defines every byte and every rounding, and what is here does the same. A codec is a pair of
functions on one value, `_to_...` and `_from_...`, in units of the block's scale. Around them is a pair on rows of 128
values, with a scale or without. Two codes in a byte are the first half of the row, low, and the second half, high, so
that loads and stores are contiguous. The kernels go through flat arrays row by row, and are the same for all codecs:

    encode(values, payload)                                -> finite
    encode_difference(anchor, theta, first, row, payload)  -> finite
    merge(payload, into, weight, fresh, start, divisor)    -> finite

`encode_difference` encodes anchor - theta, which is written nowhere. Theta comes tensor by tensor, each with the place
`first` where it begins in the anchor; values of a row that a tensor leaves unfinished are kept in `row` for the next.

`merge` is decoding, adding up and averaging in one: into = (into + weight * decoded) / divisor; when `fresh`, `start`
stands for into. With start = -0.0 and weight = divisor = 1, the result is the decoded value, its sign included.

All kernels say whether all values were finite. A last row that is not full is filled up with zeros, as in the codecs.
numba computes with 32-bit integers in 64 bits until they are cast back; the casts let LLVM use vectors of 32-bit lanes.
Everything is in this file because numba's cache looks at the age of this file alone.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import types
from typing import Any

import numpy as np
from numpy import float32, int32, uint8, uint16, uint32

from isles.wire.fused import ROW, kernel
from isles.wire.packing import largest_scale

HALF = ROW // 2
MAGNITUDE, INFINITY = 0x7FFFFFFF, 0x7F800000  # bits of fp32
ONE, ZERO, SMALLEST_SCALE = float32(1), float32(0), float32(2.0**-120)

# Functions that use these names are templates: `_kernels_of` makes a copy for each codec, with the names filled in.
TO: Any = None  # a value to its code
FROM: Any = None  # and back
LIMIT = 1  # the largest value in units of the scale
LARGEST_SCALE = 0.0
WIDTH = ROW  # of a row in the payload
ENCODE_ROW: Any = None
DECODE_ROW: Any = None


# ---- one value, to a code and back


@kernel
def _float_of(bits):
    return np.uint32(bits).view(np.float32)


@kernel
def _bits_of(value):
    return np.float32(value).view(np.uint32)


@kernel
def _magnitude_of(value):
    return uint32(_bits_of(value) & uint32(MAGNITUDE))


@kernel
def _to_bf16(value):
    bits = min(_magnitude_of(value), uint32(0x7F7F0000))
    rounded = uint32(uint32(bits + uint32(0x7FFF) + uint32(uint32(bits >> uint32(16)) & uint32(1))) >> uint32(16))
    return uint16(rounded | uint32(uint32(_bits_of(value) >> uint32(16)) & uint32(0x8000)))


@kernel
def _from_bf16(code):
    return _float_of(uint32(code) << uint32(16))


def _to_integer(value):
    """To the nearest, ties to even: what 1.5 * 2^23 + value rounds to has that integer in its last bits."""
    whole = int32(int32(_bits_of(value + float32(12582912.0))) - int32(0x4B400000))
    return uint32(min(max(whole, int32(-LIMIT)), int32(LIMIT)))


def _from_integer(code):
    """The last bits of a code in two's complement: 8 of them if the limit is 127, 4 if it is 7."""
    bits, sign = uint32(2 * LIMIT + 1), int32(LIMIT + 1)
    return float32(int32(int32(int32(code & bits) ^ sign) - sign))


def _to_e3m0(value):
    magnitude = int32(_magnitude_of(value))
    code = int32(int32(int32(magnitude + int32(1 << 22)) >> int32(23)) - int32(120))
    code = min(max(code, int32(magnitude >= int32(120 << 23))), int32(7))
    return uint32(uint32(code) | uint32(uint32(_bits_of(value) >> uint32(28)) & uint32(8)))


def _from_e3m0(code):
    exponent = uint32(code & uint32(7))
    bits = uint32(uint32(exponent + uint32(120)) << uint32(23)) if exponent else uint32(0)
    return _float_of(bits | uint32(uint32(code & uint32(8)) << uint32(28)))


# ---- rows


@kernel
def _largest_of(values, r):
    """The bits of the largest magnitude in row r; those of infinity and of NaN are larger than all others."""
    largest = uint32(0)
    for j in range(ROW):
        largest = max(largest, _magnitude_of(values[r, j]))
    return largest


def _encode_row(values, v, payload, p):
    for j in range(ROW):
        payload[p, j] = TO(values[v, j])
    return _largest_of(values, v) < INFINITY


def _decode_row(payload, p, row):
    for j in range(ROW):
        row[0, j] = FROM(payload[p, j])


def _encode_row_scaled(values, v, payload, p):
    largest = _largest_of(values, v)
    scale = _float_of(largest) / float32(LIMIT)
    code = _to_bf16(ZERO if scale < SMALLEST_SCALE else min(scale, float32(LARGEST_SCALE)))
    payload[p, 0], payload[p, 1] = uint8(code), uint8(code >> uint16(8))
    scale = _from_bf16(code) if code else ONE
    for j in range(WIDTH - 2):
        if WIDTH < ROW:  # two codes in a byte
            low, high = TO(values[v, j] / scale), TO(values[v, HALF + j] / scale)
            payload[p, 2 + j] = uint8(low & uint32(15) | high << uint32(4))
        else:
            payload[p, 2 + j] = uint8(TO(values[v, j] / scale))
    return largest < INFINITY


def _decode_row_scaled(payload, p, row):
    scale = _from_bf16(uint32(payload[p, 0]) | uint32(uint32(payload[p, 1]) << uint32(8)))
    for j in range(WIDTH - 2):
        code = uint32(payload[p, 2 + j])
        row[0, j] = FROM(code) * scale
        if WIDTH < ROW:
            row[0, HALF + j] = FROM(uint32(code >> uint32(4))) * scale


@kernel
def _merge_row(row, into, r, weight, fresh, start, divisor):
    """One row of `merge`, decoded already; every operation is rounded by itself."""
    for j in range(ROW):
        into[r, j] = (start if fresh else into[r, j]) + row[0, j] * weight
    if divisor != ONE:
        for j in range(ROW):
            into[r, j] = into[r, j] / divisor
    return _largest_of(into, r) < INFINITY


@kernel
def _table(array, width):
    """The full rows of a flat array. Where rows are whole, compilers see what can be done at once."""
    rows = array.shape[0] // width
    return array[: rows * width].reshape(rows, width)


@kernel
def _copy(source, at, target, to):
    """As much as there is, and as there is room for. (Assigning slices would do, but takes the compiler seconds.)"""
    for j in range(min(source.shape[0] - at, target.shape[0] - to)):
        target[to + j] = source[at + j]


def _encode(values, payload):
    finite, table, coded = True, _table(values, ROW), _table(payload, WIDTH)
    rows = table.shape[0]
    for r in range(rows):
        finite &= ENCODE_ROW(table, r, coded, r)
    if rows * ROW < values.shape[0]:
        last, code = np.zeros(ROW, float32), np.empty(WIDTH, payload.dtype)
        _copy(values, rows * ROW, last, 0)
        finite &= ENCODE_ROW(last.reshape(1, ROW), 0, code.reshape(1, WIDTH), 0)
        _copy(code, 0, payload, rows * WIDTH)
    return finite


def _encode_difference(anchor, theta, first, row, payload):
    finite, coded, end = True, _table(payload, WIDTH), first + theta.shape[0]
    anchor_here = anchor[first:end]
    begun = min(-first % ROW, theta.shape[0])  # so many values belong to the row that was left unfinished
    for j in range(begun):
        row[0, first % ROW + j] = anchor_here[j] - theta[j]
    if begun and (first + begun) % ROW == 0:
        finite &= ENCODE_ROW(row, 0, coded, first // ROW)
    anchors, thetas = _table(anchor_here[begun:], ROW), _table(theta[begun:], ROW)
    for r in range(thetas.shape[0]):
        for j in range(ROW):
            row[0, j] = anchors[r, j] - thetas[r, j]
        finite &= ENCODE_ROW(row, 0, coded, (first + begun) // ROW + r)
    done = begun + thetas.shape[0] * ROW
    for j in range(theta.shape[0] - done):
        row[0, j] = anchor_here[done + j] - theta[done + j]
    if end == anchor.shape[0] and end % ROW:
        for j in range(end % ROW, ROW):
            row[0, j] = ZERO
        code = np.empty(WIDTH, payload.dtype)
        finite &= ENCODE_ROW(row, 0, code.reshape(1, WIDTH), 0)
        _copy(code, 0, payload, end // ROW * WIDTH)
    return finite


def _merge(payload, into, weight, fresh, start, divisor):
    finite, table, coded = True, _table(into, ROW), _table(payload, WIDTH)
    rows, row = table.shape[0], np.empty((1, ROW), float32)
    weight, start, divisor = float32(weight), float32(start), float32(divisor)
    for r in range(rows):
        DECODE_ROW(coded, r, row)
        finite &= _merge_row(row, table, r, weight, fresh, start, divisor)
    if rows * ROW < into.shape[0]:
        last, code = np.zeros(ROW, float32), np.zeros(WIDTH, payload.dtype)
        _copy(payload, rows * WIDTH, code, 0)
        _copy(into, rows * ROW, last, 0)
        DECODE_ROW(code.reshape(1, WIDTH), 0, row)
        for j in range(into.shape[0] - rows * ROW, ROW):
            row[0, j] = ZERO  # what a payload says of values beyond the end does not count
        finite &= _merge_row(row, last.reshape(1, ROW), 0, weight, fresh, start, divisor)
        _copy(last, 0, into, rows * ROW)
    return finite


# ---- the outer step and mixing: `isles.core.outer` has the formulas


@kernel
def _nesterov(anchor, mean, velocity, lr, momentum):
    lr, momentum = float32(lr), float32(momentum)
    for i in range(anchor.shape[0]):
        speed = velocity[i] * momentum + mean[i]
        velocity[i] = speed
        anchor[i] = anchor[i] - (speed * momentum + mean[i]) * lr


@kernel
def _nesterov_into(anchor, mean, velocity, new_anchor, new_velocity, lr, momentum):
    """The same into other memory. (Given the same memory, it would not use vectors.)"""
    lr, momentum = float32(lr), float32(momentum)
    for i in range(anchor.shape[0]):
        speed = velocity[i] * momentum + mean[i]
        new_velocity[i] = speed
        new_anchor[i] = anchor[i] - (speed * momentum + mean[i]) * lr


@kernel
def _mix(theta, anchor, first, alpha):
    kept, taken, anchor_here = float32(alpha), float32(1 - alpha), anchor[first : first + theta.shape[0]]
    for i in range(theta.shape[0]):
        theta[i] = theta[i] * kept + anchor_here[i] * taken


def _kernels_of(codec: str, stored: str, width: int, to: Any, back: Any, limit: int = 0) -> dict[str, tuple[Any, str]]:
    """The kernels of one codec, with their signatures: `width` of type `stored` are a row; a limit means a scale.

    They are copies of the functions above that find other things under the names in capitals. A function that returns
    functions would be the usual way, but numba does not find those in its cache again.
    """
    names = {"TO": to, "FROM": back, "LIMIT": limit, "WIDTH": width}

    def filled_in(function: Any) -> Any:
        copy = types.FunctionType(function.__code__, {**globals(), **names})
        copy.__qualname__ = f"{function.__name__}_{codec}"  # a name of its own in the cache
        return kernel(copy)

    if limit:
        names["LARGEST_SCALE"] = largest_scale(limit)
        names["TO"], names["FROM"] = filled_in(to), filled_in(back)
    names["ENCODE_ROW"] = filled_in(_encode_row_scaled if limit else _encode_row)
    names["DECODE_ROW"] = filled_in(_decode_row_scaled if limit else _decode_row)
    payload, vector = f"{stored}[::1]", "float32[::1]"
    difference = f"{vector}, {vector}, int64, float32[:, ::1], {payload}"
    return {
        "encode": (filled_in(_encode), f"boolean({vector}, {payload})"),
        "encode_difference": (filled_in(_encode_difference), f"boolean({difference})"),
        "merge": (filled_in(_merge), f"boolean({payload}, {vector}, float64, boolean, float64, float64)"),
    }


KERNELS = {
    "outer": {
        "nesterov": (_nesterov, "void(" + "float32[::1], " * 3 + "float64, float64)"),
        "nesterov_into": (_nesterov_into, "void(" + "float32[::1], " * 5 + "float64, float64)"),
        "mix": (_mix, "void(float32[::1], float32[::1], int64, float64)"),
    },
    "fp32": _kernels_of("fp32", "float32", ROW, float32, float32),
    "bf16": _kernels_of("bf16", "uint16", ROW, _to_bf16, _from_bf16),
    "int8": _kernels_of("int8", "uint8", 2 + ROW, _to_integer, _from_integer, limit=127),
    "int4": _kernels_of("int4", "uint8", 2 + HALF, _to_integer, _from_integer, limit=7),
    "e3m0": _kernels_of("e3m0", "uint8", 2 + HALF, _to_e3m0, _from_e3m0, limit=1),
}
