"""What there is on this machine that isles can use. Nothing is tried here, only looked at."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

import isles

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Sight:
    """Everything that was found; None: not there."""

    isles: str
    python: str
    system: str
    torch: str
    threads: int
    cores: int
    accelerator: str | None
    """Its type, as torch calls it."""
    devices: dict[str, str]
    """Names of accelerators, by device."""
    backends: dict[str, bool]
    """Of torch.distributed."""
    numba: str | None
    triton: str | None
    obstore: str | None
    kernels_off: bool
    """ISLES_FUSED=0."""
    interfaces: dict[str, str]
    """Addresses of network interfaces that have one."""
    chosen_interface: str | None
    """GLOO_SOCKET_IFNAME."""
    locked_memory: int | None = None
    """The limit in bytes; None: there is no limit, or no such thing."""
    memory: int | None = field(default=None)

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @property
    def loopback(self) -> str | None:
        """The interface that leads to this machine itself."""
        return next((name for name, address in self.interfaces.items() if address.startswith("127.")), None)


def look() -> Sight:
    """Looks at this machine."""
    accelerator = _accelerator()
    return Sight(
        isles=isles.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        cores=os.cpu_count() or 1,
        accelerator=accelerator,
        devices={} if accelerator is None else _devices(accelerator),
        backends=_backends(),
        numba=_version("numba"),
        triton=_version("triton"),
        obstore=_version("obstore"),
        kernels_off=os.environ.get("ISLES_FUSED") == "0",
        interfaces=_interfaces(),
        chosen_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        locked_memory=_locked_memory(),
        memory=_memory(),
    )


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def _devices(kind: str) -> dict[str, str]:
    module, found = torch.get_device_module(kind), {}
    for index in range(torch.accelerator.device_count()):
        name = module.get_device_name(index) if hasattr(module, "get_device_name") else kind
        found[f"{kind}:{index}"] = str(name)
    return found


def _backends() -> dict[str, bool]:
    if not torch.distributed.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}


def _version(package: str) -> str | None:
    """Of a package that can be imported; it is not imported."""
    if importlib.util.find_spec(package) is None:
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "of unknown version"


def _interfaces() -> dict[str, str]:
    found = {}
    try:
        import fcntl
    except ImportError:  # not a Unix
        return {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _locked_memory() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
