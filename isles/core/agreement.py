"""What islands tell each other besides outer gradients: comparing notes at the start, settling on one model at the end.

Notes are small JSON texts. Averages over whole vectors, here and there, are ordinary exchanges in fp32 with
round number 0; taking over island 0's values is the average in which only island 0 has a weight.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
from torch import Tensor

from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.replica import Replica
from isles.wire.codecs import codecs
from isles.wire.message import bytes_of, checksum, tensor_of
from isles.wire.packing import is_finite
from isles.wire.world import MismatchError, Payload, World

BUFFER_BYTES = 1 << 26
"""So much of the buffers that are island 0's goes at once."""
logger = logging.getLogger("isles")


def at_start(world: World, method: Method, weight: float, replica: Replica, sync_initial: bool) -> float:
    """Raises unless all islands have the same method, the same model and the same initial parameters. Returns
    the sum of weights.
    """
    parts = [*replica.fragments, replica.frozen]
    notes = _compare_notes(
        world,
        {
            "method": method.as_dict(),
            "sync_initial": bool(sync_initial),
            "model": [_shape_of(part) for part in parts],
            "weight": weight,
        },
    )
    for rank, note in enumerate(notes):
        _same_method(notes[0], note, rank)
        _same(
            notes[0],
            note,
            rank,
            "sync_initial",
            "were started with different sync_initial",
            "give it to all islands or to none",
        )
        _same(
            notes[0],
            note,
            rank,
            "model",
            "have different models (number, names or shapes of parameters)",
            "build the same model everywhere",
        )
    if sync_initial:
        chief = 1.0 if world.rank == 0 else 0.0
        with torch.no_grad():
            for index, part in enumerate(parts):
                part.write(_mean(world, index, part.read(), chief))
        average_buffers(world, chief, replica)
    else:
        notes_of_values = _compare_notes(world, {"values": [_checksum(part.read()) for part in parts]})
        for rank, note in enumerate(notes_of_values):
            advice = (
                "seed them alike, or pass sync_initial=True; to resume, make the DiLoCo first, then load_state_dict"
            )
            _same(notes_of_values[0], note, rank, "values", "start with different parameters", advice)
    return float(sum(note["weight"] for note in notes))


def after_resume(world: World, alike: bool, step: int, anchors: list[Tensor]) -> None:
    """Raises unless all islands resume from the same step and, if their anchors are to be alike, from the same ones."""
    shared = [_checksum(anchor) for anchor in anchors] if alike else None
    notes = _compare_notes(world, {"step": step, "anchors": shared})
    if any(note["anchors"] is None for note in notes):
        notes = [{**note, "anchors": None} for note in notes]
    for rank, note in enumerate(notes):
        steps = f"resume at different steps ({notes[0].get('step')} and {note.get('step')})"
        _same(notes[0], note, rank, "step", steps, "load checkpoints of the same step everywhere")
        _same(
            notes[0],
            note,
            rank,
            "anchors",
            "resume with different global parameters",
            "load checkpoints of the same run everywhere",
        )


def at_finish(world: World, method: Method, weight: float, anchors: list[Tensor]) -> None:
    """Makes the anchors the same everywhere: they are already, or, with eager updates, become their mean."""
    notes = _compare_notes(world, {"anchors": [_checksum(anchor) for anchor in anchors]})
    if any(note != notes[0] for note in notes):
        if method.update != "eager":
            logger.warning(
                "the islands' global parameters differ at the end; is their hardware unlike? taking the mean"
            )
        for index, anchor in enumerate(anchors):
            anchor.copy_(_mean(world, index, anchor, weight))


def average_buffers(world: World, weight: float, replica: Replica) -> None:
    """Floating-point buffers become the mean over islands, leaving out islands whose own are not finite; others
    become island 0's.
    """
    buffers = replica.buffers().values()
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    others = [buffer for buffer in buffers if not buffer.is_floating_point()]
    if floats:
        flat = torch.cat([buffer.reshape(-1).float() for buffer in floats])
        own, good = flat, is_finite(flat)
        mean = _average(world, len(replica.fragments), own if good else torch.zeros_like(own), weight if good else 0.0)
        if mean is None:  # nobody's are finite: there is nothing better than what is there
            mean = own
        for buffer, part in zip(floats, mean.split([buffer.numel() for buffer in floats]), strict=True):
            buffer.copy_(part.view(buffer.shape))
    if others:
        raw = torch.cat([buffer.reshape(-1).contiguous().view(torch.uint8).cpu() for buffer in others])
        parts = raw.split(BUFFER_BYTES) if world.rank == 0 else [raw[:0]] * max(1, -(-raw.numel() // BUFFER_BYTES))
        chief = torch.cat([tensor_of(world.gather(bytes_of(part))[0]) for part in parts])
        for buffer, part in zip(others, chief.split([buffer.nbytes for buffer in others]), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _average(world: World, index: int, vector: Tensor, weight: float) -> Tensor | None:
    """The weighted mean of a vector over the islands, in fp32, now; None if nobody has a weight."""
    codec = codecs["fp32"]
    mean = world.start(Payload(index, 0, codec, vector.numel(), weight, codec.encode(vector).cpu())).wait()
    return mean.values.to(vector.device) if mean.weights else None


def _mean(world: World, index: int, vector: Tensor, weight: float) -> Tensor:
    """The same where somebody is known to have a weight."""
    mean = _average(world, index, vector, weight)
    assert mean is not None
    return mean


def _compare_notes(world: World, note: dict[str, Any]) -> list[dict[str, Any]]:
    texts = world.gather(json.dumps(note).encode())
    notes = []
    for rank, text in enumerate(texts):
        try:
            other = json.loads(text)
        except ValueError as error:
            raise MismatchError(f"island {rank} sent a note that is no JSON: run the same isles everywhere") from error
        if not isinstance(other, dict) or other.keys() != note.keys():
            both = f"islands {world.rank} and {rank} are not at the same point of the program"
            raise MismatchError(f"{both}: start them in the same way")
        notes.append(other)
    return notes


def _same_method(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    mine, theirs = first["method"], other["method"]
    if mine != theirs:
        different = "; ".join(
            f"{name}={mine.get(name)!r} and {theirs.get(name)!r}" for name in mine if mine.get(name) != theirs.get(name)
        )
        raise MismatchError(
            f"islands 0 and {rank} have different methods ({different}): start all islands with the same Method"
        )


def _same(first: dict[str, Any], other: dict[str, Any], rank: int, key: str, what: str, advice: str) -> None:
    if first[key] != other[key]:
        raise MismatchError(f"islands 0 and {rank} {what}: {advice}")


def _shape_of(part: Fragment) -> list[int]:
    """Number of values, and a checksum of names and shapes, of a fragment."""
    text = repr([(name, tuple(p.shape)) for name, p in zip(part.names, part.parameters, strict=True)]).encode()
    return [part.numel, checksum(torch.frombuffer(bytearray(text), dtype=torch.uint8))]


def _checksum(vector: Tensor) -> int:
    return checksum(vector.cpu().contiguous().view(torch.uint8))
