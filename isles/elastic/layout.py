"""How an island's payload is laid out: what each of its ranks holds of each fragment.

An island of several ranks sends one payload, and is in a round with all its ranks or not at all. The body of a payload
is the bodies of its ranks, one after the other, each encoded by itself: a rank finds its own part at a place that
follows from the sizes alone. The parts of a snapshot are those of the first rank, fragment by fragment, then those of
the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor

from isles.elastic.documents import DamagedError
from isles.wire.codec import Codec
from isles.wire.world import Joining


@dataclass(frozen=True)
class Layout:
    """Sizes of the bodies of an island's ranks.

    >>> from isles.wire.codecs import codecs
    >>> layout = Layout(codecs["bf16"], [[3, 2], [4, 4]])
    >>> layout.numel(0), layout.num_bytes(0), layout.place(0, 1), layout.most_bytes
    (5, 10, slice(6, 10, None), 16)
    """

    codec: Codec
    numels: list[list[int]]
    """By fragment: of every rank."""

    @classmethod
    def of_one(cls, joining: Joining) -> Layout:
        """Of an island of one rank."""
        return cls(joining.codec, [[numel] for numel in joining.numels])

    def numel(self, fragment: int) -> int:
        """Values in a payload."""
        return sum(self.numels[fragment])

    def num_bytes(self, fragment: int) -> int:
        """Bytes of its body."""
        return sum(map(self.codec.num_bytes, self.numels[fragment]))

    def place(self, fragment: int, rank: int) -> slice:
        """Where in a body the part of a rank is."""
        sizes = list(map(self.codec.num_bytes, self.numels[fragment]))
        return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def decode(self, fragment: int, body: Tensor) -> Tensor:
        """The values of all ranks."""
        parts = [(body[self.place(fragment, rank)], numel) for rank, numel in enumerate(self.numels[fragment])]
        values = [self.codec.decode(part, numel) for part, numel in parts]
        return values[0] if len(values) == 1 else torch.cat(values)

    @property
    def most_bytes(self) -> int:
        """Of the largest body."""
        return max(map(self.num_bytes, range(len(self.numels))))


def label(fragment: int, rank: int = 0) -> str:
    """The name of a part of a snapshot.

    >>> label(2), label(2, rank=1)
    ('fragment-0002', 'fragment-0002-rank-0001')
    """
    return f"fragment-{fragment:04d}" + (f"-rank-{rank:04d}" if rank else "")


def pack_fragments(state: list[dict[str, Tensor]], rank: int = 0) -> dict[str, bytes]:
    """The parts of a snapshot that a rank has, by label."""
    return {label(index, rank): _pack(tensors) for index, tensors in enumerate(state)}


def check_sizes(number: int, fragments: list[dict[str, Tensor]], numels: list[int]) -> None:
    """Raises unless a snapshot fits. A velocity that is too short would be stretched without a word."""
    anchors = [each.get("anchor", torch.empty(0)) for each in fragments]
    velocities = [each.get("velocity", anchor) for each, anchor in zip(fragments, anchors, strict=True)]
    for tensors in (anchors, velocities):
        if (sizes := [tensor.numel() for tensor in tensors]) != numels:
            raise DamagedError(f"snapshot {number} has fragments of {sizes} values, not {numels}")


def _pack(tensors: dict[str, Tensor]) -> bytes:
    """A part of a snapshot: safetensors, the same bytes whoever writes them."""
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in sorted(tensors.items())})


def unpack_state(data: bytes, name: str) -> dict[str, Tensor]:
    """Reads it back. Nothing in it is evaluated."""
    try:
        return safetensors.torch.load(data)
    except Exception as error:
        raise DamagedError(f"{name} is not a part of a snapshot: {error}") from None
