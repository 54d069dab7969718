"""The codecs of `isles.wire.codecs` as loops: one pass over memory each way.

Read `codecs.py` first: it defines every byte and every rounding, and what is here does the same. A codec is a pair of
functions on one value, `to_...` and `from_...`, in units of the block's scale; around them are three kinds of rows of
128 values: two codes in a byte (the first half of the row low, the second half high, so that loads and stores are
contiguous), one code in a byte, and formats without a scale.

    encode(values, payload)                             -> finite
    merge(payload, into, weight, fresh, start, divisor) -> finite

`merge` is decoding, adding up and averaging in one: into = (into + weight * decoded) / divisor; when `fresh`, into is
not read, and `start` stands for it. With start = -0.0 and weight = divisor = 1, what is merged is the decoded value
itself, its sign included. Both kernels look at every value anyway, so they also say whether all were finite.

Arithmetic of numba on 32-bit integers is in 64 bits until it is cast back; the casts are what lets LLVM use vectors
of 32-bit lanes. Everything is in this file because numba's cache looks at the age of this file alone.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import float32, int8, int32, uint8, uint16, uint32

from isles.compiling import kernel
from isles.wire.packing import largest_scale

ROW = 128
HALF = 64
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
SMALLEST_SCALE = float32(2.0**-120)
ONE, ZERO = float32(1), float32(0)
LARGEST_SCALE_1, LARGEST_SCALE_7, LARGEST_SCALE_127, LARGEST_SCALE_448 = map(largest_scale, (1, 7, 127, 448))


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
def _to_short_float(value, dropped, bias, largest):
    """The magnitude in a format with `dropped` fewer mantissa bits and another exponent bias, rounded to nearest even.

    Below the smallest normal number, adding a power of two whose last bit is the format's smallest step makes the
    processor round.
    """
    bits = min(_magnitude_of(value), uint32(largest))
    rebias = (127 - bias) << 23
    odd = uint32((bits >> uint32(dropped)) & uint32(1))
    normal = uint32(uint32(bits - uint32(rebias) + uint32((1 << (dropped - 1)) - 1) + odd) >> uint32(dropped))
    step = uint32((127 - bias + 1 + dropped) << 23)
    small = uint32(_bits_of(_float_of(bits) + _float_of(step)) - step)
    return small if bits < uint32(rebias + (1 << 23)) else normal


@kernel
def _from_short_float(code, dropped, bias):
    """The bits of the fp32 number with this magnitude, which is not infinity or NaN."""
    normal = uint32(uint32(code << uint32(dropped)) + uint32((127 - bias) << 23))
    small = _bits_of(float32(int32(code)) * _float_of(uint32((127 - bias + 1 - (23 - dropped)) << 23)))
    return small if code < uint32(1 << (23 - dropped)) else normal


@kernel
def _to_fp8(value):
    return uint32(
        _to_short_float(value, 20, 7, 0x43E00000) | uint32(uint32(_bits_of(value) >> uint32(24)) & uint32(128))
    )


@kernel
def _from_fp8(code):
    bits = _from_short_float(uint32(code & uint32(127)), 20, 7)
    if uint32(code & uint32(127)) == uint32(127):
        bits = uint32(0x7FC00000)
    return _float_of(bits | uint32(uint32(code & uint32(128)) << uint32(24)))


@kernel
def _to_fp16(value):
    sign = uint32(uint32(_bits_of(value) >> uint32(16)) & uint32(0x8000))
    return uint16(_to_short_float(value, 13, 15, 0x477FE000) | sign)


@kernel
def _from_fp16(code):
    magnitude = uint32(code & uint32(0x7FFF))
    bits = _from_short_float(magnitude, 13, 15)
    if magnitude >= uint32(0x7C00):
        bits = uint32(uint32(magnitude << uint32(13)) | uint32(INFINITY))
    return _float_of(bits | uint32(uint32(code & uint32(0x8000)) << uint32(16)))


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


# ---- the scale of a row


@kernel
def _write_scale(largest, limit, largest_scale, payload, r):
    """Puts the scale in front of the row, and returns what to divide by."""
    scale = _float_of(largest) / float32(limit)
    scale = ZERO if scale < SMALLEST_SCALE else min(scale, float32(largest_scale))
    code = _to_bf16(scale)
    payload[r, 0], payload[r, 1] = uint8(code), uint8(code >> uint16(8))
    return _from_bf16(code) if code else ONE


@kernel
def _read_scale(payload, r):
    return _from_bf16(uint32(payload[r, 0]) | uint32(uint32(payload[r, 1]) << uint32(8)))


@kernel
def _merge_row(values, v, into, r, weight, fresh, start, divisor):
    """One row of `merge`, decoded already; every operation is rounded by itself."""
    if fresh:
        for j in range(ROW):
            into[r, j] = start + values[v, j] * weight
    else:
        for j in range(ROW):
            into[r, j] = into[r, j] + values[v, j] * weight
    if divisor != ONE:
        for j in range(ROW):
            into[r, j] = into[r, j] / divisor
    return _largest_of(into, r)


# ---- rows


@kernel
def _encode_e3m0(values, payload):
    finite = True
    for r in range(values.shape[0]):
        largest = _largest_of(values, r)
        finite &= largest < INFINITY
        scale = _write_scale(largest, 1, LARGEST_SCALE_1, payload, r)
        for j in range(HALF):
            low, high = _to_e3m0(values[r, j] / scale), _to_e3m0(values[r, HALF + j] / scale)
            payload[r, 2 + j] = uint8(low | high << uint32(4))
    return finite


@kernel
def _merge_e3m0(payload, into, weight, fresh, start, divisor):
    finite, row = True, np.empty((1, ROW), float32)
    for r in range(payload.shape[0]):
        scale = _read_scale(payload, r)
        for j in range(HALF):
            code = uint32(payload[r, 2 + j])
            row[0, j] = _from_e3m0(code) * scale
            row[0, HALF + j] = _from_e3m0(uint32(code >> uint32(4))) * scale
        finite &= _merge_row(row, 0, into, r, weight, fresh, start, divisor) < INFINITY
    return finite


@kernel
def _encode_int4(values, payload):
    finite = True
    for r in range(values.shape[0]):
        largest = _largest_of(values, r)
        finite &= largest < INFINITY
        scale = _write_scale(largest, 7, LARGEST_SCALE_7, payload, r)
        for j in range(HALF):
            low, high = _to_int4(values[r, j] / scale), _to_int4(values[r, HALF + j] / scale)
            payload[r, 2 + j] = uint8(low | high << uint32(4))
    return finite


@kernel
def _merge_int4(payload, into, weight, fresh, start, divisor):
    finite, row = True, np.empty((1, ROW), float32)
    for r in range(payload.shape[0]):
        scale = _read_scale(payload, r)
        for j in range(HALF):
            code = uint32(payload[r, 2 + j])
            row[0, j] = _from_int4(uint32(code & uint32(15))) * scale
            row[0, HALF + j] = _from_int4(uint32(code >> uint32(4))) * scale
        finite &= _merge_row(row, 0, into, r, weight, fresh, start, divisor) < INFINITY
    return finite


@kernel
def _encode_int8(values, payload):
    finite = True
    for r in range(values.shape[0]):
        largest = _largest_of(values, r)
        finite &= largest < INFINITY
        scale = _write_scale(largest, 127, LARGEST_SCALE_127, payload, r)
        for j in range(ROW):
            payload[r, 2 + j] = uint8(_to_integer(values[r, j] / scale, 127))
    return finite


@kernel
def _merge_int8(payload, into, weight, fresh, start, divisor):
    finite, row = True, np.empty((1, ROW), float32)
    for r in range(payload.shape[0]):
        scale = _read_scale(payload, r)
        for j in range(ROW):
            row[0, j] = float32(int8(payload[r, 2 + j])) * scale
        finite &= _merge_row(row, 0, into, r, weight, fresh, start, divisor) < INFINITY
    return finite


@kernel
def _encode_fp8(values, payload):
    finite = True
    for r in range(values.shape[0]):
        largest = _largest_of(values, r)
        finite &= largest < INFINITY
        scale = _write_scale(largest, 448, LARGEST_SCALE_448, payload, r)
        for j in range(ROW):
            payload[r, 2 + j] = uint8(_to_fp8(values[r, j] / scale))
    return finite


@kernel
def _merge_fp8(payload, into, weight, fresh, start, divisor):
    finite, row = True, np.empty((1, ROW), float32)
    for r in range(payload.shape[0]):
        scale = _read_scale(payload, r)
        for j in range(ROW):
            row[0, j] = _from_fp8(uint32(payload[r, 2 + j])) * scale
        finite &= _merge_row(row, 0, into, r, weight, fresh, start, divisor) < INFINITY
    return finite


@kernel
def _encode_bf16(values, payload):
    finite = True
    for r in range(values.shape[0]):
        for j in range(ROW):
            payload[r, j] = _to_bf16(values[r, j])
        finite &= _largest_of(values, r) < INFINITY
    return finite


@kernel
def _merge_bf16(payload, into, weight, fresh, start, divisor):
    finite, row = True, np.empty((1, ROW), float32)
    for r in range(payload.shape[0]):
        for j in range(ROW):
            row[0, j] = _from_bf16(uint32(payload[r, j]))
        finite &= _merge_row(row, 0, into, r, weight, fresh, start, divisor) < INFINITY
    return finite


@kernel
def _encode_fp16(values, payload):
    finite = True
    for r in range(values.shape[0]):
        for j in range(ROW):
            payload[r, j] = _to_fp16(values[r, j])
        finite &= _largest_of(values, r) < INFINITY
    return finite


@kernel
def _merge_fp16(payload, into, weight, fresh, start, divisor):
    finite, row = True, np.empty((1, ROW), float32)
    for r in range(payload.shape[0]):
        for j in range(ROW):
            row[0, j] = _from_fp16(uint32(payload[r, j]))
        finite &= _merge_row(row, 0, into, r, weight, fresh, start, divisor) < INFINITY
    return finite


@kernel
def _encode_fp32(values, payload):
    finite = True
    for r in range(values.shape[0]):
        for j in range(ROW):
            payload[r, j] = values[r, j]
        finite &= _largest_of(values, r) < INFINITY
    return finite


@kernel
def _merge_fp32(payload, into, weight, fresh, start, divisor):
    finite = True
    for r in range(payload.shape[0]):
        finite &= _merge_row(payload, r, into, r, weight, fresh, start, divisor) < INFINITY
    return finite


def _group(encode: Any, merge: Any, stored: str) -> dict[str, tuple[Any, str]]:
    """A codec's two kernels, with their signatures; `stored` is the type of its payload."""
    return {
        "encode": (encode, f"boolean(float32[:, ::1], {stored}[:, ::1])"),
        "merge": (merge, f"boolean({stored}[:, ::1], float32[:, ::1], float32, boolean, float32, float32)"),
    }


KERNELS = {
    "fp32": _group(_encode_fp32, _merge_fp32, "float32"),
    "bf16": _group(_encode_bf16, _merge_bf16, "uint16"),
    "fp16": _group(_encode_fp16, _merge_fp16, "uint16"),
    "fp8": _group(_encode_fp8, _merge_fp8, "uint8"),
    "int8": _group(_encode_int8, _merge_int8, "uint8"),
    "int4": _group(_encode_int4, _merge_int4, "uint8"),
    "e3m0": _group(_encode_e3m0, _merge_e3m0, "uint8"),
}
