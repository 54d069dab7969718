"""The most that lives on the device, counted tensor by tensor, against data-parallel training.

Every tensor that an operation allocates is recorded with its size, and removed when its memory is freed: weights,
gradients, optimizer, activations, isles' state and temporaries. Data-parallel training holds on each rank what the bare
loop holds (DDP with `gradient_as_bucket_view=True`; without it, the gradients once more).

No GPU is needed: the training thread's memory is taken for the device's, and what would be in host memory is not
counted. That is the offloaded outer state (`outer_device="cpu"`), payloads once they are handed over to the world, and
everything the world does to average them, with the outer step where it is taken on the host. The mean, or the new
anchor, comes to the device as a copy. `tests/test_device_order.py` counts the same on a pretend device.

    at rest     between two steps: what lives as long as the run, and fragments in flight. The papers count this:
                weights and two moments of Adam are 3, anchor and outer momentum make it 5: 5/3
    peak        at any moment. Gradients are there too while isles works, in the optimizer's step: without temporaries
                it would be 6/4 instead of 5/3

Codecs without kernels may need more for a moment: that is the last column. (A device without kernels works on vectors
in pieces, `isles.core.device`, and needs less.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import isles
from isles.bench.kernels import without_kernels
from isles.bench.training import Training
from isles.wire.world import Handle, Mean, Payload, World

LAYERS, ROWS = 36, 2
SETTINGS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "DiLoCo, one fragment": ("diloco", {"codec": "e3m0"}, None),
    "streaming": ("streaming", {}, None),
    "streaming, outer state on the host": ("streaming", {}, "cpu"),
    "eager": ("eager", {}, None),
    "eager, outer state on the host": ("eager", {}, "cpu"),
}
"""Method, knobs, and where the outer state is kept."""


def measure(parameters: int, sync_every: int) -> dict[str, dict[str, Any]]:
    """Bytes at rest and at the peak of each setting, and as ratios to the bare loop."""
    rows: dict[str, dict[str, Any]] = {"bare loop": _measure(parameters, 3, None, None)}
    for name, (method, knobs, outer_device) in SETTINGS.items():
        chosen = getattr(isles.Method, method)(sync_every=sync_every, **knobs)
        rows[name] = _measure(parameters, 2 * sync_every + 2, chosen, outer_device)
        with without_kernels():
            plain = _measure(parameters, 2 * sync_every + 2, chosen, outer_device)
        rows[name]["peak_bytes_pytorch"] = plain["peak_bytes"]
    bare = rows["bare loop"]
    bare["peak_bytes_pytorch"] = bare["peak_bytes"]
    for row in rows.values():
        row["rest"] = row["rest_bytes"] / bare["rest_bytes"]
        row["peak"] = row["peak_bytes"] / bare["peak_bytes"]
        row["peak_pytorch"] = row["peak_bytes_pytorch"] / bare["peak_bytes"]
    return rows


def _measure(parameters: int, steps: int, method: isles.Method | None, outer_device: str | None) -> dict[str, Any]:
    with Ledger() as ledger:
        training = Training(parameters, LAYERS, ROWS)
        training.step()  # the optimizer's state is made in the first step
        fragments = 1
        if method is not None:
            world = _HostWorld(isles.LocalWorld.alone(), ledger, offloaded=outer_device is not None)
            diloco = isles.DiLoCo(training.model, training.optimizer, method, world=world, outer_device=outer_device)
            fragments = len(diloco.fragments)
            for state in diloco._rounds.offload.states if outer_device else ():
                for tensor in (state.anchor, state.velocity):
                    ledger.to_host(tensor)
        rest, ledger.peak_bytes = 0, ledger.live_bytes
        for _ in range(steps):
            training.step()
            rest = max(rest, ledger.live_bytes)
        if method is not None:
            diloco.close()
    return {
        "parameters": training.parameters,
        "fragments": fragments,
        "rest_bytes": rest,
        "peak_bytes": ledger.peak_bytes,
    }


class Ledger(TorchDispatchMode):
    """Counts the bytes of all memory that tensor operations of this thread have made and that is still held.

    >>> import torch
    >>> with Ledger() as ledger:
    ...     first = torch.ones(100) + torch.ones(100)
    >>> ledger.live_bytes, ledger.peak_bytes
    (400, 1200)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._held: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By the address of the storage: a weak reference, and its bytes as counted."""
        self._on_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._record(leaf)
        return result

    def to_host(self, tensor: Tensor | None) -> None:
        """From now on this memory is not the device's."""
        if tensor is not None and (key := tensor.untyped_storage()._cdata) in self._held:
            reference, num_bytes = self._held[key]
            self.live_bytes -= num_bytes
            self._held[key] = reference, 0

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What is made inside is not the device's."""
        self._on_host = True
        try:
            yield
        finally:
            self._on_host = False

    def _record(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            num_bytes = 0 if self._on_host else storage.nbytes()
            self._held[key] = weakref.ref(storage, lambda _: self._remove(key)), num_bytes
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remove(self, key: int) -> None:
        self.live_bytes -= self._held.pop(key)[1]


class _HostWorld:
    """A world whose work is done in host memory. `offloaded`: outer steps are taken there, as a world with threads does
    it.
    """

    def __init__(self, world: World, ledger: Ledger, *, offloaded: bool) -> None:
        self._world, self._ledger, self._offloaded = world, ledger, offloaded
        self.rank, self.gather = world.rank, world.gather

    @property
    def size(self) -> int:
        return self._world.size

    def start(self, payload: Payload) -> Handle:
        self._ledger.to_host(payload.body)
        with self._ledger.on_host():
            started = self._world.start(payload)
        if self._offloaded and payload.then is not None:
            return _SteppingHandle(started, self._ledger, payload.then)
        return _HostHandle(started, self._ledger)


class _HostHandle:
    def __init__(self, handle: Handle, ledger: Ledger) -> None:
        self._handle, self._ledger = handle, ledger
        self.bytes_sent, self.bytes_received = handle.bytes_sent, handle.bytes_received

    def wait(self) -> Mean:
        with self._ledger.on_host():
            mean = self._handle.wait()
        return Mean(mean.values.clone(), mean.weights)  # arrives on the device


class _SteppingHandle(_HostHandle):
    """The same of a round whose outer step is taken on the host: the mean stays there."""

    arrived = None

    def __init__(self, handle: Handle, ledger: Ledger, then: Callable[[Mean], None]) -> None:
        super().__init__(handle, ledger)
        self._then = then

    def wait(self) -> Mean:
        with self._ledger.on_host():
            mean = self._handle.wait()
            self._then(mean)
        return mean
