"""Kernels on an accelerator: time for a vector, and how near that is to what its memory allows.

What a kernel has to read and write is known, so its time is a bandwidth, and `copy_` in the device's own memory is what
it is compared with: 1.0 is its speed. Payloads and a mean in fp32 also cross to the host and back, through pinned
memory. `docs/accelerators.md` has what to expect.

    encode          anchor and weights in fp32 -> payload
    mean            two payloads -> their mean
    step            mean -> outer step with Nesterov momentum, mixing
    step, payloads  the last two in one: the mean is nowhere in memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from isles.bench.clock import fastest
from isles.wire import device_kernels
from isles.wire.codecs import codecs
from isles.wire.reduction import Gathered

TENSORS = 24
LIMIT_SECONDS = 20.0
STEP_BYTES = 24.0
"""Anchor, velocity and weights in fp32, each read and written."""


def find() -> torch.device:
    """The device to measure: the accelerator, or the CPU where Triton's interpreter is on."""
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        device = torch.device(device.type, torch.accelerator.current_device_index())
    else:
        device = torch.device("cpu")
    if not device_kernels.available(device):
        what = f"there are no kernels for {device}" if device.type != "cpu" else "there is no accelerator"
        raise ValueError(f"{what}: isles doctor says what isles sees, and what to do")
    return device


def measure(values: int, repeats: int) -> dict[str, Any]:
    """For every codec and kernel: seconds, bytes a value by arithmetic, and speed as a fraction of `copy_`."""
    device = find()
    source, target = (torch.randn(values, device=device) for _ in range(2))
    copy = _seconds({"copy": lambda: target.copy_(source)}, device, repeats)["copy"]
    rows = {}
    for name in device_kernels.LIMITS:
        for kernel, (action, num_bytes) in _kernels(name, values, device).items():
            seconds = _seconds({kernel: action}, device, repeats)[kernel]
            speed = num_bytes / 8 * copy / seconds
            rows[f"{name}: {kernel}"] = {"seconds": seconds, "bytes_a_value": num_bytes, "against_copy": speed}
    return {
        "device": str(device),
        "values": values,
        "copy_bytes_per_second": 8 * values / copy,
        "rows": rows,
        "host": _host(device, values, repeats),
    }


def _kernels(name: str, values: int, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """Every kernel with what it reads and writes for a value."""
    codec = codecs[name]
    anchor, velocity, mean = (torch.randn(values, device=device) for _ in range(3))
    thetas = list(torch.randn(values, device=device).split(-(-values // TENSORS)))
    bodies = [torch.zeros(codec.num_bytes(values), dtype=torch.uint8, device=device) for _ in range(2)]
    finite, how = torch.empty(1, dtype=torch.int32, device=device), (0.0, 0.9, True, 0.5)
    payload, gathered = codec.num_bytes(values) / values, Gathered(bodies, [1.0, 1.0], codec, values)
    return {
        "encode": (lambda: device_kernels.encode_difference(codec, anchor, thetas, bodies[0], finite), 8 + payload),
        "mean": (lambda: device_kernels.weighted_mean(gathered, mean), 2 * payload + 4),
        "step": (
            lambda: device_kernels.outer_step_and_mix(anchor, mean, velocity, thetas, *how),
            4 + STEP_BYTES,
        ),
        "step, payloads": (
            lambda: device_kernels.outer_step_and_mix(anchor, gathered, velocity, thetas, *how),
            4 * payload + STEP_BYTES,
        ),
    }


def _host(device: torch.device, values: int, repeats: int) -> dict[str, float]:
    """Bytes a second to the host and back, through pinned memory."""
    if device.type == "cpu":
        return {}
    here, there = torch.empty(values, device=device), torch.empty(values).pin_memory()
    actions = {
        "to_host": lambda: there.copy_(here, non_blocking=True),
        "from_host": lambda: here.copy_(there, non_blocking=True),
    }
    return {name: 4 * values / seconds for name, seconds in _seconds(actions, device, repeats).items()}


def _seconds(actions: Mapping[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    def finished(action: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            action()
            if device.type != "cpu":
                torch.accelerator.synchronize()

        return call

    return fastest(
        {name: finished(action) for name, action in actions.items()}, repeats=repeats, limit_seconds=LIMIT_SECONDS
    )
