"""What all codecs have in common: a vector is cut into blocks, and a block becomes bytes.

A codec is `pack` and `unpack` of a table with one block per row, in PyTorch, on any device. Around them are the three
things that are done with codecs:

    encode(values)                      -> payload      finite values only
    decode(payload, numel)              -> values
    accumulate(payload, into, weight)                   into += weight * decoded

For each there is a second way, one pass over memory (`isles.wire.fused`), which is taken where it applies. `pack` and
`unpack` are the definition: both ways give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isles.wire import fused
from isles.wire.packing import divided, empty, from_bytes, is_finite, pack_codes, scale_of, to_bytes, unpack_codes


@dataclass(frozen=True)
class Codec:
    """Cuts vectors into blocks of equal length, the last one filled up with zeros."""

    name: str
    block: int
    stochastic: bool = False
    sparse: ClassVar[bool] = False  # most values are not sent: encoding a mean of payloads again would lose most of it

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the wire."""
        raise NotImplementedError

    @property
    def kernels(self) -> str:
        """Which kernels of `isles.wire.fused` do the same as `pack` and `unpack`; empty if none do."""
        return ""

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

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """The payload of a vector of finite values; in `out`, if there is one: memory to be used again.

        >>> from isles.wire.codecs import codecs
        >>> codecs["e3m0"].encode(torch.zeros(1000)).numel()
        528
        """
        payload = self.encode_if_finite(values, out)
        if payload is None:
            raise ValueError(f"only finite values can be encoded: {int((~torch.isfinite(values)).sum())} are not")
        return payload

    def encode_if_finite(self, values: Tensor, out: Tensor | None = None) -> Tensor | None:
        """The same, or None if a value is not finite."""
        if not isinstance(values, Tensor) or not values.is_floating_point():
            found = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"{self.name} encodes floating-point tensors, not {found}")
        flat = values.detach().reshape(-1).float().contiguous()
        if out is None:
            out = torch.empty(self.num_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        self._check_payload(out, flat.numel())
        finite = fused.encode(self, flat, out)
        if finite is None:
            finite = is_finite(flat)
            if finite and flat.numel():
                out.copy_(self.pack(self._blocks(flat)).reshape(-1))
        return out if finite else None

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """The vector in a payload; in `out`, if there is one.

        >>> from isles.wire.codecs import codecs
        >>> codecs["bf16"].decode(codecs["bf16"].encode(torch.tensor([1.0, -2.5])), 2)
        tensor([ 1.0000, -2.5000])
        """
        self._check_payload(payload, numel)
        values = empty(numel, payload.device) if out is None else out
        if numel and not fused.decode(self, payload, values):
            values.copy_(self._unpacked(payload, numel))
        return values

    def accumulate(
        self, payload: Tensor, into: Tensor, weight: float = 1.0, *, fresh: bool = False, divisor: float = 1.0
    ) -> bool:
        """into = (into + weight * decoded) / divisor, in place; returns whether all of it is finite.

        With `fresh`, what is in `into` does not count: it is taken as zero. Every operation is rounded by itself.

        >>> from isles.wire.codecs import codecs
        >>> total = torch.ones(2)
        >>> codecs["bf16"].accumulate(codecs["bf16"].encode(torch.tensor([1.0, -2.5])), total, weight=2.0)
        True
        >>> total
        tensor([ 3., -4.])
        """
        if into.dtype is not torch.float32 or into.dim() != 1:
            raise ValueError(f"accumulate adds to a flat fp32 tensor, not to {into.dtype} of shape {list(into.shape)}")
        self._check_payload(payload, into.numel())
        if into.numel() == 0:
            return True
        finite = fused.merge(self, payload, into, weight, fresh, divisor)
        if finite is None:
            if fresh:
                into.zero_()
            values = self._unpacked(payload, into.numel())
            into.add_(values if weight == 1 else values * weight)
            if divisor != 1:
                divided(into, divisor, out=into)
            finite = is_finite(into)
        return finite

    def _blocks(self, flat: Tensor) -> Tensor:
        missing = -flat.numel() % self.block
        return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(-1, self.block)

    def _unpacked(self, payload: Tensor, numel: int) -> Tensor:
        return self.unpack(payload.view(-1, self.block_bytes)).reshape(-1)[:numel]

    def _check_payload(self, payload: Tensor, numel: int) -> None:
        if payload.dtype is not torch.uint8:
            raise ValueError(f"a payload is a uint8 tensor, not {payload.dtype}")
        if payload.numel() != (wanted := self.num_bytes(numel)):
            found = f"this payload has {payload.numel()} bytes, but {numel} values in {self.name} take {wanted}"
            raise ValueError(f"{found}: truncated, or of another codec or length")


@dataclass(frozen=True)
class ScaledCodec(Codec):
    """Blocks with one scale each, in bf16; behind it the values in units of the scale, as codes of so many bits."""

    bits: int = 8

    @property
    def block_bytes(self) -> int:
        return 2 + self.block * self.bits // 8

    @property
    def limit(self) -> int:
        """The largest magnitude in units of the scale; here that of signed integers."""
        return (1 << self.bits - 1) - 1

    def scale(self, blocks: Tensor) -> Tensor:
        """[rows, 1] bf16: what one is worth."""
        return scale_of(blocks, self.limit, self.stochastic)

    def to_codes(self, scaled: Tensor, blocks: Tensor) -> Tensor:
        """uint8 of values in units of the scale; stochastic rounding also looks at the values themselves."""
        raise NotImplementedError

    def from_codes(self, codes: Tensor) -> Tensor:
        """fp32 of codes, one in a byte, in units of the scale; the bits of the byte above the code are zero."""
        raise NotImplementedError

    def pack(self, blocks: Tensor) -> Tensor:
        scale = self.scale(blocks)
        scaled = blocks / torch.where(scale > 0, scale.float(), 1.0)  # zero: they are too small to matter, in any unit
        return torch.cat([to_bytes(scale), pack_codes(self.to_codes(scaled, blocks), self.bits)], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        return self.from_codes(unpack_codes(rows[:, 2:], self.bits)) * from_bytes(rows[:, :2], torch.bfloat16).float()
