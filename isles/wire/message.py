"""The header in front of every payload, and the checks that make a silent wrong average impossible.

Before a payload crosses the link, the islands exchange headers of fixed size: which fragment, which round,
which codec, how many values, how many bytes, the island's weight, and a checksum per piece of the body. Only
if all headers agree do the bodies follow; a transport that is told different sizes at its two ends would
crash or, worse, deliver something. What arrives is compared with the checksum. Headers are parsed with
`struct`: nothing from a peer is unpickled or evaluated."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isles.wire.world import MismatchError, Payload

MAGIC = b"isle"
VERSION = 1
FIXED = struct.Struct("<4sB3x24sIQQQd")
"""magic, version, codec, fragment, round, number of values, bytes of the body, weight."""


@dataclass(frozen=True)
class Header:
    """What an island says about its payload before it sends it."""

    codec: str
    fragment: int
    round: int
    numel: int
    num_bytes: int
    weight: float
    checksums: tuple[int, ...]
    """CRC-32 of each piece of the body, in the order in which the pieces are sent."""

    def pack(self) -> bytes:
        name = self.codec.encode()
        fixed = FIXED.pack(MAGIC, VERSION, name, self.fragment, self.round, self.numel, self.num_bytes, self.weight)
        return fixed + struct.pack(f"<{len(self.checksums)}I", *self.checksums)

    @classmethod
    def unpack(cls, data: bytes, pieces: int, rank: int) -> Header:
        """Reads what island `rank` sent; MismatchError if it is no header of this version."""
        if len(data) != header_bytes(pieces):
            raise MismatchError(f"island {rank} sent a header of {len(data)} bytes instead of {header_bytes(pieces)}")
        magic, version, name, fragment, number, numel, num_bytes, weight = FIXED.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise MismatchError(
                f"island {rank} sent {magic!r} version {version}, not {MAGIC!r} version {VERSION}: "
                "run the same isles everywhere"
            )
        if not 0 <= weight < float("inf"):
            raise MismatchError(f"island {rank} sent the weight {weight}: a weight is a finite number, not negative")
        checksums = struct.unpack_from(f"<{pieces}I", data, FIXED.size)
        codec = name.rstrip(b"\0").decode(errors="replace")
        return cls(codec, fragment, number, numel, num_bytes, weight, checksums)

    def about(self) -> str:
        """What has to be the same on all islands, in words."""
        what = f"{self.numel} values as {self.num_bytes} bytes of {self.codec}"
        return f"fragment {self.fragment}, round {self.round}, {what}"


def header_bytes(pieces: int) -> int:
    """Size of a header for a body sent in so many pieces."""
    return FIXED.size + 4 * pieces


def header_of(payload: Payload, pieces: Sequence[Tensor]) -> Header:
    """The header of a payload that is sent in these pieces."""
    checksums = tuple(checksum(piece) for piece in pieces)
    return Header(
        payload.codec.name,
        payload.fragment,
        payload.round,
        payload.numel,
        payload.body.numel(),
        payload.weight,
        checksums,
    )


def agree(headers: Sequence[Header]) -> None:
    """Raises unless all islands are in the same round; the message names two that are not."""
    for rank, header in enumerate(headers):
        if header.about() != headers[0].about():
            raise MismatchError(
                f"islands disagree: island 0 sends {headers[0].about()}; island {rank} sends {header.about()}"
            )


def verify(header: Header, piece: int, body: Tensor, rank: int) -> None:
    """Raises unless what arrived of a piece is what island `rank` said it would send."""
    found = checksum(body)
    if found != header.checksums[piece]:
        raise MismatchError(
            f"the payload of island {rank} ({header.about()}) was damaged on the way: "
            f"checksum {found:08x} instead of {header.checksums[piece]:08x}"
        )


def checksum(body: Tensor) -> int:
    """CRC-32 of a contiguous uint8 tensor on the CPU, without copying it."""
    assert body.is_contiguous()
    assert body.device.type == "cpu"
    assert body.dtype == torch.uint8
    if body.numel() == 0:
        return 0
    return zlib.crc32((ctypes.c_char * body.numel()).from_address(body.data_ptr()))
