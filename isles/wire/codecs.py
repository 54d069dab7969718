"""What an outer gradient looks like on the wire.

A codec turns a flat fp32 vector into bytes and back. All of them work on *blocks*: the vector is cut into
blocks of equal length (the last one filled up with zeros) and every block becomes the same number of bytes,
complete in itself, scale included. So the size of a payload follows from the number of values alone, and a
payload can be cut at any block, which is what lets several islands share the work of averaging it.

    fp32, fp16, bf16     the value, in that format
    fp8                  e4m3, one scale per block
    int8, int4           signed integers, one scale per block
    int2                 -1, 0 or 1 times one scale per block; for experiments, with error feedback
    e3m0                 4 bits: sign and a 3-bit exponent, one scale per block: 0 and +-s * 2^-k for k = 0..6
    topk                 the largest eighth of each block, with their places          (the papers' comparisons, all of
    random-drop          a random quarter of each block, the rest is zero              them at the size of e3m0:
    dare                 the same, scaled up by 4 so that the expectation is right     4 bits a value)

Scales are bf16. Nothing here draws from a random generator: where a choice must look random (which values are
dropped, stochastic rounding), it is a hash of the block's own bits and place, so the same values give the same bytes in
any process, and a resumed run is the same run.

`codecs` is the registry, a plain dict: adding a codec is adding an entry. To round stochastically,
`dataclasses.replace(codecs["int4"], stochastic=True)`; what decodes a payload does not depend on it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from isles.wire.codec import Codec
from isles.wire.fused import ROW
from isles.wire.packing import (
    MANTISSA_BITS,
    divide,
    from_bytes,
    pack_codes,
    read_scale,
    round_at_random,
    scale_of,
    to_bytes,
    typical_scale_of,
    uniform,
    unpack_codes,
)
from isles.wire.sparse_codecs import RandomDropCodec, TopKCodec

__all__ = ["Codec", "E3M0Codec", "FloatCodec", "Fp8Codec", "IntCodec", "TernaryCodec", "codecs"]

MAGNITUDE = 0x7FFFFFFF  # all bits of an fp32 value but its sign
HALF_OF_SMALLEST = 127 - 7 << MANTISSA_BITS  # the bits of 2^-7, half of e3m0's smallest level


# ---- the value itself, in a shorter float format


@dataclass(frozen=True)
class FloatCodec(Codec):
    """Values in a float format of torch. Beyond the largest finite value it saturates: infinity is never sent."""

    dtype: torch.dtype = torch.float32

    @property
    def block_bytes(self) -> int:
        return self.block * self.dtype.itemsize

    @property
    def kernels(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(self.dtype, "")

    def pack(self, blocks: Tensor) -> Tensor:
        if self.dtype != torch.float32:
            if self.stochastic:
                blocks = round_at_random(blocks, self.dtype)
            largest = torch.finfo(self.dtype).max
            blocks = blocks.clamp(-largest, largest)
        return to_bytes(blocks.to(self.dtype, copy=True))

    def unpack(self, rows: Tensor) -> Tensor:
        return from_bytes(rows, self.dtype).float()


# ---- one scale per block


@dataclass(frozen=True)
class Fp8Codec(Codec):
    """float8 e4m3 (1 sign, 4 exponent, 3 mantissa bits), the largest value of a block scaled to the largest of
    the format.
    """

    @property
    def block_bytes(self) -> int:
        return 2 + self.block

    def pack(self, blocks: Tensor) -> Tensor:
        largest = 448  # of e4m3
        scale = scale_of(blocks, largest, self.stochastic)
        scaled = divide(blocks, scale)
        if self.stochastic:
            scaled = round_at_random(scaled, torch.float8_e4m3fn)
        codes = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat([to_bytes(scale), codes], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        return rows[:, 2:].contiguous().view(torch.float8_e4m3fn).float() * read_scale(rows)


@dataclass(frozen=True)
class IntCodec(Codec):
    """Signed integers from -limit to limit, in 8 bits, or several of them in a byte."""

    bits: int = 8

    @property
    def limit(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    @property
    def block_bytes(self) -> int:
        return 2 + self.block * self.bits // 8

    @property
    def kernels(self) -> str:
        return f"int{self.bits}" if self.bits in (4, 8) and self.block == ROW else ""

    def scale(self, blocks: Tensor) -> Tensor:
        """[rows, 1] bf16: what one is worth."""
        return scale_of(blocks, self.limit, self.stochastic)

    def pack(self, blocks: Tensor) -> Tensor:
        scale = self.scale(blocks)
        scaled = divide(blocks, scale)
        whole = (scaled + uniform(blocks)).floor() if self.stochastic else scaled.round()
        codes = whole.clamp(-self.limit, self.limit).to(torch.int8).view(torch.uint8)
        return torch.cat([to_bytes(scale), pack_codes(codes, self.bits)], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        codes = unpack_codes(rows[:, 2:], self.bits).view(torch.int8)
        if self.bits < 8:
            sign = 1 << self.bits - 1
            codes = (codes ^ sign) - sign
        return codes.float() * read_scale(rows)


@dataclass(frozen=True)
class TernaryCodec(IntCodec):
    """-1, 0 or 1 times the scale. What is rounded to zero is most of the vector: it needs error feedback.

    The scale is not the largest magnitude, which would leave but a few values of a block, but a typical one. Nearest
    rounding never overshoots, whatever the scale: of -s, 0 and s it takes the nearest, and zero is among them. The
    largest value is at least about s, and s at least the root of the mean square, so of the square of a block of n
    values at least about 1/n gets through: |x - decoded|^2 <= (1 - 0.98/n) |x|^2, which is what error feedback needs.
    Stochastic rounding does overshoot; error feedback is not done with it.
    """

    bits: int = 2

    def scale(self, blocks: Tensor) -> Tensor:
        return super().scale(blocks) if self.stochastic else typical_scale_of(blocks)

    def contracting(self) -> TernaryCodec:
        return dataclasses.replace(self, stochastic=False)


@dataclass(frozen=True)
class E3M0Codec(Codec):
    """Sign and exponent only. Code 0 is zero; code c = 1..7 is the scale times 2^(c - 7).

    A value is rounded to the nearer power of two by adding half a mantissa to its bits and looking at the exponent: no
    logarithm. Stochastic rounding adds a random mantissa instead.
    """

    @property
    def block_bytes(self) -> int:
        return 2 + self.block // 2

    @property
    def kernels(self) -> str:
        return "e3m0" if self.block == ROW else ""

    def pack(self, blocks: Tensor) -> Tensor:
        scale = scale_of(blocks, 1, self.stochastic)
        bits = divide(blocks, scale).view(torch.int32)
        magnitude = bits & MAGNITUDE
        if self.stochastic:
            noise = uniform(blocks)
            above = (magnitude + (noise * 2**MANTISSA_BITS).int() >> MANTISSA_BITS) - (127 - 7)
            smallest = 2.0**-6
            code = torch.where(
                magnitude.view(torch.float32) < smallest,
                (magnitude.view(torch.float32) > noise * smallest).int(),
                above,
            )
        else:
            code = (magnitude + (1 << MANTISSA_BITS - 1) >> MANTISSA_BITS) - (127 - 7)
            code = torch.maximum(code, (magnitude >= HALF_OF_SMALLEST).int())  # zero is as far away as it should be
        code = code.clamp(0, 7) | (bits < 0).int() << 3
        return torch.cat([to_bytes(scale), pack_codes(code.to(torch.uint8), 4)], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        levels = torch.tensor([0.0] + [2.0 ** (code - 7) for code in range(1, 8)], device=rows.device)
        return torch.cat([levels, -levels])[unpack_codes(rows[:, 2:], 4).int()] * read_scale(rows)


codecs: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        FloatCodec("fp32", 1),
        FloatCodec("bf16", 1, dtype=torch.bfloat16),
        FloatCodec("fp16", 1, dtype=torch.float16),
        Fp8Codec("fp8", 128),
        IntCodec("int8", 128, bits=8),
        IntCodec("int4", 128, bits=4),
        TernaryCodec("int2", 128),
        E3M0Codec("e3m0", 128),
        TopKCodec("topk", 1024, kept=128),
        RandomDropCodec("random-drop", 1024, kept=254),
        RandomDropCodec("dare", 1024, kept=254, rescale=True),
    )
}
