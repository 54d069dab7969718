"""isles trains one model on several islands of compute joined by slow links.

    with isles.DiLoCo(model, optimizer, isles.Method.streaming()):
        ...                                     # your loop, untouched

- The method: `Method`, and `codecs`, a dict of what can cross the link.
- The engine: `DiLoCo`; what it counts and tells: `Stats`, `Event`.
- Worlds, the ways between islands: `TorchWorld` (torch.distributed), `StoreWorld` (a bucket or a folder, which
  `probe_store` tries), `LocalWorld` (threads, which `run_local` starts).
- What goes wrong between islands: `LostPeerError`, `MismatchError`.
- Callbacks for trainers: `isles.integrations`.

Each name is loaded when it is first used, so that `import isles` (and `isles --help`) stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isles.core.diloco import DiLoCo
    from isles.core.method import Method
    from isles.core.stats import Event, Stats
    from isles.elastic.store import probe_store
    from isles.elastic.world import StoreWorld
    from isles.wire.codecs import codecs
    from isles.wire.local_world import LocalWorld, run_local
    from isles.wire.torch_world import TorchWorld
    from isles.wire.world import LostPeerError, MismatchError

    __version__: str

_HOME = {
    "DiLoCo": "isles.core.diloco",
    "Event": "isles.core.stats",
    "Stats": "isles.core.stats",
    "Method": "isles.core.method",
    "codecs": "isles.wire.codecs",
    "LocalWorld": "isles.wire.local_world",
    "run_local": "isles.wire.local_world",
    "TorchWorld": "isles.wire.torch_world",
    "StoreWorld": "isles.elastic.world",
    "probe_store": "isles.elastic.store",
    "LostPeerError": "isles.wire.world",
    "MismatchError": "isles.wire.world",
}

__all__ = [
    "DiLoCo",
    "Event",
    "LocalWorld",
    "LostPeerError",
    "Method",
    "MismatchError",
    "Stats",
    "StoreWorld",
    "TorchWorld",
    "codecs",
    "probe_store",
    "run_local",
]


if not TYPE_CHECKING:  # type checkers know the names from above, and that there are no others

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata  # not at the top: it takes longer than all else here

            try:
                return metadata.version("isles")
            except metadata.PackageNotFoundError:  # a checkout that was never installed
                return "unknown"
        if name not in _HOME:
            raise AttributeError(f"module 'isles' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
