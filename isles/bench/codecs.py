"""Codecs against memcpy: how fast a vector becomes bytes, and bytes a vector, on one thread.

The baseline is `copy_` of the same values in fp32 into memory that exists: 1.0 is its speed. Every operation takes
turns with it. Measured are

    encode          into a new payload
    encode_into     into memory that exists, as `copy_` has it
    accumulate      decode and add to a sum that exists: what is done with every payload that arrives
    decode          into a new vector

New memory costs more than one would think: the system hands it out page by page, filled with zeros. The rows with
"PyTorch" in their name are the same codec without compiled kernels, bit for bit the same payload.
"""

from __future__ import annotations

from typing import Any

import torch

from isles.bench.clock import fastest
from isles.bench.kernels import without_kernels
from isles.wire.codecs import Codec, codecs
from isles.wire.fused import warm_up

LIMIT_SECONDS = 8.0
"""For one codec; those without kernels are a hundred times slower."""


def measure(values: int, repeats: int) -> dict[str, dict[str, Any]]:
    """For every codec: bits a value, whether there is a kernel, and speeds as fractions of memcpy's."""
    warm_up()
    source = torch.randn(values, generator=torch.Generator().manual_seed(0)) * 1e-3
    result = {name: _measure(codec, source, repeats) for name, codec in codecs.items()}
    with without_kernels():
        result["e3m0, PyTorch"] = {**_measure(codecs["e3m0"], source, repeats), "kernel": False}
    return result


def _measure(codec: Codec, source: torch.Tensor, repeats: int) -> dict[str, Any]:
    payload = codec.encode(source)
    target, again = torch.zeros_like(source), torch.empty_like(payload)
    seconds = fastest(
        {
            "copy": lambda: target.copy_(source),
            "encode": lambda: codec.encode(source),
            "encode_into": lambda: codec.encode(source, again),
            "accumulate": lambda: codec.accumulate(payload, target, 0.5),
            "decode": lambda: codec.decode(payload, source.numel()),
        },
        repeats=repeats,
        limit_seconds=LIMIT_SECONDS,
    )
    copy = seconds.pop("copy")
    speeds = {name: copy / second for name, second in seconds.items()}
    return {"bits": 8 * payload.numel() / source.numel(), "kernel": codec.kernels != "", **speeds}
