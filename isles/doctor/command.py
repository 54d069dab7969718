"""`isles doctor`: prints what isles sees, tests what is there, and says what to do about what is missing.

Missing is what isles can do without: the exit code stays 0. Broken is what is there and does not work, or what nothing
goes without: the exit code is 1.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from isles.doctor import kernels, smoke
from isles.doctor.sight import Sight, look
from isles.wire import device_kernels

SMALL_LOCKED_MEMORY = 1 << 26
"""Below it pinned memory, which GPUs copy from and to, may be refused."""


def configure(parser: argparse.ArgumentParser) -> None:
    """`isles doctor` has no flags of its own."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints line by line, as it is found."""
    sight = look()
    for title, text in describe(sight):
        print(f"{title:<12}{text}", flush=True)
    tested = {"cpu, numba": kernels.check_cpu(), **_device_kernels(sight)}
    print(f"{'kernels':<12}{_of_kernels(tested)}", flush=True)
    ran = _smoke(sight)
    print(f"{'two islands':<12}{'; '.join(f'{where}: {result}' for where, result in ran.items())}", flush=True)
    broken, missing = problems(sight, tested, ran), advice(sight)
    for line in broken:
        print(f"broken: {line}")
    for line in missing:
        print(f"missing: {line}")
    print("something is broken" if broken else "all that is needed works")
    return {
        "ok": not broken,
        "broken": broken,
        "missing": missing,
        "seen": sight.as_dict(),
        "kernels": tested,
        "two_islands": ran,
    }


def exit_code(result: dict[str, Any]) -> int:
    """1 if something is broken."""
    return 0 if result["ok"] else 1


def describe(sight: Sight) -> list[tuple[str, str]]:
    """What there is, a line for each thing."""
    devices = ", ".join(f"{device} ({name})" for device, name in sight.devices.items()) or "no accelerator"
    memory = "" if sight.memory is None else f", {sight.memory / 2**30:.0f} GiB of memory"
    locked = "no limit" if sight.locked_memory is None else f"{sight.locked_memory / 2**20:.0f} MiB"
    chosen = f"; GLOO_SOCKET_IFNAME={sight.chosen_interface}" if sight.chosen_interface else ""
    interfaces = ", ".join(f"{name} {address}" for name, address in sight.interfaces.items()) or "none found"
    return [
        ("isles", f"{sight.isles}, Python {sight.python}, {sight.system}"),
        ("torch", f"{sight.torch}, {sight.threads} threads on {sight.cores} cores{memory}"),
        ("devices", devices),
        ("backends", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in sight.backends.items())),
        ("numba", (sight.numba or "no") + (", switched off by ISLES_FUSED=0" if sight.kernels_off else "")),
        ("Triton", sight.triton or "no"),
        ("store", f"obstore {sight.obstore}" if sight.obstore else "no obstore"),
        ("network", interfaces + chosen),
        ("locked", f"{locked} for pinned memory"),
    ]


def advice(sight: Sight) -> list[str]:
    """What is missing, and what to do about it."""
    lines = []
    if sight.kernels_off:
        lines.append("kernels are off (ISLES_FUSED=0), codecs run in PyTorch, more slowly: unset ISLES_FUSED")
    elif sight.numba is None:
        lines.append("numba: codecs on the CPU run in PyTorch, some fifty times as slowly: pip install 'isles[fast]'")
    if sight.accelerator in ("cuda", "xpu") and sight.triton is None:
        lines.append(f"Triton: codecs on {sight.accelerator} take 41 launches instead of 2: pip install 'isles[gpu]'")
    if sight.accelerator == "cuda" and len(sight.devices) > 1 and not sight.backends["nccl"]:
        lines.append("NCCL, for several GPUs in one island: install a build of torch that has it")
    if sight.obstore is None:
        lines.append("obstore, for islands that meet in a bucket or a folder: pip install 'isles[store]'")
    if set(sight.interfaces) <= {sight.loopback}:
        lines.append("a network interface besides loopback: other machines cannot be reached, islands here can")
    limited = sight.locked_memory is not None and sight.locked_memory < SMALL_LOCKED_MEMORY
    if sight.accelerator and limited:
        lines.append("locked memory, of which there is little: ulimit -l unlimited (docker: --ulimit memlock=-1)")
    return lines


def problems(sight: Sight, tested: dict[str, dict[str, str]], ran: dict[str, str]) -> list[str]:
    """What is there and does not work, and what nothing goes without."""
    lines = []
    if not sight.backends["gloo"]:
        lines.append("this build of torch has no gloo, over which islands exchange: install one that has it")
    if sight.chosen_interface and not set(sight.chosen_interface.split(",")) <= set(sight.interfaces):
        there = ", ".join(sight.interfaces) or "none"
        lines.append(f"GLOO_SOCKET_IFNAME={sight.chosen_interface} is no interface with an address: there are {there}")
    for where, results in tested.items():
        bad = [f"{name} ({result})" for name, result in results.items() if result != kernels.SAME]
        if bad:
            lines.append(f"kernels on {where}: {', '.join(bad)}; go on with ISLES_FUSED=0, and report it")
    lines += [f"two islands, {where}: {result}" for where, result in ran.items() if result != smoke.FINE]
    return lines


def _device_kernels(sight: Sight) -> dict[str, dict[str, str]]:
    devices = [torch.device(name) for name in sight.devices]
    if device_kernels.interpreted():
        devices.append(torch.device("cpu"))
    found = {f"{device}, Triton": kernels.check_device(device) for device in devices}
    return {where: results for where, results in found.items() if results}


def _of_kernels(tested: dict[str, dict[str, str]]) -> str:
    parts = []
    for where, results in tested.items():
        same = [name for name, result in results.items() if result == kernels.SAME]
        other = [f"{name} {result}" for name, result in results.items() if result != kernels.SAME]
        words = ([f"{', '.join(same)} have the bits of PyTorch"] if same else []) + other
        parts.append(f"{where}: {'; '.join(words) or 'none'}")
    return "; ".join(parts)


def _smoke(sight: Sight) -> dict[str, str]:
    """On the CPU, and on one accelerator of each kind that is there."""
    ran = {}
    for name in ["cpu", *list(sight.devices)[:1]]:
        device = torch.device(name)
        ran[f"threads on {name}"], digest = smoke.threads(device)
        if sight.backends["gloo"]:
            expected = digest if device.type == "cpu" else ""
            ran[f"processes on {name}"] = smoke.processes(device, expected, sight.loopback)
    return ran
