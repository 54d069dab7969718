"""From the payloads of all islands to their mean: two forms, the same answer everywhere.

all-gather: everybody sends its payload to everybody, decodes all of them and adds them up in fp32, in the order of
ranks. An island sends M - 1 payloads. The mean is exact to fp32.

reduce-scatter: island r averages the r-th piece of all payloads in the same way, encodes the mean again and sends it
to everybody. An island sends 2 (M - 1) / M payloads; the price is that the mean goes through the codec once more.

At two islands both send the same, so all-gather is the better one. `docs/log.md` has the measurement behind `choose`.
These are pure functions; `isles.wire.exchange` moves the bytes. Threads and processes agree bit for bit because there
is only one place where numbers are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from isles.wire.codecs import Codec
from isles.wire.message import CHECKSUM, HEADER_BYTES
from isles.wire.packing import empty
from isles.wire.world import Payload

Reduction = Literal["auto", "all-gather", "reduce-scatter"]
LARGEST_ALL_GATHER = 4  # the most islands for which it is the default
PART_BYTES = 1 << 18  # at most this much of a piece goes, and is averaged, at once
MAX_IN_FLIGHT = 4  # rounds on the link: enough to fill it while some wait for an answer; each has buffers to receive in


def choose(reduction: Reduction, islands: int, codec: Codec) -> Reduction:
    """Which form is used for so many islands. A mean of sparse vectors is not sparse: it is not encoded again."""
    if reduction == "auto":
        return "all-gather" if islands <= LARGEST_ALL_GATHER or codec.sparse else "reduce-scatter"
    return "all-gather" if islands == 1 else reduction


def check_reduction(reduction: str) -> None:
    """Raises unless there is such a form."""
    if reduction not in ("auto", "all-gather", "reduce-scatter"):
        raise ValueError(f"reduction={reduction!r} must be one of auto, all-gather, reduce-scatter")


def piece_numel(numel: int, islands: int, codec: Codec) -> int:
    """How many values each island averages in the reduce-scatter form: whole blocks, the same number for everybody.

    >>> from isles.wire.codecs import codecs
    >>> piece_numel(1000, 3, codecs["e3m0"])
    384
    """
    return -(-numel // (islands * codec.block)) * codec.block


class Part(NamedTuple):
    """Whole blocks of a piece, which are sent, averaged and decoded together: where they are in it."""

    encoded: slice
    values: slice

    @property
    def numel(self) -> int:
        return int(self.values.stop - self.values.start)

    @property
    def num_bytes(self) -> int:
        return int(self.encoded.stop - self.encoded.start)


def parts(piece_numel: int, codec: Codec) -> list[Part]:
    """A piece, whole blocks, in parts: while one is on the link another one is averaged.

    >>> from isles.wire.codecs import codecs
    >>> parts(64, codecs["fp32"])
    [Part(encoded=slice(0, 256, None), values=slice(0, 64, None))]
    """
    blocks, starts = piece_numel // codec.block, part_starts(piece_numel, codec)
    ranges = [(first, min(first + starts.step, blocks)) for first in starts]
    size, numel = codec.block_bytes, codec.block
    return [Part(slice(first * size, end * size), slice(first * numel, end * numel)) for first, end in ranges]


def part_starts(piece_numel: int, codec: Codec) -> range:
    """The first block of every part. Stochastic rounding depends on where in its piece a block stands: one part."""
    blocks = piece_numel // codec.block
    most = blocks if codec.stochastic else PART_BYTES // codec.block_bytes
    return range(0, blocks, max(1, most))


def split(body: Tensor, numel: int, islands: int, codec: Codec) -> Tensor:
    """[islands, bytes]: the piece of a body for each island; bytes that are missing in the last ones are zero."""
    missing = islands * codec.num_bytes(piece_numel(numel, islands, codec)) - body.numel()
    return (torch.cat([body, body.new_zeros(missing)]) if missing > 0 else body).view(islands, -1)


def average(bodies: Sequence[Tensor], weights: Sequence[float], codec: Codec, part: Part, out: Tensor) -> None:
    """The mean of the same part of all payloads, encoded again."""
    codec.encode(weighted_mean(bodies, weights, codec, part.numel), out=out)


class Gathered(NamedTuple):
    """The payloads of a round in their order, and how much each counts: a mean that nobody has made yet.

    A device that averages payloads itself is given these: they cross to it in fewer bytes than their mean.
    """

    bodies: Sequence[Tensor]
    weights: Sequence[float]
    codec: Codec
    numel: int
    factors: Sequence[float] | None = None

    def mean(self) -> Tensor:
        return weighted_mean(*self)

    def result(self, apart: bool) -> Tensor | Gathered:
        """The mean; or, with `apart`, the payloads that have a weight, unless they are as long as their mean."""
        present = [place for place, weight in enumerate(self.weights) if weight > 0]
        if not apart or len(present) * self.codec.num_bytes(self.numel) >= torch.float32.itemsize * self.numel:
            return self.mean()
        chosen = lambda values: [values[place] for place in present]
        factors = None if self.factors is None else chosen(self.factors)
        return self._replace(bodies=chosen(self.bodies), weights=chosen(self.weights), factors=factors)


def weighted_mean(
    bodies: Sequence[Tensor],
    weights: Sequence[float],
    codec: Codec,
    numel: int,
    factors: Sequence[float] | None = None,
) -> Tensor:
    """The mean of payloads in fp32, added up in the given order. Weight zero means not there: its body is not read.

    With `factors` each payload is multiplied by its own, and the weights stay what they are.
    """
    parts, total = multipliers(weights, factors)
    if not any(parts):
        return torch.zeros(numel)
    mean = empty(numel)
    if not _add_up(bodies, parts, codec, mean, divisor=total):  # the sum was too large for fp32, the mean is not
        _add_up(bodies, [part / total for part in parts], codec, mean, divisor=1.0)
    return mean


def multipliers(weights: Sequence[float], factors: Sequence[float] | None = None) -> tuple[list[float], float]:
    """What each payload is multiplied by before all are added up, and what the sum is divided by."""
    scaled = _scaled(weights)
    return [w * factor for w, factor in zip(scaled, factors or [1.0] * len(scaled), strict=True)], sum(scaled)


def _add_up(bodies: Sequence[Tensor], weights: Sequence[float], codec: Codec, into: Tensor, divisor: float) -> bool:
    """The weighted sum over `divisor`, which goes with the last one that is added; returns whether it is finite."""
    present = [(body, weight) for body, weight in zip(bodies, weights, strict=True) if weight > 0]
    finite = False
    for number, (body, weight) in enumerate(present, start=1):
        last = divisor if number == len(present) else 1.0
        finite = codec.accumulate(body, into, weight, fresh=number == 1, divisor=last)
    return finite


def _scaled(weights: Sequence[float]) -> list[float]:
    """Weights times a power of two, exactly, so that the largest is about 1: only their ratios matter.

    >>> _scaled([1.0, 3.0]), _scaled([2.0**200, 2.0**201, 0.0])
    ([0.5, 1.5], [0.5, 1.0, 0.0])
    """
    exponent = math.frexp(max(weights, default=0.0))[1] - 1
    return [math.ldexp(weight, -exponent) for weight in weights]


def traffic(form: Reduction, islands: int, payload: Payload) -> int:
    """Bytes that one island sends for a round, and receives, headers and checksums included."""
    if form == "all-gather":
        return (islands - 1) * (HEADER_BYTES + payload.num_bytes)
    numel = piece_numel(payload.numel, islands, payload.codec)
    checksums = CHECKSUM.size * len(part_starts(numel, payload.codec))
    return (islands - 1) * (HEADER_BYTES + 2 * (payload.codec.num_bytes(numel) + checksums))
