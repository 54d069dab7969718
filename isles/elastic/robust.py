"""What one bad island can do, bounded: no outer gradient counts with more than the median norm of its round.

An island may be broken, or malicious, and send an outer gradient of any size. Every payload is multiplied by

    min(1, median of the norms / its own norm)

and one that is not finite by 0. Then a minority of islands, whatever it sends, moves the mean by no more than honest
islands could. Of two islands the smaller norm is the limit.

All islands must find the same factors to the last bit, on any hardware. Sums of floating-point numbers depend on their
order, and that on the processor. So squares are added up as integers: exact, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BITS = 40
"""Of a square that is at most 1. A sum of 2^22 of them fits into 63."""
CHUNK = 1 << 22


def limited(outer_gradients: Iterable[Tensor]) -> list[float]:
    """The factor of every payload, from what it says: the whole island's, however many ranks it has."""
    return factors([norm(each) for each in outer_gradients])


def factors(norms: Sequence[float]) -> list[float]:
    """Of norms, which may be infinite.

    >>> factors([1.0, 2.0, 1000.0]), factors([3.0, 4.0]), factors([1.0, math.inf])
    ([1.0, 1.0, 0.002], [1.0, 0.75], [1.0, 0.0])
    """
    finite = sorted(each for each in norms if math.isfinite(each))
    limit = finite[(len(finite) - 1) // 2] if finite else 0.0
    return [0.0 if not math.isfinite(each) else 1.0 if each <= limit else limit / each for each in norms]


def norm(values: Tensor) -> float:
    """The Euclidean norm, the same on every machine; infinite if something is not finite.

    >>> norm(torch.tensor([3.0, -4.0])), norm(torch.zeros(3)), norm(torch.tensor([math.nan, 1.0]))
    (5.0, 0.0, inf)
    """
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        return math.inf
    if largest == 0:
        return 0.0
    exponent = math.frexp(largest)[1]  # largest < 2^exponent
    total = 0
    for chunk in values.split(CHUNK):
        scaled = torch.ldexp(chunk.double(), torch.tensor(-exponent))
        total += int((scaled.square() * 2.0**BITS).long().sum())
    return math.ldexp(math.sqrt(total / 2.0**BITS), exponent)
