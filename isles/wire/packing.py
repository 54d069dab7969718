"""The small parts that codecs are made of: memory, scales, bytes, and choices that look random and are not."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")
MANTISSA_BITS = 23  # of fp32
Array = np.ndarray[Any, Any]


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. A sum is nearly free, and a finite one proves it; otherwise each is looked at."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def empty(numel: int, device: torch.device | None = None) -> Tensor:
    """Room for a new fp32 vector. On a CPU, numpy asks for large pages, which halves the time of the first pass."""
    if device is not None and device != CPU:
        return torch.empty(numel, device=device)
    return torch.from_numpy(np.empty(numel, np.float32))


def memory_of(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Array | None:
    """The memory of a tensor of this type as a flat array that kernels can work on, if it is such memory."""
    if type(tensor) is not Tensor or tensor.dtype is not dtype or not tensor.is_cpu or tensor.requires_grad:
        return None
    array: Array = tensor.numpy()
    return array.reshape(-1) if array.flags.carray else None


def memory_of_all(tensors: Iterable[Tensor]) -> list[Array] | None:
    """The same for several fp32 tensors; None if one of them is not such memory."""
    arrays = []
    for tensor in tensors:
        array = memory_of(tensor)
        if array is None:
            return None
        arrays.append(array)
    return arrays


def scale_of(blocks: Tensor, limit: int, round_up: bool) -> Tensor:
    """[rows, 1] bf16: the largest magnitude of each block over `limit`. Blocks of denormals count as zero.

    Rounded to nearest, the largest value still gets the largest code, and what was decoded is encoded without loss.
    Rounded up, as stochastic rounding needs it, no value is out of range. `limit` times the scale is always finite.
    """
    largest = blocks.abs().amax(dim=1, keepdim=True)
    largest = divided(largest, limit)
    largest = torch.where(largest < 2.0**-120, 0.0, largest)
    if round_up:
        largest = ((largest.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    return largest.clamp(max=largest_scale(limit)).to(torch.bfloat16)


def divided(values: Tensor, divisor: float, out: Tensor | None = None) -> Tensor:
    """Division as IEEE has it. By a plain number, PyTorch multiplies with the reciprocal on a GPU: other bits."""
    return torch.div(values, values.new_full((1,), divisor), out=out)


def typical_scale_of(blocks: Tensor) -> Tensor:
    """[rows, 1] bf16: the sum of squares over the sum of magnitudes. Blocks of denormals count as zero.

    For Gaussian values it is 1.25 deviations, and the best that three levels can have is 1.22. Of a block that has only
    zeros and one magnitude it is that magnitude, so what was decoded is encoded without loss.
    """
    largest = blocks.abs().amax(dim=1, keepdim=True)
    relative = (blocks / torch.where(largest > 0, largest, 1.0)).abs().double()
    typical = relative.square().sum(dim=1, keepdim=True) / relative.sum(dim=1, keepdim=True).clamp(min=1.0)
    scale = (largest.double() * typical).float()
    return torch.where(scale < 2.0**-120, 0.0, scale).clamp(max=largest_scale(1)).to(torch.bfloat16)


@functools.cache
def largest_scale(limit: int) -> float:
    """The largest bf16 number whose product with `limit` is finite in fp32."""
    down = torch.tensor(torch.finfo(torch.float32).max / limit).view(torch.int32) >> 16 << 16
    return float(down.view(torch.float32))


def to_bytes(table: Tensor) -> Tensor:
    """The bytes of a table of any type, row by row."""
    return table.contiguous().view(torch.uint8)


def from_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Reads columns of bytes as another type, wherever in memory they start."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def to_floats(values: Tensor, dtype: torch.dtype, stochastic: bool) -> Tensor:
    """The bytes of values in a float format; what is beyond the largest finite one saturates."""
    if dtype != torch.float32:
        largest = torch.finfo(dtype).max
        values = (round_at_random(values, dtype) if stochastic else values).clamp(-largest, largest)
    return to_bytes(values.to(dtype, copy=True))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Several codes in a byte. Of four bits: the first half of a block low, the second half high; quarters likewise."""
    parts = (codes & (1 << bits) - 1).chunk(8 // bits, dim=1)
    return functools.reduce(torch.bitwise_or, (part << bits * place for place, part in enumerate(parts)))


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The other way round: one code per byte."""
    return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=1)


def seeds_of(blocks: Tensor) -> Tensor:
    """[rows, 1]: a seed per block from the bits of its values; a sum of integers, the same in any order."""
    return blocks.contiguous().view(torch.int32).sum(dim=1, keepdim=True) & 0x7FFFFFFF


def hashed(seeds: Tensor, columns: int) -> Tensor:
    """[rows, columns] of integers from 0 to 2^31 - 1: a multiply-and-shift hash of (seed, column)."""
    mixed = (seeds * 0x9E3779B1 + torch.arange(columns, device=seeds.device) * 0x85EBCA77) & 0xFFFFFFFF
    for multiplier in (0x7FEB352D, 0x46A6CA6B):
        mixed = ((mixed ^ mixed >> 16) * multiplier) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) & 0x7FFFFFFF


def uniform(blocks: Tensor) -> Tensor:
    """Numbers from 0 to below 1, one per value; equal values in different places get different ones."""
    place = torch.arange(blocks.shape[0], device=blocks.device)[:, None]
    return (hashed(seeds_of(blocks) + place * 0x2545F491 & 0x7FFFFFFF, blocks.shape[1]) >> 7).float() / 2**24


def round_at_random(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to what a float format can hold, up or down at random in proportion to what is cut off."""
    info, noise = torch.finfo(dtype), uniform(values)
    dropped = MANTISSA_BITS + round(math.log2(info.eps))
    normal = ((values.view(torch.int32) + (noise * 2**dropped).int()) >> dropped << dropped).view(torch.float32)
    step = info.smallest_normal * info.eps  # of all numbers below the smallest normal one
    if step < torch.finfo(torch.float32).smallest_normal:  # bf16 reaches as far down as fp32
        return normal
    return torch.where(values.abs() < info.smallest_normal, (values / step + noise).floor() * step, normal)
