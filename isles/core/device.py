"""Streams, events and pinned memory: all that isles knows about accelerators.

An accelerator runs what it is given in the order of a *stream*, later, while the host goes on. The training loop has
one stream. isles has a second one for each device, the *side stream*: on it outer gradients are encoded and copied to
the host, and results are copied back, while the training stream goes on. Three kinds of waiting keep the order:

    follow    the side stream waits for what the training stream was given so far
    hold      the training stream waits for an event of the side stream, such as "theta has been read"
    Event.synchronize    a thread of the host waits; never the training loop

The first two are waits on the device: the host hands them over and goes on. Copies between host and device are
asynchronous only if the host's memory is pinned. PyTorch keeps pinned memory that was freed for the next one who asks,
and knows which copies still use it, so it is taken when it is needed and dropped afterwards.

Memory of the device belongs to the stream on which it was made. Whoever uses it on another stream says so (`hold`), or
the allocator would give it away too early.

On a CPU all of this is nothing: no second stream, events that have happened already, no copies. A device whose module
has no streams (MPS) has one order for everything, and events alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

PIECES, LEAST_PIECE = 16, 1 << 14
"""Where a device has no kernel for it, isles works on a vector in so many pieces, of at least so many values."""


class Event(Protocol):
    """A point in the order of a stream."""

    def synchronize(self) -> None: ...


class Happened:
    """The event of a device that has done everything it was given: a CPU."""

    def synchronize(self) -> None: ...


HAPPENED = Happened()


class SideStream:
    """Work for one device beside the training loop."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.asynchronous = device, device.type != "cpu"
        self._module: Any = torch.get_device_module(device) if self.asynchronous else None
        make_stream = getattr(self._module, "Stream", None)
        self._stream: Any = None if make_stream is None else make_stream(device)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Work of this thread goes to the side stream."""
        if self._stream is None:
            yield
        else:
            with self._module.stream(self._stream):
                yield

    @contextmanager
    def follow(self) -> Iterator[None]:
        """The same, after everything that the training stream was given so far; the training loop calls this."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self.device))
        with self.use():
            yield

    def mark(self) -> Event:
        """The end of what the side stream was given so far; called inside `use` or `follow`."""
        if not self.asynchronous:
            return HAPPENED
        # A thread that waits for it sleeps; without the option it would keep a core busy.
        event: Any = self._module.Event(**({"blocking": True} if self.device.type == "cuda" else {}))
        event.record()
        return event  # type: ignore[no-any-return]

    def hold(self, event: Event, *tensors: Tensor) -> None:
        """The training stream waits for an event of the side stream, and then uses these tensors, made there."""
        if self._stream is not None and event is not HAPPENED:
            current = self._module.current_stream(self.device)
            current.wait_event(event)
            for tensor in tensors:
                tensor.record_stream(current)

    def join(self) -> None:
        """The training stream waits for everything that the side stream was given so far."""
        if self._stream is not None:
            self._module.current_stream(self.device).wait_stream(self._stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory, which is there when the next event has happened; on a CPU the tensor itself."""
        if not self.asynchronous:
            return tensor
        return pinned(tensor.numel(), tensor.dtype).copy_(tensor, non_blocking=True)

    def to_device(self, host: Tensor) -> Tensor:
        """A copy on the device, of pinned memory; on a CPU the tensor itself."""
        return host.to(self.device, non_blocking=True) if self.asynchronous else host


class Upload:
    """A vector of the host that the training stream will need, on its way to the device once somebody starts it.

    Whoever has the vector first may be a thread beside the loop, and whoever knows that it is needed next the loop.
    """

    def __init__(self, side: SideStream, values: Tensor) -> None:
        """Values in pageable memory are copied to pinned memory here."""
        self._side, self._lock = side, threading.Lock()
        self._host: Tensor | None = values
        if side.asynchronous and not is_pinned(values):
            self._host = pinned(values.numel(), values.dtype).view(values.shape).copy_(values)
        self._here: Tensor | None = values
        self._arrives: Event | None = None if side.asynchronous else HAPPENED

    def start(self) -> None:
        """Begins to copy, if that has not begun."""
        with self._lock:
            if self._arrives is None and self._host is not None:
                with self._side.use():
                    self._here = self._side.to_device(self._host)
                    self._arrives = self._side.mark()
                self._host = None

    def result(self) -> Tensor:
        """The vector on the device, for the training stream; once, and then it is the caller's."""
        self.start()
        here, self._here = self._here, None
        assert self._arrives is not None
        assert here is not None
        self._side.hold(self._arrives, here)
        return here


def sides_of(devices: Sequence[torch.device]) -> list[SideStream]:
    """A side stream for every device, the same one for equal devices."""
    sides = {device: SideStream(device) for device in set(devices)}
    return [sides[device] for device in devices]


def pieces(numel: int, block: int = 1) -> Iterator[slice]:
    """The places of the pieces of a vector: whole blocks, but for the end. A temporary of fp32 is as large as a quarter
    of a value for each of the vector, which is half a payload in 4 bits.

    >>> list(pieces(20000, 128))
    [slice(0, 16384, None), slice(16384, 20000, None)]
    """
    size = -(-max(LEAST_PIECE, numel // PIECES) // block) * block
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Host memory that an accelerator copies from and to by itself."""
    return torch.empty(numel, dtype=dtype, pin_memory=True)


def pinned_rows(rows: Sequence[Tensor]) -> Tensor:
    """Vectors of the same length as rows of one table in such memory."""
    table = pinned(len(rows) * rows[0].numel(), rows[0].dtype).view(len(rows), -1)
    return torch.stack(list(rows), out=table)


def is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor of the host is in such memory."""
    return tensor.is_pinned()


def refuse_capture() -> None:
    """Raises if work of this thread is being captured into a CUDA graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "optimizer.step() is being captured into a CUDA graph, which would never call isles again: capture "
            "forward and backward only, and call optimizer.step() outside the graph"
        )
