"""What it costs to turn an outer gradient into bytes and back: time that no bandwidth can buy.

Six costs, each in parameters per second of one process (rank), in the order in which a fragment meets them:

    gradient   anchor - weights, checked                      the training loop; one pass with encode, which counts it,
                                                              where a codec has kernels (`isles.wire.fused`)
    encode     one payload                                    the training loop; without kernels in the background, but
                                                              with delayed and eager updates in the loop
    seal       checksum of one payload                        in the background, in the middle of an exchange
    decode     checksum, decode and add one payload           in the background; eager updates do two more in the loop
    outer      the outer step                                 in the background; with delayed and eager updates in the
                                                              loop
    mix        writing the weights                            the training loop

With all-gather every island decodes the payloads of all; with reduce-scatter its piece of each, all but the last part
of it while the link is busy anyway, and the means of all. Work in the background takes a core: where all of them train
(`spare_cores=False`), it takes as much from the loop instead. How fast all this is differs a hundredfold between one
core and a GPU, so no speed is assumed: coding is taken to keep up unless speeds are given, or `isles plan
--measure-coding` measures the machine it runs on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from isles.plan.quantities import positive


@dataclass(frozen=True, kw_only=True)
class Coding:
    """Speeds in parameters per second and process.

    >>> Coding.free().decode_per_second
    inf
    """

    gradient_per_second: float = math.inf
    encode_per_second: float = math.inf
    seal_per_second: float = math.inf
    decode_per_second: float = math.inf
    outer_per_second: float = math.inf
    mix_per_second: float = math.inf
    spare_cores: bool = True
    """Whether there are cores for the background threads."""

    def __post_init__(self) -> None:
        for name, value in self.speeds().items():
            if value != math.inf:
                positive(value, f"{name}={value}")

    @classmethod
    def free(cls) -> Coding:
        """Coding that takes no time, as in the papers."""
        return cls()

    def speeds(self) -> dict[str, float]:
        """By name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "spare_cores"}

    def at(self, **speeds: float) -> Coding:
        """With other speeds."""
        changes: dict[str, Any] = dict(speeds)
        return replace(self, **changes)


def measure(codec: str, numel: int = 1 << 20, repeats: int = 5, at_once: int = 1) -> Coding:
    """Times one codec on this machine, in the way the engine uses it.

    With `at_once`, so many processes do the same thing at the same time, a thread each, and the time of the last one
    counts: cores share caches and memory, so two of them are not twice as fast as one.
    """
    import torch

    from isles.wire.fused import warm_up

    everybody = [_actions(codec, numel) for _ in range(at_once)]
    warm_up()  # what is timed is what will run
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = [_best(list(alike), repeats) for alike in zip(*everybody, strict=True)]
    finally:
        torch.set_num_threads(threads)
    free = Coding.free()
    return free.at(**dict(zip(free.speeds(), (numel / second for second in seconds), strict=True)))


def _actions(codec: str, numel: int) -> list[Callable[[], None]]:
    """What a process does with a fragment, in the order of the speeds."""
    import torch

    from isles.core.method import Method
    from isles.core.outer import OuterSGD, mix_in_place
    from isles.wire import message, reduction
    from isles.wire.codecs import codecs
    from isles.wire.fused import encode_difference
    from isles.wire.packing import empty

    chosen = codecs[codec]
    anchor = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 0.02
    weights, mean = anchor + 1e-3, anchor * 1e-3
    method = Method()
    outer = OuterSGD.of(method)
    velocity = outer.init(anchor)
    body = chosen.encode(anchor)

    def gradient() -> None:
        torch.sub(anchor, weights, out=empty(numel))

    def encode() -> None:
        if encode_difference(chosen, anchor, [weights]) is None:
            if chosen.kernels:  # which are not compiled here
                gradient()
            chosen.encode_if_finite(mean)

    def seal() -> None:
        message.checksum(body)

    def decode() -> None:
        message.checksum(body)
        reduction.weighted_mean([body], [1.0], chosen, numel)

    def step() -> None:
        outer.give_back(*outer.update_aside(anchor, mean, velocity, *method.outer_at(1)))

    def blend() -> None:
        if not mix_in_place([weights], anchor, 0.5):
            weights.mul_(0.5).add_(anchor * 0.5)

    return [gradient, encode, seal, decode, step, blend]


def _best(actions: list[Callable[[], None]], repeats: int) -> float:
    """Seconds until all of these, done at the same time, are done; at its best, after one time that warms up."""
    ends = [0.0] * len(actions)
    everybody = threading.Barrier(len(actions))

    def work(place: int) -> None:
        everybody.wait()
        actions[place]()
        ends[place] = time.perf_counter()

    best = math.inf
    for turn in range(1 + repeats):
        others = [threading.Thread(target=work, args=(place,)) for place in range(1, len(actions))]
        for thread in others:
            thread.start()
        begin = time.perf_counter()
        work(0)
        for thread in others:
            thread.join()
        if turn:
            best = min(best, max(ends) - begin)
    return best
