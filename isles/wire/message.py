"""The header in front of everything that crosses a link, and the checks that make a silent wrong average impossible.

Before anything else, the islands exchange headers. All headers have the same size, so that even islands that are not
doing the same thing can read each other's: a transport that is told different sizes at its two ends crashes or, worse,
delivers something. Only if all headers agree do the bodies follow, and what arrives is compared with its checksum.

Headers are parsed with `struct`: nothing from a peer is unpickled or evaluated. Numbers are little-endian. Bodies are
the bytes of tensors as they are in memory, so a big-endian machine is refused.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from isles.wire.world import MismatchError, Payload

MAGIC, VERSION = b"isle", 4
FIELDS = struct.Struct("<4sB16s24sIQQQdQI")  # magic, version, and the fields of a Header in their order
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = FIELDS.size + CHECKSUM.size
NOTE = "note"
MAX_NOTE_BYTES = 1 << 28  # more than that is not a note, but noise where its length should be


def check_byte_order() -> None:
    """Raises ValueError on a machine whose tensors other islands would read as other numbers."""
    if sys.byteorder != "little":
        advice = "isles sends tensors as little-endian bytes, use a little-endian one"
        raise ValueError(f"this machine is {sys.byteorder}-endian: {advice}")


class Note(bytes):
    """Bytes for `World.gather` that say what they are for: islands that are at different points of the program learn
    where the others are.
    """

    purpose: str
    step: int

    @classmethod
    def of(cls, data: bytes, purpose: str, step: int) -> Note:
        note = cls(data)
        note.purpose, note.step = purpose, step
        return note


@dataclass(frozen=True)
class Header:
    """What an island says about what it is going to send."""

    form: str  # of the reduction, for a payload; or NOTE
    codec: str  # of a payload; of a note, its purpose
    fragment: int
    round: int
    numel: int
    num_bytes: int
    weight: float
    step: int
    checksum: int  # of the body, if it is sent as a whole

    @classmethod
    def of_payload(cls, payload: Payload, form: str) -> Header:
        where = (payload.codec.name, payload.fragment, payload.round, payload.numel)
        whole = checksum(payload.body) if form == "all-gather" else 0
        return cls(form, *where, payload.body.numel(), payload.weight, payload.step, whole)

    @classmethod
    def of_note(cls, data: bytes) -> Header:
        purpose, step = (data.purpose, data.step) if isinstance(data, Note) else ("", 0)
        return cls(NOTE, purpose, 0, 0, 0, len(data), 0.0, step, zlib.crc32(data))

    def pack(self) -> bytes:
        form, codec, *numbers = astuple(self)
        fields = FIELDS.pack(MAGIC, VERSION, form.encode(), codec.encode(), *numbers)
        return fields + CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> Header:
        """Reads what island `rank` sent; MismatchError if it is no header, or a damaged one."""
        if len(data) != HEADER_BYTES:
            raise MismatchError(f"island {rank} sent a header of {len(data)} bytes instead of {HEADER_BYTES}")
        magic, version, form, codec, *numbers = FIELDS.unpack_from(data)
        if (magic, version) != (MAGIC, VERSION):
            said = f"{magic!r} version {version}, not {MAGIC!r} version {VERSION}"
            raise MismatchError(f"island {rank} sent {said}: run the same isles everywhere")
        if CHECKSUM.unpack_from(data, FIELDS.size)[0] != zlib.crc32(data[: FIELDS.size]):
            raise MismatchError(f"the header of island {rank} was damaged on the way: its checksum is wrong")
        header = cls(*(name.rstrip(b"\0").decode(errors="replace") for name in (form, codec)), *numbers)
        header.check(rank)
        return header

    def check(self, rank: int) -> None:
        """Raises if no island could mean this."""
        if not (math.isfinite(self.weight) and self.weight >= 0):
            wrong = f"sent the weight {self.weight}: a weight is a finite number, not negative"
        elif self.form == NOTE and self.num_bytes > MAX_NOTE_BYTES:
            wrong = f"announced a note of {self.num_bytes} bytes: the most is {MAX_NOTE_BYTES}"
        else:
            return
        raise MismatchError(f"island {rank} {wrong}")

    def about(self) -> str:
        """What has to be the same on all islands, in words."""
        if self.form == NOTE:
            return PURPOSES.get(self.codec, f"exchanges a note ({self.codec})")
        what = f"{self.numel} values as {self.num_bytes} bytes of {self.codec}"
        return f"sends fragment {self.fragment}, round {self.round}, {what}, by {self.form}"


PURPOSES = {
    "": "exchanges a note",
    "start": "starts a DiLoCo",
    "resume": "goes on from a checkpoint",
    "finish": "is done with its steps and calls finish()",
}


def agree(headers: Sequence[Header]) -> None:
    """Raises unless all islands are about to do the same, at the same step; the message names two that are not."""
    first = headers[0]
    for rank, header in enumerate(headers):
        header.check(rank)
        if (header.about(), header.step) != (first.about(), first.step):
            advice = "start all islands in the same way, with the same Method"
            if header.step != first.step:
                loaders = "loaders of equal length; DiLoCo.skip_step() where a GradScaler skips one"
                advice = f"give every island the same number of steps ({loaders})"
            mine, other = f"island 0, at step {first.step}", f"island {rank}, at step {header.step}"
            raise MismatchError(f"islands disagree: {mine}, {first.about()}; {other}, {header.about()}: {advice}")


def verify(header: Header, body: Tensor, rank: int, reader: int) -> None:
    """Raises unless the body that arrived at island `reader` is what island `rank` said it would send."""
    _compare(checksum(body), header.checksum, f"the payload of island {rank} ({header.about()})", reader)


def add_checksum(message: Tensor) -> None:
    """Writes the checksum of a piece of a body behind it, into the last bytes of a tensor that has room for both."""
    message[-CHECKSUM.size :] = tensor_of(CHECKSUM.pack(checksum(message[: -CHECKSUM.size])))


def checked(message: Tensor, what: str, reader: int) -> Tensor:
    """The piece, if it has arrived at island `reader` as it was sent."""
    piece, behind = message[: -CHECKSUM.size], bytes_of(message[-CHECKSUM.size :])
    _compare(checksum(piece), CHECKSUM.unpack(behind)[0], what, reader)
    return piece


def checksum(body: Tensor) -> int:
    """CRC-32 of a contiguous uint8 tensor on the CPU, without copying it."""
    assert body.dtype == torch.uint8
    assert body.is_contiguous()
    return zlib.crc32(body.numpy().data)


def bytes_of(tensor: Tensor) -> bytes:
    """What is in a uint8 tensor on the CPU."""
    return tensor.numpy().tobytes()


def tensor_of(data: bytes) -> Tensor:
    """The same the other way round.

    >>> bytes_of(tensor_of(b"isles")), bytes_of(tensor_of(b""))
    (b'isles', b'')
    """
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _compare(found: int, expected: int, what: str, reader: int) -> None:
    if found != expected:
        raise MismatchError(f"{what} reached island {reader} damaged: checksum {found:08x} instead of {expected:08x}")
