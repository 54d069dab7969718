"""The codecs of `isles.wire.codecs` as loops: one pass over memory each way.

Read `codecs.py` first: it defines every byte and every rounding, and what is here does the same. A codec is a pair of
functions on one value, `to_...` and `from_...`, in units of the block's scale; around them is a pair on rows of 128
values, `encode_row_...` and `decode_row_...`: two codes in a byte (the first half of the row low, the second half high,
so that loads and stores are contiguous), one code in a byte, or a format without a scale. The kernels go through flat
arrays row by row, and are the same for all codecs:

    encode(values, payload)                                -> finite
    encode_difference(anchor, theta, first, row, payload)  -> finite
    merge(payload, into, weight, fresh, start, divisor)    -> finite

`encode_difference` encodes anchor - theta, which is written nowhere. Theta comes tensor by tensor, each with the place
`first` where it begins in the anchor; values of a row that a tensor leaves unfinished are kept in `row` for the next.

`merge` is decoding, adding up and averaging in one: into = (into + weight * decoded) / divisor; when `fresh`, into is
not read, and `start` stands for it. With start = -0.0 and weight = divisor = 1, what is merged is the decoded value
itself, its sign included. All kernels look at every value anyway, so they also say whether all were finite. A last row
that is not full is filled up with zeros, as the codecs do it with their last block.

Arithmetic of numba on 32-bit integers is in 64 bits until it is cast back; the casts are what lets LLVM use vectors
of 32-bit lanes. Everything is in this file because numba's cache looks at the age of this file alone.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import types
from typing import Any

import numpy as np
from numpy import float32, int8, int32, uint8, uint16, uint32

from isles.wire.fused import kernel
from isles.wire.packing import largest_scale

ROW = 128
HALF = 64
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
SMALLEST_SCALE = float32(2.0**-120)
ONE, ZERO = float32(1), float32(0)
LARGEST_SCALE_1, LARGEST_SCALE_7, LARGEST_SCALE_127 = map(largest_scale, (1, 7, 127))


# ---- bits


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
def _largest_of(values, r):
    """The bits of the largest magnitude in row r; those of infinity and of NaN are larger than all others."""
    largest = uint32(0)
    for j in range(ROW):
        largest = max(largest, _magnitude_of(values[r, j]))
    return largest


# ---- one value, to a code and back


@kernel
def _to_bf16(value):
    bits = min(_magnitude_of(value), uint32(0x7F7F0000))
    rounded = uint32(uint32(bits + uint32(0x7FFF) + uint32(uint32(bits >> uint32(16)) & uint32(1))) >> uint32(16))
    return uint16(rounded | uint32(uint32(_bits_of(value) >> uint32(16)) & uint32(0x8000)))


@kernel
def _from_bf16(code):
    return _float_of(uint32(code) << uint32(16))


@kernel
def _to_integer(value, limit):
    """To the nearest, ties to even: what 1.5 * 2^23 + value rounds to has that integer in its last bits."""
    whole = int32(int32(_bits_of(value + float32(12582912.0))) - int32(0x4B400000))
    return min(max(whole, int32(-limit)), int32(limit))


@kernel
def _to_int4(value):
    return uint32(uint32(_to_integer(value, 7)) & uint32(15))


@kernel
def _from_int4(code):
    return float32(int32(int32(code ^ uint32(8)) - int32(8)))


@kernel
def _to_e3m0(value):
    magnitude = int32(_magnitude_of(value))
    code = int32(int32(int32(magnitude + int32(1 << 22)) >> int32(23)) - int32(120))
    code = max(code, int32(magnitude >= int32(120 << 23)))
    code = min(max(code, int32(0)), int32(7))
    return uint32(uint32(code) | uint32(uint32(_bits_of(value) >> uint32(28)) & uint32(8)))


@kernel
def _from_e3m0(code):
    exponent = uint32(code & uint32(7))
    bits = uint32(uint32(exponent + uint32(120)) << uint32(23)) if exponent else uint32(0)
    return _float_of(bits | uint32(uint32(code & uint32(8)) << uint32(28)))


# ---- rows


@kernel
def _write_scale(largest, limit, largest_scale, payload, p):
    """Puts the scale in front of the row, and returns what to divide by."""
    scale = _float_of(largest) / float32(limit)
    scale = ZERO if scale < SMALLEST_SCALE else min(scale, float32(largest_scale))
    code = _to_bf16(scale)
    payload[p, 0], payload[p, 1] = uint8(code), uint8(code >> uint16(8))
    return _from_bf16(code) if code else ONE


@kernel
def _read_scale(payload, p):
    return _from_bf16(uint32(payload[p, 0]) | uint32(uint32(payload[p, 1]) << uint32(8)))


@kernel
def _encode_row_e3m0(values, v, payload, p):
    largest = _largest_of(values, v)
    scale = _write_scale(largest, 1, LARGEST_SCALE_1, payload, p)
    for j in range(HALF):
        low, high = _to_e3m0(values[v, j] / scale), _to_e3m0(values[v, HALF + j] / scale)
        payload[p, 2 + j] = uint8(low | high << uint32(4))
    return largest < INFINITY


@kernel
def _decode_row_e3m0(payload, p, row):
    scale = _read_scale(payload, p)
    for j in range(HALF):
        code = uint32(payload[p, 2 + j])
        row[0, j] = _from_e3m0(code) * scale
        row[0, HALF + j] = _from_e3m0(uint32(code >> uint32(4))) * scale


@kernel
def _encode_row_int4(values, v, payload, p):
    largest = _largest_of(values, v)
    scale = _write_scale(largest, 7, LARGEST_SCALE_7, payload, p)
    for j in range(HALF):
        low, high = _to_int4(values[v, j] / scale), _to_int4(values[v, HALF + j] / scale)
        payload[p, 2 + j] = uint8(low | high << uint32(4))
    return largest < INFINITY


@kernel
def _decode_row_int4(payload, p, row):
    scale = _read_scale(payload, p)
    for j in range(HALF):
        code = uint32(payload[p, 2 + j])
        row[0, j] = _from_int4(uint32(code & uint32(15))) * scale
        row[0, HALF + j] = _from_int4(uint32(code >> uint32(4))) * scale


@kernel
def _encode_row_int8(values, v, payload, p):
    largest = _largest_of(values, v)
    scale = _write_scale(largest, 127, LARGEST_SCALE_127, payload, p)
    for j in range(ROW):
        payload[p, 2 + j] = uint8(_to_integer(values[v, j] / scale, 127))
    return largest < INFINITY


@kernel
def _decode_row_int8(payload, p, row):
    scale = _read_scale(payload, p)
    for j in range(ROW):
        row[0, j] = float32(int8(payload[p, 2 + j])) * scale


@kernel
def _encode_row_bf16(values, v, payload, p):
    for j in range(ROW):
        payload[p, j] = _to_bf16(values[v, j])
    return _largest_of(values, v) < INFINITY


@kernel
def _decode_row_bf16(payload, p, row):
    for j in range(ROW):
        row[0, j] = _from_bf16(uint32(payload[p, j]))


@kernel
def _encode_row_fp32(values, v, payload, p):
    for j in range(ROW):
        payload[p, j] = values[v, j]
    return _largest_of(values, v) < INFINITY


@kernel
def _decode_row_fp32(payload, p, row):
    for j in range(ROW):
        row[0, j] = payload[p, j]


@kernel
def _merge_row(row, into, r, weight, fresh, start, divisor):
    """One row of `merge`, decoded already; every operation is rounded by itself."""
    if fresh:
        for j in range(ROW):
            into[r, j] = start + row[0, j] * weight
    else:
        for j in range(ROW):
            into[r, j] = into[r, j] + row[0, j] * weight
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


# ---- kernels, for any codec: the names in capitals are filled in by `_kernels_of`

ENCODE_ROW: Any = None
DECODE_ROW: Any = None
WIDTH = ROW


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


def _kernels_of(codec: str, stored: str, width: int) -> dict[str, tuple[Any, str]]:
    """The kernels of one codec, with their signatures; a row of it is so many of what its payloads are made of.

    They are copies of the functions above that find its rows under the names in capitals. A function that returns
    functions would be the usual way, but numba does not find those in its cache again.
    """
    rows = {"ENCODE_ROW": globals()[f"_encode_row_{codec}"], "DECODE_ROW": globals()[f"_decode_row_{codec}"]}

    def filled_in(function: Any) -> Any:
        copy = types.FunctionType(function.__code__, {**globals(), **rows, "WIDTH": width})
        copy.__qualname__ = f"{function.__name__}_{codec}"  # a name of its own in the cache
        return kernel(copy)

    payload, vector, table = f"{stored}[::1]", "float32[::1]", "float32[:, ::1]"
    numbers = "float64, boolean, float64, float64"
    return {
        "encode": (filled_in(_encode), f"boolean({vector}, {payload})"),
        "encode_difference": (
            filled_in(_encode_difference),
            f"boolean({vector}, {vector}, int64, {table}, {payload})",
        ),
        "merge": (filled_in(_merge), f"boolean({payload}, {vector}, {numbers})"),
    }


_VECTORS = ", ".join(["float32[::1]"] * 3)
KERNELS = {
    "outer": {
        "nesterov": (_nesterov, f"void({_VECTORS}, float64, float64)"),
        "nesterov_into": (_nesterov_into, f"void({_VECTORS}, float32[::1], float32[::1], float64, float64)"),
        "mix": (_mix, "void(float32[::1], float32[::1], int64, float64)"),
    },
    "fp32": _kernels_of("fp32", "float32", ROW),
    "bf16": _kernels_of("bf16", "uint16", ROW),
    "int8": _kernels_of("int8", "uint8", 2 + ROW),
    "int4": _kernels_of("int4", "uint8", 2 + HALF),
    "e3m0": _kernels_of("e3m0", "uint8", 2 + HALF),
}
