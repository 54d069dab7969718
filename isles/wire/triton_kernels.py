"""The kernels of `isles.wire.kernels` for accelerators: one pass over device memory each way, written in Triton.

Read `codecs.py` first, which defines every byte and every rounding, then `kernels.py`, which does the same in loops on
the CPU: the parts have the same names here and there. A program, in Triton's sense, works on a tile of whole rows of
128 values. It holds a row as two halves, because two codes in a byte are one of the first half, low, and one of the
second, high. The kernels, the same for all codecs:

    encode_difference(anchor, thetas, payload, finite)        payload of anchor - theta
    merge(bodies, into, finite)                               into = (into + sum of weight * decoded) / divisor
    outer_step_and_mix(anchor, mean, velocity, thetas)        outer step, then theta = alpha theta + (1 - alpha) anchor

The last one takes a mean, or payloads, which it averages in registers.

Theta is several tensors, one after the other, of any of three precisions, at addresses that are read from a table: four
integers a tensor (address, first value, end, kind), and for each program which tensors meet its tile. No flattened copy
is made, and a row may span tensors.

The bits are those of the CPU. Every product and sum is rounded by itself (no fused multiply-add), division is IEEE's,
denormals are kept, and conversions to bf16 are integer arithmetic. `isles.wire.device_kernels` launches all of this.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108 (what is known when a kernel is compiled is an `if` of its own)

import triton
import triton.language as tl

ROW = tl.constexpr(128)
HALF = tl.constexpr(64)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # bits of fp32
INFINITY = tl.constexpr(0x7F800000)
SMALLEST_SCALE = tl.constexpr(2.0**-120)
FP32 = tl.constexpr(0)  # kinds of tensors
BF16 = tl.constexpr(1)


# ---- one value, to a code and back


@triton.jit
def _float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits_of(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _magnitude_of(value):
    return _bits_of(value) & MAGNITUDE


@triton.jit
def _to_bf16(value):
    bits = tl.minimum(_magnitude_of(value), 0x7F7F0000)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded | ((_bits_of(value) >> 16) & 0x8000)


@triton.jit
def _from_bf16(code):
    return _float_of(code << 16)


@triton.jit
def _to_integer(value, LIMIT: tl.constexpr):
    """To the nearest, ties to even: what 1.5 * 2^23 + value rounds to has that integer in its last bits."""
    whole = _bits_of(value + 12582912.0) - 0x4B400000
    return tl.minimum(tl.maximum(whole, -LIMIT), LIMIT)


@triton.jit
def _from_integer(code, LIMIT: tl.constexpr):
    """The last bits of a code in two's complement: 8 of them if the limit is 127, 4 if it is 7."""
    return (((code & (2 * LIMIT + 1)) ^ (LIMIT + 1)) - (LIMIT + 1)).to(tl.float32)


@triton.jit
def _to_e3m0(value):
    magnitude = _magnitude_of(value)
    code = ((magnitude + (1 << 22)) >> 23) - 120
    code = tl.minimum(tl.maximum(code, (magnitude >= (120 << 23)).to(tl.int32)), 7)
    return code | ((_bits_of(value) >> 28) & 8)


@triton.jit
def _from_e3m0(code):
    exponent = code & 7
    bits = tl.where(exponent > 0, (exponent + 120) << 23, 0)
    return _float_of(bits | ((code & 8) << 28))


@triton.jit
def _to_code(value, CODEC: tl.constexpr, LIMIT: tl.constexpr):
    if CODEC == "e3m0":
        return _to_e3m0(value)
    else:
        return _to_integer(value, LIMIT)


@triton.jit
def _from_code(code, CODEC: tl.constexpr, LIMIT: tl.constexpr):
    if CODEC == "e3m0":
        return _from_e3m0(code)
    else:
        return _from_integer(code, LIMIT)


@triton.jit
def _tile(program, ROWS: tl.constexpr):
    """The rows of a program, and the places of the first halves of them in the vector."""
    row = program * ROWS + tl.arange(0, ROWS)
    return row, row[:, None] * ROW + tl.arange(0, HALF)[None, :]


# ---- theta: several tensors in a row


@triton.jit
def _load_theta(address, index, here, kind):
    """Values of a tensor as fp32, which is exact."""
    if kind == FP32:
        value = tl.load(address.to(tl.pointer_type(tl.float32)) + index, mask=here, other=0.0)
    elif kind == BF16:
        value = _from_bf16(tl.load(address.to(tl.pointer_type(tl.int16)) + index, mask=here, other=0).to(tl.int32))
    else:
        value = tl.load(address.to(tl.pointer_type(tl.float16)) + index, mask=here, other=0.0).to(tl.float32)
    return value


@triton.jit
def _store_theta(address, index, here, kind, value):
    """Values in the tensor's own precision, rounded to nearest, ties to even; too large is infinite, as in PyTorch."""
    if kind == FP32:
        tl.store(address.to(tl.pointer_type(tl.float32)) + index, value, mask=here)
    elif kind == BF16:
        bits, magnitude = _bits_of(value), _magnitude_of(value)
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        rounded = tl.where(magnitude > INFINITY, 0x7FC0, rounded) | ((bits >> 16) & 0x8000)
        tl.store(address.to(tl.pointer_type(tl.int16)) + index, rounded.to(tl.int16), mask=here)
    else:
        tl.store(address.to(tl.pointer_type(tl.float16)) + index, value.to(tl.float16), mask=here)


@triton.jit
def _difference(anchor, thetas, begin, end, place, numel):
    """Anchor - theta at these places; beyond the end it is zero."""
    theta = tl.zeros_like(place).to(tl.float32)
    for t in range(begin, end):
        address, first = tl.load(thetas + 4 * t), tl.load(thetas + 4 * t + 1)
        here = (place >= first) & (place < tl.load(thetas + 4 * t + 2))
        theta = tl.where(here, _load_theta(address, place - first, here, tl.load(thetas + 4 * t + 3)), theta)
    return tl.load(anchor + place, mask=place < numel, other=0.0) - theta


@triton.jit
def _move(
    anchor, direction, velocity, thetas, begin, end, place, numel, rates, MOMENTUM: tl.constexpr, MIXING: tl.constexpr
):
    """The outer step at these places, `direction` being the mean, and mixing."""
    lr, momentum, kept, taken = rates
    inside = place < numel
    if MOMENTUM != "none":
        speed = tl.load(velocity + place, mask=inside, other=0.0) * momentum + direction
        tl.store(velocity + place, speed, mask=inside)
        if MOMENTUM == "nesterov":
            direction = speed * momentum + direction
        else:
            direction = speed
    new = tl.load(anchor + place, mask=inside, other=0.0) - direction * lr
    tl.store(anchor + place, new, mask=inside)
    if MIXING != "none":
        for t in range(begin, end):
            address, first = tl.load(thetas + 4 * t), tl.load(thetas + 4 * t + 1)
            kind, here = tl.load(thetas + 4 * t + 3), (place >= first) & (place < tl.load(thetas + 4 * t + 2))
            if MIXING == "some":
                theta = _load_theta(address, place - first, here, kind) * kept + new * taken
            else:
                theta = new
            _store_theta(address, place - first, here, kind, theta)


# ---- rows


@triton.jit
def _encode_rows(low, high, payload, place, numel):
    """bf16: values without a scale."""
    stored = payload.to(tl.pointer_type(tl.int16)) + place
    tl.store(stored, _to_bf16(low).to(tl.int16), mask=place < numel)
    tl.store(stored + HALF, _to_bf16(high).to(tl.int16), mask=place + HALF < numel)


@triton.jit
def _decode_rows(payload, place, numel):
    stored = payload.to(tl.pointer_type(tl.int16)) + place
    low = tl.load(stored, mask=place < numel, other=0).to(tl.int32)
    high = tl.load(stored + HALF, mask=place + HALF < numel, other=0).to(tl.int32)
    return _from_bf16(low), _from_bf16(high)


@triton.jit
def _encode_rows_scaled(
    low, high, largest, payload, row, numel,
    CODEC: tl.constexpr, LIMIT: tl.constexpr, LARGEST_SCALE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    exists, start = row * ROW < numel, payload + row * WIDTH
    scale = tl.div_rn(_float_of(largest), 1.0 * LIMIT)
    code = _to_bf16(tl.where(scale < SMALLEST_SCALE, 0.0, tl.minimum(scale, LARGEST_SCALE)))
    tl.store(start, code.to(tl.uint8), mask=exists)
    tl.store(start + 1, (code >> 8).to(tl.uint8), mask=exists)
    scale = tl.where(code > 0, _from_bf16(code), 1.0)[:, None]
    low = _to_code(tl.div_rn(low, scale), CODEC, LIMIT)
    high = _to_code(tl.div_rn(high, scale), CODEC, LIMIT)
    stored, exists = start[:, None] + 2 + tl.arange(0, HALF)[None, :], exists[:, None]
    if WIDTH < ROW:  # two codes in a byte
        tl.store(stored, ((low & 15) | (high << 4)).to(tl.uint8), mask=exists)
    else:
        tl.store(stored, low.to(tl.uint8), mask=exists)
        tl.store(stored + HALF, high.to(tl.uint8), mask=exists)


@triton.jit
def _decode_rows_scaled(payload, row, numel, CODEC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr):
    exists, start = row * ROW < numel, payload + row * WIDTH
    code = tl.load(start, mask=exists, other=0).to(tl.int32)
    scale = _from_bf16(code | (tl.load(start + 1, mask=exists, other=0).to(tl.int32) << 8))[:, None]
    stored, exists = start[:, None] + 2 + tl.arange(0, HALF)[None, :], exists[:, None]
    low = tl.load(stored, mask=exists, other=0).to(tl.int32)
    if WIDTH < ROW:
        high = low >> 4
    else:
        high = tl.load(stored + HALF, mask=exists, other=0).to(tl.int32)
    return _from_code(low, CODEC, LIMIT) * scale, _from_code(high, CODEC, LIMIT) * scale


@triton.jit
def _add_rows(
    low, high, bodies, first, last, column, row, place, numel, FRESH: tl.constexpr,
    CODEC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """low, high + weight * decoded, payload by payload from the first to before the last; every operation is rounded
    by itself.

    `bodies` has three integers a payload: its address, and the bits of two weights, of which `column` chooses one.
    """
    for m in range(first, last):
        payload = tl.load(bodies + 3 * m).to(tl.pointer_type(tl.uint8))
        weight = _float_of(tl.load(bodies + 3 * m + column).to(tl.int32))
        if LIMIT > 0:
            one, two = _decode_rows_scaled(payload, row, numel, CODEC, LIMIT, WIDTH)
        else:
            one, two = _decode_rows(payload, place, numel)
        if FRESH:  # one payload: the value itself, with the sign of a zero
            low, high = one * weight, two * weight
        else:
            low, high = low + one * weight, high + two * weight
    return low, high


# ---- kernels


@triton.jit
def encode_difference(
    anchor, thetas, ranges, payload, finite, numel,
    CODEC: tl.constexpr, LIMIT: tl.constexpr, LARGEST_SCALE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the payload of anchor - theta; sets `finite` to 0 where a value is not. A limit means a scale."""
    program = tl.program_id(0).to(tl.int64)
    row, place = _tile(program, ROWS)
    begin, end = tl.load(ranges + 2 * program), tl.load(ranges + 2 * program + 1)
    low = _difference(anchor, thetas, begin, end, place, numel)
    high = _difference(anchor, thetas, begin, end, place + HALF, numel)
    largest = tl.max(tl.maximum(_magnitude_of(low), _magnitude_of(high)), axis=1)
    if LIMIT > 0:
        _encode_rows_scaled(low, high, largest, payload, row, numel, CODEC, LIMIT, LARGEST_SCALE, WIDTH)
    else:
        _encode_rows(low, high, payload, place, numel)
    tl.atomic_and(finite, 0, mask=tl.max(largest, axis=0) >= INFINITY)


@triton.jit(do_not_specialize=["count", "column"])
def merge(
    bodies, into, finite, numel, count, column, divisor,
    START: tl.constexpr, STORE: tl.constexpr,
    CODEC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """into = (start + weight * decoded + weight * decoded ...) / divisor; sets `finite` to 0 where a value is not.

    Start is "into", what is there; "zero"; or "nothing", which keeps the sign of a decoded zero. With the second weight
    of the table (column 2) it repairs: nothing is done if all was finite before. Without STORE, only `finite` is found.
    """
    if column == 2 and tl.load(finite) != 0:
        return
    row, place = _tile(tl.program_id(0).to(tl.int64), ROWS)
    low = tl.zeros_like(place).to(tl.float32)
    high = low
    if START == "into":
        low = tl.load(into + place, mask=place < numel, other=0.0)
        high = tl.load(into + place + HALF, mask=place + HALF < numel, other=0.0)
    fresh: tl.constexpr = START == "nothing"
    low, high = _add_rows(low, high, bodies, 0, count, column, row, place, numel, fresh, CODEC, LIMIT, WIDTH)
    low, high = tl.div_rn(low, divisor), tl.div_rn(high, divisor)
    if STORE:
        tl.store(into + place, low, mask=place < numel)
        tl.store(into + place + HALF, high, mask=place + HALF < numel)
    largest = tl.where(place < numel, _magnitude_of(low), 0)
    largest = tl.maximum(largest, tl.where(place + HALF < numel, _magnitude_of(high), 0))
    tl.atomic_and(finite, 0, mask=tl.max(tl.max(largest, axis=1), axis=0) >= INFINITY)


@triton.jit(do_not_specialize=["count", "more"])
def outer_step_and_mix(
    anchor, mean, velocity, thetas, ranges, bodies, finite, numel, count, more,
    start, divisor, lr, momentum, kept, taken,
    MOMENTUM: tl.constexpr, MIXING: tl.constexpr,
    CODEC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The outer step and mixing: `isles.core.outer` has the formulas. Momentum is "none", "plain" or "nesterov".

    Mixing is "none", theta stays; "all", theta = anchor; or "some", theta = kept * theta + taken * anchor. The mean is
    read where CODEC is "mean". Otherwise it is that of payloads, and `finite` says with which of their two weights. The
    last `more` payloads of the table are not among those that are averaged: they are added to the mean. Everything is
    added to `start`: 0, or -0 where there is no mean, so that the first one keeps the signs of its zeros.
    """
    program = tl.program_id(0).to(tl.int64)
    row, place = _tile(program, ROWS)
    begin, end = tl.load(ranges + 2 * program), tl.load(ranges + 2 * program + 1)
    if CODEC == "mean":
        low = tl.load(mean + place, mask=place < numel, other=0.0)
        high = tl.load(mean + place + HALF, mask=place + HALF < numel, other=0.0)
    else:
        column = tl.where(tl.load(finite) != 0, 1, 2)
        divisor = tl.where(column == 1, divisor, 1.0)
        low = tl.where(place >= 0, start, 0.0)
        low, high = _add_rows(low, low, bodies, 0, count, column, row, place, numel, False, CODEC, LIMIT, WIDTH)
        low, high = tl.div_rn(low, divisor), tl.div_rn(high, divisor)
        last = count + more
        low, high = _add_rows(low, high, bodies, count, last, column, row, place, numel, False, CODEC, LIMIT, WIDTH)
    rates = (lr, momentum, kept, taken)
    _move(anchor, low, velocity, thetas, begin, end, place, numel, rates, MOMENTUM, MIXING)
    _move(anchor, high, velocity, thetas, begin, end, place + HALF, numel, rates, MOMENTUM, MIXING)
