"""The papers' comparisons, at the size of e3m0, 4 bits a value: most values are not sent at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isles.wire.codec import Codec
from isles.wire.packing import from_bytes, hashed, seeds_of, to_bytes, to_floats


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
        values = to_floats(blocks.gather(1, places), torch.bfloat16, self.stochastic)
        return torch.cat([values, to_bytes(places.to(torch.int16))], dim=1)

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
        return torch.cat([to_bytes(seeds.to(torch.int32)), to_floats(kept, torch.bfloat16, self.stochastic)], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        seeds = from_bytes(rows[:, :4], torch.int32).long()
        values = from_bytes(rows[:, 4:], torch.bfloat16).float()
        return values.new_zeros(rows.shape[0], self.block).scatter_(1, self._places(seeds), values)

    def contracting(self) -> RandomDropCodec:
        return replace(self, rescale=False)

    def _places(self, seeds: Tensor) -> Tensor:
        place = torch.arange(self.block, device=seeds.device)
        order = hashed(seeds, self.block) // self.block * self.block + place  # no two alike, so the choice is unique
        return order.topk(self.kept, dim=1, largest=False).indices.sort(dim=1).values
