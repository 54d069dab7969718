"""Every kernel that is there against PyTorch on the CPU, which defines the bits.

The values are of every size that fp32 has, with zeros of both signs, denormals, values at which rounding is decided,
and rows that are not full. A kernel that gives other bits would let islands of unlike hardware drift apart without a
word: better to know before training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from isles.bench.kernels import without_kernels
from isles.core.outer import OuterSGD
from isles.wire import device_kernels, fused, reduction
from isles.wire.codecs import Codec, codecs
from isles.wire.reduction import Gathered

NUMEL = 5003
LENGTHS = (1, 2700, 130, 2172)
SAME = "same bits"


def check_cpu() -> dict[str, str]:
    """The kernels that numba compiles: what became of each group, in words."""
    fused.warm_up()
    groups = [group for group in (*fused.GROUPS, fused.OUTER) if fused.kernels(group)]
    return {group: _verdict(functools.partial(_cpu_group, group)) for group in groups}


def check_device(device: torch.device) -> dict[str, str]:
    """The kernels for accelerators, on one of them: each codec, the outer step from payloads included, and the one
    from a mean.
    """
    if not device_kernels.available(device):
        return {}
    found = {name: _verdict(functools.partial(_device_codec, codecs[name], device)) for name in device_kernels.LIMITS}
    return {**found, fused.OUTER: _verdict(lambda: _device_step(device, values(5).to(device), values(5)))}


def _verdict(check: Callable[[], bool]) -> str:
    try:
        return SAME if check() else "OTHER BITS than PyTorch on the CPU"
    except Exception as error:  # of whatever kind: it goes into the report
        return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:200]


def values(seed: int, numel: int = NUMEL) -> Tensor:
    """Finite fp32 values of every kind; several of them can be added up without overflow."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=generator) * torch.logspace(-44, 30, numel)
    found[::7] = torch.randn(len(found[::7]), generator=generator) * 1e-3
    found[256:384], found[384:448] = 0.0, -0.0
    found[512:641] = torch.arange(-64, 65) * (127 / 128)  # ties of integers, and of powers of two
    found[700:720] = 2.0**-149
    return found


def _same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, signs of zeros included."""
    return torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def _cpu_group(group: str) -> bool:
    if group == fused.OUTER:
        with without_kernels():
            expected = _outer_steps()
        return all(map(_same, _outer_steps(), expected))
    codec = codecs[group]
    with without_kernels():
        expected = _coded(codec)
    return all(map(_same, _coded(codec), expected))


def _coded(codec: Codec) -> list[Tensor]:
    """A payload, its values, a mean: all that codecs do."""
    payload, total = codec.encode(values(1)), values(2)
    codec.accumulate(payload, total, 0.3, divisor=1.7)
    return [payload, codec.decode(payload, NUMEL), total]


def _outer_steps() -> list[Tensor]:
    outer, anchor, velocity = OuterSGD(momentum=True, nesterov=True), values(3), values(4)
    aside = outer.update_aside(anchor, values(5), velocity, 0.4, 0.9)
    outer.update(anchor, values(5), velocity, 0.4, 0.9)
    return [anchor, velocity, *(tensor for tensor in aside if tensor is not None)]


def _device_codec(codec: Codec, device: torch.device) -> bool:
    anchor, theta, weights = values(6), values(7), [1.0, 0.0, 2.5]
    payload = torch.empty(codec.num_bytes(NUMEL), dtype=torch.uint8, device=device)
    finite, mean = torch.zeros(1, dtype=torch.int32, device=device), torch.empty(NUMEL, device=device)
    thetas = [part.to(device) for part in theta.split(LENGTHS)]
    device_kernels.encode_difference(codec, anchor.to(device), thetas, payload, finite)
    bodies = [codec.encode(values(seed)) for seed in (8, 9, 10)]
    gathered = Gathered([body.to(device) for body in bodies], weights, codec, NUMEL)
    device_kernels.weighted_mean(gathered, mean)
    with without_kernels():
        expected = codec.encode(anchor - theta), reduction.weighted_mean(bodies, weights, codec, NUMEL)
    coded = bool(finite.item()) and _same(payload, expected[0]) and _same(mean, expected[1])
    return coded and _device_step(device, gathered, expected[1])


def _device_step(device: torch.device, given: Tensor | Gathered, mean: Tensor) -> bool:
    """The outer step and mixing with a mean, or from payloads that are `given` on the device."""
    anchor, velocity, alpha = values(3), values(4), 0.3
    thetas = [part.to(kind) for part, kind in zip(values(11).clamp(-6e4, 6e4).split(LENGTHS), _KINDS, strict=True)]
    there = [tensor.to(device, copy=True) for tensor in (anchor, velocity)]
    mixed = [tensor.to(device, copy=True) for tensor in thetas]
    device_kernels.outer_step_and_mix(there[0], given, there[1], mixed, 0.4, 0.9, True, alpha)
    with without_kernels():
        OuterSGD(momentum=True, nesterov=True).update(anchor, mean, velocity, 0.4, 0.9)
    pairs = zip(thetas, anchor.split(LENGTHS), strict=True)
    expected = [theta.float() * alpha + part * (1 - alpha) for theta, part in pairs]
    written = all(_same(new, wanted.to(new.dtype)) for new, wanted in zip(mixed, expected, strict=True))
    return written and _same(there[0], anchor) and _same(there[1], velocity)


_KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
