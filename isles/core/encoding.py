"""From an island's weights to what goes over the wire: Delta_m = anchor - theta, encoded, and whether it is finite.

On a CPU that is one pass over memory, in the training loop (`isles.wire.fused`); where there is no kernel for it, the
difference is made in the loop and encoded in the world's thread.

On an accelerator the host never waits. The side stream makes the payload and a flag that says whether all values are
finite, and copies both to pinned memory. The training stream waits, on the device, until theta has been read. Whoever
needs the payload waits for the copy: the world's thread. What the flag says is known there, too late to keep the
payload out of the residual and of eager updates, so a payload that is not finite is made zero on the device.

Without a kernel for the device it is done in PyTorch, a piece at a time, so that no temporary is larger than a payload.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isles.core.device import HAPPENED, Event, SideStream, pieces
from isles.core.fragments import Fragment
from isles.core.outer import encoded_outer_gradient, outer_gradient
from isles.core.state import OuterState
from isles.core.stats import phase
from isles.wire import device_kernels
from isles.wire.codec import Codec
from isles.wire.reduction import Gathered


@dataclass
class Encoding:
    """An outer gradient on its way to the wire."""

    body: Tensor | Callable[[], Tensor] | None
    """The payload in host memory, or a function that makes it; None if it is not finite. On an accelerator it is there
    when `finite` has answered."""
    finite: bool | Callable[[], bool]
    """Whether all values are; a function waits for the answer, and is not for the training loop."""
    here: Tensor | None = None
    """The payload on the device; zeros if it is not finite."""
    ready: Event = HAPPENED
    """When it is there."""


@dataclass(frozen=True)
class Encoder:
    """Encodes the outer gradients of one island. `keep`: the loop needs the payload itself, for eager updates."""

    codec: Codec
    keep: bool

    def encode(
        self, fragment: Fragment, state: OuterState, side: SideStream, other: Tensor | None, *, feed_back: bool
    ) -> Encoding:
        """The outer gradient plus what error feedback has left or, if there is one, plus `other`. `feed_back`: what the
        codec loses of it goes to the residual.
        """
        residual = state.residual if feed_back else None
        more = state.residual if other is None else other
        with phase("isles.outer_gradient"):
            if side.asynchronous:
                return self._on_device(fragment, state.anchor, more, residual, side)
            if more is None:
                with phase("isles.encode"):
                    encoded = encoded_outer_gradient(state.anchor, fragment, self.codec)
                if encoded is not None:
                    return Encoding(*encoded)
            delta, finite = outer_gradient(state.anchor, fragment, more)
        if not finite:
            return Encoding(None, False)
        if residual is None and not self.keep:
            return Encoding(functools.partial(self._encode, delta), True)
        body = self._encode(delta)
        if residual is not None:
            torch.sub(delta, self.codec.decode(body, delta.numel()), out=residual)
        return Encoding(body, True)

    def _encode(self, delta: Tensor) -> Tensor:
        with phase("isles.encode"):
            return self.codec.encode(delta)

    def _on_device(
        self, fragment: Fragment, anchor: Tensor, more: Tensor | None, residual: Tensor | None, side: SideStream
    ) -> Encoding:
        with side.follow():
            payload = torch.empty(self.codec.num_bytes(anchor.numel()), dtype=torch.uint8, device=anchor.device)
            finite = self._encode_on_device(fragment, anchor, more, residual, payload)
            has_read = side.mark()
            kept = residual is not None or self.keep
            if kept:
                payload.mul_(finite)
            if residual is not None:
                residual.masked_fill_(finite == 0, 0.0)
            ready = side.mark()
            body, flag = side.to_host(payload), side.to_host(finite)
            copied = side.mark()
        side.hold(has_read)

        def is_finite() -> bool:
            copied.synchronize()
            return bool(flag[0])

        return Encoding(body, is_finite, payload if self.keep else None, ready)

    def _encode_on_device(
        self, fragment: Fragment, anchor: Tensor, more: Tensor | None, residual: Tensor | None, payload: Tensor
    ) -> Tensor:
        """Writes the payload, and what is lost to the residual. Returns a flag, int32[1]: whether all is finite."""
        codec, finite = self.codec, torch.ones(1, dtype=torch.int32, device=anchor.device)
        thetas = fragment.tensors_in_place()
        plain = more is None and residual is None and device_kernels.encodes(codec, anchor)
        if plain and thetas is not None and device_kernels.fits(thetas, anchor):
            device_kernels.encode_difference(codec, anchor, thetas, payload, finite)
            return finite
        places = pieces_of(anchor.numel(), codec)
        for place, theta in zip(places, fragment.slices(places), strict=True):
            delta = anchor[place] - theta
            if more is not None:
                delta += more[place]
            rows = codec.pack(codec._blocks(delta))
            payload[encoded_place(place, codec)] = rows.reshape(-1)
            finite.logical_and_(torch.isfinite(delta).all())
            if residual is not None:
                torch.sub(delta, codec.unpack(rows).reshape(-1)[: delta.numel()], out=residual[place])
        return finite


def add_decoded(codec: Codec, payload: Tensor, into: Tensor, weight: float) -> None:
    """into += weight * decoded, in place, on an accelerator: the same bits as `Codec.accumulate`, without an answer."""
    if device_kernels.decodes(codec, into):
        device_kernels.accumulate(codec, payload, into, weight)
        return
    for place in pieces_of(into.numel(), codec):
        values = codec.unpack(payload[encoded_place(place, codec)].view(-1, codec.block_bytes)).reshape(-1)
        values = values[: place.stop - place.start]
        into[place].add_(values if weight == 1 else values * weight)


def mean_of(gathered: Gathered) -> Tensor:
    """The mean of payloads that are on an accelerator with kernels for them."""
    values = torch.empty(gathered.numel, device=gathered.bodies[0].device)
    device_kernels.weighted_mean(gathered, values)
    return values


def decoded(codec: Codec, payload: Tensor, numel: int) -> Tensor:
    """The values of a payload, on an accelerator."""
    values = torch.empty(numel, device=payload.device)
    if device_kernels.decodes(codec, payload):
        device_kernels.accumulate(codec, payload, values, 1.0, fresh=True)
        return values
    for place in pieces_of(numel, codec):
        rows = codec.unpack(payload[encoded_place(place, codec)].view(-1, codec.block_bytes))
        values[place] = rows.reshape(-1)[: place.stop - place.start]
    return values


def pieces_of(numel: int, codec: Codec) -> list[slice]:
    """The pieces in which a vector is encoded. Stochastic rounding depends on where in the vector a block stands."""
    if codec.stochastic:
        return [slice(0, numel)] if numel else []
    return list(pieces(numel, codec.block))


def encoded_place(place: slice, codec: Codec) -> slice:
    """Where a piece is in the payload."""
    return slice(codec.num_bytes(place.start), codec.num_bytes(place.stop))
