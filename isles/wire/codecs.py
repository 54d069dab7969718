"""What an outer gradient looks like on the wire.

A codec turns a flat fp32 vector into bytes and back. All of them work on *blocks*: the vector is cut into blocks of
equal length (the last one filled up with zeros) and every block becomes the same number of bytes, scale included. So
the size of a payload follows from the number of values alone, and a payload can be cut at any block, which is what lets
several islands share the work of averaging it.

    fp32, fp16, bf16     the value, in that format
    fp8                  e4m3, one scale per block
    int8, int4           signed integers, one scale per block
    int2                 -1, 0 or 1 times one scale per block; for experiments, with error feedback
    e3m0                 4 bits: sign and a 3-bit exponent, one scale per block: 0 and +-s * 2^-k for k = 0..6
    topk                 the largest eighth of each block, with their places          (the papers' comparisons, all of
    random-drop          a random quarter of each block, the rest is zero              them at the size of e3m0:
    dare                 the same, scaled up by 4 so that the expectation is right     4 bits a value)

Nothing here draws from a random generator: a choice that must look random (which values are dropped, stochastic
rounding) is a hash of the block's own bits and place. The same values give the same bytes in any process.

`codecs` is the registry, a plain dict: adding a codec is adding an entry. To round stochastically,
`dataclasses.replace(codecs["int4"], stochastic=True)`; what decodes a payload does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isles.wire.codec import Codec, ScaledCodec
from isles.wire.fused import ROW
from isles.wire.packing import MANTISSA_BITS, from_bytes, to_floats, typical_scale_of, uniform
from isles.wire.sparse_codecs import RandomDropCodec, TopKCodec

__all__ = ["Codec", "E3M0Codec", "FloatCodec", "Fp8Codec", "IntCodec", "TernaryCodec", "codecs"]


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
        return to_floats(blocks, self.dtype, self.stochastic)

    def unpack(self, rows: Tensor) -> Tensor:
        return from_bytes(rows, self.dtype).float()


@dataclass(frozen=True)
class Fp8Codec(ScaledCodec):
    """float8 e4m3 (1 sign, 4 exponent, 3 mantissa bits), the largest value of a block scaled to the largest code."""

    limit = 448

    def to_codes(self, scaled: Tensor, blocks: Tensor) -> Tensor:
        return to_floats(scaled, torch.float8_e4m3fn, self.stochastic)

    def from_codes(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class IntCodec(ScaledCodec):
    """Signed integers from -limit to limit, in 8 bits, or several of them in a byte."""

    @property
    def kernels(self) -> str:
        return f"int{self.bits}" if self.bits in (4, 8) and self.block == ROW else ""

    def to_codes(self, scaled: Tensor, blocks: Tensor) -> Tensor:
        whole = (scaled + uniform(blocks)).floor() if self.stochastic else scaled.round()
        return whole.clamp(-self.limit, self.limit).to(torch.int8).view(torch.uint8)

    def from_codes(self, codes: Tensor) -> Tensor:
        codes = codes.view(torch.int8)
        if self.bits < 8:
            sign = 1 << self.bits - 1
            codes = (codes ^ sign) - sign
        return codes.float()


@dataclass(frozen=True)
class TernaryCodec(IntCodec):
    """-1, 0 or 1 times the scale. What is rounded to zero is most of the vector: it needs error feedback.

    The scale is not the largest magnitude, which would leave but a few values of a block, but a typical one. Nearest
    rounding never overshoots, whatever the scale. The largest value is at least about s, and s at least the root of the
    mean square, so of the square of a block of n values at least about 1/n gets through: |x - decoded|^2 <=
    (1 - 0.98/n) |x|^2, which is what error feedback needs. Stochastic rounding overshoots: no error feedback with it.
    """

    bits: int = 2

    def scale(self, blocks: Tensor) -> Tensor:
        return super().scale(blocks) if self.stochastic else typical_scale_of(blocks)

    def contracting(self) -> TernaryCodec:
        return replace(self, stochastic=False)


@dataclass(frozen=True)
class E3M0Codec(ScaledCodec):
    """Sign and exponent only. Code 0 is zero; code c = 1..7 is the scale times 2^(c - 7).

    A value is rounded to the nearer power of two by adding half a mantissa to its bits and looking at the exponent: no
    logarithm. Stochastic rounding adds a random mantissa instead.
    """

    bits: int = 4
    limit = 1

    @property
    def kernels(self) -> str:
        return "e3m0" if self.block == ROW else ""

    def to_codes(self, scaled: Tensor, blocks: Tensor) -> Tensor:
        magnitude = scaled.abs()
        bits, smallest = magnitude.view(torch.int32), 2.0**-6
        if self.stochastic:
            noise = uniform(blocks)
            above = (bits + (noise * 2**MANTISSA_BITS).int() >> MANTISSA_BITS) - (127 - 7)
            code = torch.where(magnitude < smallest, (magnitude > noise * smallest).int(), above)
        else:
            code = (bits + (1 << MANTISSA_BITS - 1) >> MANTISSA_BITS) - (127 - 7)
            code = torch.maximum(code, (magnitude >= smallest / 2).int())  # zero is as far away as it should be
        return (code.clamp(0, 7) | scaled.signbit().int() << 3).to(torch.uint8)

    def from_codes(self, codes: Tensor) -> Tensor:
        exponent = codes.int() & 7
        magnitude = (exponent + (127 - 7) << MANTISSA_BITS).view(torch.float32).masked_fill(exponent == 0, 0.0)
        return torch.where(codes > 7, -magnitude, magnitude)


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
