"""What it costs to turn an outer gradient into bytes and back: time that no bandwidth can buy.

Three costs, each in parameters per second of one process (rank):

    encode   the training loop: anchor - weights, checked and encoded. The loop stands still meanwhile.
    decode   the thread that talks to the link: checksum, decode and add one payload. The link stands still meanwhile.
    apply    the training loop: the outer step, and writing the weights.

On a CPU, with fresh updates, the engine does a part of this in threads beside the loop; that is not counted on here.
With all-gather every island decodes the payloads of all; with reduce-scatter its piece of each, and the means of
all. How fast that is differs a hundredfold between one core and a GPU, so no speed is assumed: coding is taken to keep
up unless speeds are given, or `isles plan --measure-coding` measures the machine it runs on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from isles.plan.quantities import positive


@dataclass(frozen=True, kw_only=True)
class Coding:
    """Speeds in parameters per second and process.

    >>> Coding.free().decode_per_second
    inf
    """

    encode_per_second: float
    decode_per_second: float
    apply_per_second: float

    def __post_init__(self) -> None:
        for name in ("encode_per_second", "decode_per_second", "apply_per_second"):
            value = getattr(self, name)
            if value != math.inf:
                positive(value, f"{name}={value}")

    @classmethod
    def free(cls) -> Coding:
        """Coding that takes no time, as in the papers."""
        return cls(encode_per_second=math.inf, decode_per_second=math.inf, apply_per_second=math.inf)


def measure(codec: str, numel: int = 1 << 20, repeats: int = 5) -> Coding:
    """Times one codec on this machine, in the way the engine uses it, on one thread."""
    import torch

    from isles.core.method import Method
    from isles.core.outer import OuterSGD, mix_vectors
    from isles.wire import message, reduction
    from isles.wire.codecs import codecs
    from isles.wire.fused import warm_up
    from isles.wire.packing import empty

    chosen = codecs[codec]
    warm_up()  # what is timed is what will run
    anchor = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 0.02
    weights, mean = anchor + 1e-3, anchor * 1e-3
    outer = OuterSGD.of(Method())
    velocity = outer.init(anchor)
    body = chosen.encode(anchor)

    def encode() -> None:
        chosen.encode_if_finite(torch.sub(anchor, weights, out=empty(numel)))

    def decode() -> None:
        message.checksum(body)
        reduction.weighted_mean([body], [1.0], chosen, numel)

    def apply() -> None:
        outer.update(anchor, mean, velocity)
        mix_vectors(weights, anchor, 0.5)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            seconds = [_best(action, repeats) for action in (encode, decode, apply)]
    finally:
        torch.set_num_threads(threads)
    encode_rate, decode_rate, apply_rate = (numel / second for second in seconds)
    return Coding(encode_per_second=encode_rate, decode_per_second=decode_rate, apply_per_second=apply_rate)


def _best(action: Callable[[], None], repeats: int) -> float:
    """Seconds of an action at its best, after one that warms up."""
    action()
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begin)
    return best
