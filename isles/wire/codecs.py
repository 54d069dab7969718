"""What an outer gradient looks like on the wire.

A codec turns a flat fp32 vector into bytes and back. All of them work on *blocks*: the vector is cut into
blocks of equal length (the last one filled up with zeros) and every block becomes the same number of bytes,
complete in itself, scale included. So the size of a payload follows from the number of values alone, and a
payload can be cut at any block, which is what lets several islands share the work of averaging it.

    fp32, fp16, bf16     the value, in that format
    fp8                  e4m3, one scale per block
    int8, int4           signed integers, one scale per block
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
from typing import ClassVar

import torch
from torch import Tensor

from isles.wire.packing import (
    MANTISSA_BITS,
    divide,
    from_bytes,
    hashed,
    is_finite,
    pack_nibbles,
    read_scale,
    round_at_random,
    scale_of,
    seeds_of,
    to_bf16,
    to_bytes,
    uniform,
    unpack_nibbles,
)

MAGNITUDE = 0x7FFFFFFF  # all bits of an fp32 value but its sign
HALF_OF_SMALLEST = 127 - 7 << MANTISSA_BITS  # the bits of 2^-7, half of e3m0's smallest level


@dataclass(frozen=True)
class Codec:
    """The common part: cutting into blocks. A codec is `pack` and `unpack` of a table with one block per row."""

    name: str
    block: int
    stochastic: bool = False

    sparse: ClassVar[bool] = False
    """Most values are not sent: encoding a mean of such payloads again would lose most of it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the wire."""
        raise NotImplementedError

    def pack(self, blocks: Tensor) -> Tensor:
        """fp32 [rows, block] -> uint8 [rows, block_bytes]."""
        raise NotImplementedError

    def unpack(self, rows: Tensor) -> Tensor:
        """uint8 [rows, block_bytes] -> fp32 [rows, block]."""
        raise NotImplementedError

    def contracting(self) -> Codec:
        """The codec to use with error feedback, which only converges if decoding never overshoots."""
        return self

    def num_bytes(self, numel: int) -> int:
        """Size of the payload of so many values."""
        return -(-numel // self.block) * self.block_bytes

    def encode(self, values: Tensor) -> Tensor:
        """The payload of a vector of finite values.

        >>> codecs["e3m0"].encode(torch.zeros(1000)).numel()
        528
        """
        if not values.is_floating_point():
            raise ValueError(f"{self.name} encodes floating-point tensors, not {values.dtype}")
        flat = values.detach().reshape(-1).float()
        if not is_finite(flat):
            raise ValueError(f"only finite values can be encoded: {int((~torch.isfinite(flat)).sum())} are not")
        if flat.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        rows = -(-flat.numel() // self.block)
        if flat.numel() < rows * self.block:
            flat = torch.cat([flat, flat.new_zeros(rows * self.block - flat.numel())])
        return self.pack(flat.view(rows, self.block)).reshape(-1)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The vector in a payload.

        >>> codecs["bf16"].decode(codecs["bf16"].encode(torch.tensor([1.0, -2.5])), 2)
        tensor([ 1.0000, -2.5000])
        """
        if payload.dtype != torch.uint8:
            raise ValueError(f"a payload is a uint8 tensor, not {payload.dtype}")
        if payload.numel() != self.num_bytes(numel):
            raise ValueError(
                f"this payload has {payload.numel()} bytes, but {numel} values in {self.name} take "
                f"{self.num_bytes(numel)}: truncated, or of another codec or length"
            )
        if numel == 0:
            return torch.empty(0, device=payload.device)
        return self.unpack(payload.view(-1, self.block_bytes)).reshape(-1)[:numel]


# ---- the value itself, in a shorter float format


@dataclass(frozen=True)
class FloatCodec(Codec):
    """Values in a float format of torch. Beyond the largest finite value it saturates: infinity is never sent."""

    dtype: torch.dtype = torch.float32

    @property
    def block_bytes(self) -> int:
        return self.block * self.dtype.itemsize

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
    """Signed integers from -limit to limit, in 8 bits, or two of them in a byte."""

    bits: int = 8

    @property
    def limit(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    @property
    def block_bytes(self) -> int:
        return 2 + self.block * self.bits // 8

    def pack(self, blocks: Tensor) -> Tensor:
        scale = scale_of(blocks, self.limit, self.stochastic)
        scaled = divide(blocks, scale)
        whole = (scaled + uniform(blocks)).floor() if self.stochastic else scaled.round()
        codes = whole.clamp(-self.limit, self.limit).to(torch.int8).view(torch.uint8)
        return torch.cat([to_bytes(scale), codes if self.bits == 8 else pack_nibbles(codes)], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        codes = rows[:, 2:]
        if self.bits == 4:
            codes = unpack_nibbles(codes)
            codes = codes | (codes & 8) * 30  # extend the sign of 4 bits to 8
        return codes.contiguous().view(torch.int8).float() * read_scale(rows)


@dataclass(frozen=True)
class E3M0Codec(Codec):
    """Sign and exponent only. Code 0 is zero; code c = 1..7 is the scale times 2^(c - 7).

    A value is rounded to the nearer power of two by adding half a mantissa to its bits and looking at the exponent: no
    logarithm. Stochastic rounding adds a random mantissa instead.
    """

    @property
    def block_bytes(self) -> int:
        return 2 + self.block // 2

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
        return torch.cat([to_bytes(scale), pack_nibbles(code.to(torch.uint8))], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        levels = torch.tensor([0.0] + [2.0 ** (code - 7) for code in range(1, 8)], device=rows.device)
        return torch.cat([levels, -levels])[unpack_nibbles(rows[:, 2:]).int()] * read_scale(rows)


# ---- the papers' comparisons: most values are not sent at all


@dataclass(frozen=True)
class TopKCodec(Codec):
    """The `kept` values of largest magnitude in each block, in bf16, each with its place in 16 bits."""

    kept: int = 1

    sparse = True

    @property
    def block_bytes(self) -> int:
        return 4 * self.kept

    def pack(self, blocks: Tensor) -> Tensor:
        places = blocks.abs().topk(self.kept, dim=1).indices.sort(dim=1).values
        return torch.cat([to_bf16(blocks.gather(1, places), self.stochastic), to_bytes(places.to(torch.int16))], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        values = from_bytes(rows[:, : 2 * self.kept], torch.bfloat16).float()
        places = from_bytes(rows[:, 2 * self.kept :], torch.int16).long()
        return values.new_zeros(rows.shape[0], self.block).scatter_(1, places.clamp(0, self.block - 1), values)


@dataclass(frozen=True)
class RandomDropCodec(Codec):
    """`kept` values of each block, chosen by a hash, in bf16; their places follow from a seed of 4 bytes.

    With `rescale` every value is multiplied by block / kept, so that dropping leaves the expectation as it was (DARE).
    Error feedback sees to that in its own way; both together would count the same loss twice, and diverge.
    """

    kept: int = 1
    rescale: bool = False

    sparse = True

    @property
    def block_bytes(self) -> int:
        return 4 + 2 * self.kept

    def pack(self, blocks: Tensor) -> Tensor:
        seeds = seeds_of(blocks)
        kept = blocks.gather(1, self._places(seeds)) * (self.block / self.kept if self.rescale else 1.0)
        return torch.cat([to_bytes(seeds.to(torch.int32)), to_bf16(kept, self.stochastic)], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        seeds = from_bytes(rows[:, :4], torch.int32).long()
        values = from_bytes(rows[:, 4:], torch.bfloat16).float()
        return values.new_zeros(rows.shape[0], self.block).scatter_(1, self._places(seeds), values)

    def contracting(self) -> RandomDropCodec:
        return dataclasses.replace(self, rescale=False)

    def _places(self, seeds: Tensor) -> Tensor:
        place = torch.arange(self.block, device=seeds.device)
        order = hashed(seeds, self.block) // self.block * self.block + place  # no two alike, so the choice is unique
        return order.topk(self.kept, dim=1, largest=False).indices.sort(dim=1).values


codecs: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        FloatCodec("fp32", 1),
        FloatCodec("bf16", 1, dtype=torch.bfloat16),
        FloatCodec("fp16", 1, dtype=torch.float16),
        Fp8Codec("fp8", 128),
        IntCodec("int8", 128, bits=8),
        IntCodec("int4", 128, bits=4),
        E3M0Codec("e3m0", 128),
        TopKCodec("topk", 1024, kept=128),
        RandomDropCodec("random-drop", 1024, kept=254),
        RandomDropCodec("dare", 1024, kept=254, rescale=True),
    )
}
