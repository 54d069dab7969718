"""Kernels on the pretend device: those of Triton, run by its interpreter on the values inside the device's tensors.

A launch is one operation of the current stream, as any other of the device: what the kernel reads and writes has to be
there, in order. Most of that a kernel finds by addresses in tables, so the device is asked which memory these are of.
Addresses of memory that is gone are refused.

`install` is for the whole process: call it in one of its own (`tests.processes`).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from isles.wire import device_kernels, device_tables
from tests import interpreter, pretend
from tests.pretend import Memory, PretendTensor, inside, machine

WRITES = {
    "encode_difference": {"payload", "finite"},
    "merge": {"into", "finite"},
    "outer_step_and_mix": {"anchor", "velocity"},
}
"""The arguments that a kernel writes to; it reads all others, and these too unless they are new."""
launched: set[Any] = set()
"""Variants of kernels that ran: each of them has to be compiled before."""
compiled: set[Any] = set()


def install(interpreted: bool = True) -> torch.device:
    """The pretend device with kernels."""
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
            del sys.modules[name]  # PyTorch has imported it, to be compiled: it is imported again, to be interpreted
        interpreter.prepare()
    PretendTensor.data_ptr = lambda self: self.data_inside.data_ptr()  # type: ignore[method-assign]
    device_kernels._works = lambda device: device.type == "pretend"
    device_kernels.fits = lambda thetas, anchor: all(each.is_contiguous() for each in thetas)
    device_kernels._launch = _launch
    return pretend.install()


def _launch(name: str, where: torch.Tensor, *arguments: Any, **options: Any) -> None:
    from isles.wire import triton_kernels

    kernel = getattr(triton_kernels, name)
    variant = (name, *map(_kind, arguments), *sorted(options.items()))
    if device_kernels._mode.compiles:
        compiled.add(variant)
        return
    launched.add(variant)
    programs = -(-where.numel() // (device_tables.ROW * device_tables.ROWS))
    with machine.lock:
        reads, writes = _footprint(name, dict(zip(kernel.arg_names, arguments, strict=False)), options)
        machine.run_on(f"the kernel {name}", reads, writes)
        with device_kernels._interpreter:
            kernel[(programs,)](*inside(arguments), **options)


def _kind(argument: Any) -> Any:
    """What Triton compiles a kernel anew for: types, alignment, integers that are multiples of 16, or long. What it is
    told not to look at (`do_not_specialize`) are small ones, which count something.
    """
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return "small" if argument < 10 else (argument % 16 == 0, argument >= 2**31)
    return type(argument)


def _footprint(name: str, given: dict[str, Any], options: dict[str, Any]) -> tuple[list[Memory], list[Memory]]:
    """The memory that a kernel reads, and that it writes."""
    of = lambda tensor: machine.memory_of(tensor.data_inside)
    tensors = {each: tensor for each, tensor in given.items() if isinstance(tensor, torch.Tensor)}
    written = [of(tensor) for each, tensor in tensors.items() if each in WRITES[name]]
    fresh = {"payload"} | ({"into"} if options.get("START") in ("zero", "nothing") else set())
    read = [of(tensor) for each, tensor in tensors.items() if each not in fresh]
    if not options.get("STORE", True):
        written.remove(of(given["into"]))
    if "thetas" in tensors:
        thetas = [machine.memory_at(row[0]) for row in given["thetas"].data_inside.tolist() if row[2]]
        read += thetas
        written += thetas if options.get("MIXING", "none") != "none" else []
    if "bodies" in tensors and options["CODEC"] != "mean":
        table = given["bodies"].data_inside.view(-1)[0::3].tolist()
        read += [machine.memory_at(address) for address in table if address]
    return read, written
