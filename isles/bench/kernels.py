"""With and without compiled kernels in one process: codecs run in PyTorch inside `without_kernels`.

That is what runs on a CPU where there is no numba. Kernels for accelerators (`isles.wire.device_kernels`) stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from isles.wire import fused


@contextmanager
def without_kernels() -> Iterator[None]:
    """Hides all kernels from the whole process for a while, as ISLES_FUSED=0 does from the beginning."""
    fused.warm_up()
    ready = dict(fused._ready)
    fused._ready.clear()
    try:
        yield
    finally:
        fused._ready.update(ready)
