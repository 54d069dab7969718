"""What islands tell each other besides outer gradients: settings at the start, one model at the end.

Settings and checksums are small JSON texts. Tensors are copied as raw bytes, in chunks, whatever their type, so that
what one island has the others get to the last bit. Averages over whole vectors are ordinary rounds in fp32, number 0.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isles.core.fragments import Fragment
from isles.core.replica import Replica
from isles.core.stats import Stats
from isles.wire.codecs import codecs
from isles.wire.message import bytes_of, checksum, tensor_of
from isles.wire.packing import is_finite
from isles.wire.world import MismatchError, Note, Payload, World

CHUNK_BYTES = 1 << 22
"""So much of a tensor is copied at once."""
logger = logging.getLogger("isles")


class Handshake:
    """The exchanges of one island with all others that are not rounds of the schedule."""

    def __init__(self, world: World, stats: Stats, weight: float) -> None:
        self._world, self.stats, self._weight = world, stats, weight
        self._purpose, self._step = "", 0

    # ---- at the start

    def start(self, settings: Mapping[str, Any], replica: Replica, sync_initial: bool) -> float:
        """Raises unless all islands have the same settings, the same model and the same initial parameters. Returns the
        sum of weights.
        """
        self._purpose = "start"
        notes = self._gather(
            {
                **settings,
                "sync_initial": sync_initial,
                "model": [
                    *map(_shape_of, replica.fragments),
                    _digest({n: t.shape for n, t in replica.frozen().items()}),
                ],
                "weight": self._weight,
            }
        )
        _same_method(notes)
        advice = {
            "outer_optimizer": ("have different outer optimizers", "give all islands the same outer_optimizer"),
            "sync_initial": ("were started with different sync_initial", "give it to all islands or to none"),
            "model": (
                "have different models (number, names or shapes of parameters)",
                "build the same model everywhere",
            ),
        }
        for key, (what, todo) in advice.items():
            _same(notes, key, what, todo)
        if sync_initial:
            for tensor in self._differing({**replica.trained(), **replica.frozen(), **replica.buffers()}).values():
                self._copy_from_root(tensor)
        elif different := self._differing({**replica.trained(), **replica.frozen()}):
            raise MismatchError(
                f"islands start with different parameters ({next(iter(different))} and {len(different) - 1} more): seed "
                "them alike, or pass sync_initial=True; to resume, make the DiLoCo first, then load_state_dict"
            )
        return float(sum(note["weight"] for note in notes))

    # ---- after a checkpoint was loaded

    def resume(self, step: int, anchors: list[Tensor] | None) -> None:
        """Raises unless all islands resume from the same step and, where they share anchors, from the same ones."""
        self._purpose = "resume"
        shared = None if anchors is None else [checksum(_raw(anchor)) for anchor in anchors]
        notes = self._gather({"resumed": step, "anchors": shared})
        if any(note["anchors"] is None for note in notes):
            notes = [{**note, "anchors": None} for note in notes]
        steps = sorted({note["resumed"] for note in notes})
        _same(
            notes,
            "resumed",
            f"resume at different steps ({' and '.join(map(str, steps))})",
            "load checkpoints of the same step everywhere",
        )
        _same(
            notes, "anchors", "resume with different global parameters", "load checkpoints of the same run everywhere"
        )

    # ---- at the end

    def finish(self, step: int) -> None:
        """Raises unless all islands come to their end, at the same step."""
        self._purpose, self._step = "finish", step
        self._world.gather(self._note(b""))

    def average_anchors(self, anchors: list[Tensor]) -> None:
        """Makes anchors that differ their mean over islands: those of eager updates."""
        if self._differing(dict(enumerate(anchors))):
            codec = codecs["fp32"]
            for index, anchor in enumerate(anchors):
                body = codec.encode(anchor).cpu()
                payload = Payload(index, 0, codec, anchor.numel(), self._weight, body, self._step)
                started = self._world.start(payload)
                self.stats.bytes_sent += started.bytes_sent
                self.stats.bytes_received += started.bytes_received
                anchor.copy_(started.wait().values)

    def same_model(self, replica: Replica) -> None:
        """Leaves the same model on every island, and nobody leaves before all have it. Parameters are the same already,
        or else become island 0's, with a warning. Buffers and frozen parameters that differ become the mean over islands
        if they are floating-point, in their own precision, those that are not finite left out; others become island 0's.
        """
        trained = replica.trained()
        for name, tensor in self._differing({**trained, **replica.frozen(), **replica.buffers()}).items():
            if name in trained:
                logger.warning("islands ended with different values of %s: taking those of island 0", name)
            if name in trained or not tensor.is_floating_point():
                self._copy_from_root(tensor)
            else:
                tensor.copy_(self._mean_of(tensor))
        self._world.gather(self._note(b""))

    # ---- tensors, as raw bytes

    def _differing(self, named: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Those of the tensors that are not the same on all islands."""
        checksums = [checksum(_raw(tensor)) for tensor in named.values()]
        others = [note["checksums"] for note in self._gather({"checksums": checksums})]
        different = [len(set(alike)) > 1 for alike in zip(*others, strict=True)]
        return dict(itertools.compress(named.items(), different))

    @torch.no_grad()
    def _copy_from_root(self, tensor: Tensor) -> None:
        """Makes this tensor what island 0 has in its place."""
        raw = _raw(tensor)
        for chunk in raw.split(CHUNK_BYTES):
            mine = bytes_of(chunk) if self._world.rank == 0 else b""
            chunk.copy_(tensor_of(self._exchange(mine)[0]))
        tensor.copy_(_like(tensor, raw))

    def _mean_of(self, tensor: Tensor) -> Tensor:
        """The weighted mean over the islands whose values are finite, computed in float64; island 0's if there are
        none.
        """
        weight = self._weight if is_finite(tensor) else 0.0
        weights = [note["weight"] for note in self._gather({"weight": weight})]
        rows = [self._exchange(bytes_of(chunk)) for chunk in _raw(tensor).split(CHUNK_BYTES)]
        values = [_like(tensor, tensor_of(b"".join(row[rank] for row in rows))) for rank in range(len(weights))]
        if sum(weights) == 0:
            return values[0]
        total = torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
        for value, share in zip(values, weights, strict=True):
            if share:
                total += value.double() * share
        return (total / sum(weights)).to(tensor.dtype)

    def _exchange(self, data: bytes) -> list[bytes]:
        answers = self._world.gather(self._note(data))
        self.stats.bytes_sent += len(data) * (self._world.size - 1)
        self.stats.bytes_received += sum(map(len, answers)) - len(data)
        return answers

    # ---- notes

    def _note(self, data: bytes) -> Note:
        return Note.of(data, self._purpose, self._step)

    def _gather(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        texts = self._world.gather(self._note(json.dumps(note).encode()))
        notes = []
        for rank, text in enumerate(texts):
            try:
                other = json.loads(text)
            except ValueError as error:
                raise MismatchError(
                    f"island {rank} sent a note that is no JSON: run the same isles everywhere"
                ) from error
            if not isinstance(other, dict) or other.keys() != note.keys():
                both = f"islands {self._world.rank} and {rank} are not at the same point of the program"
                raise MismatchError(f"{both}: start them in the same way")
            notes.append(other)
        return notes


def _same_method(notes: list[dict[str, Any]]) -> None:
    mine = notes[0]["method"]
    for rank, note in enumerate(notes):
        theirs = note["method"]
        different = [
            f"{name}={mine[name]!r} and {theirs.get(name)!r}" for name in mine if mine[name] != theirs.get(name)
        ]
        if different:
            raise MismatchError(
                f"islands 0 and {rank} have different methods ({'; '.join(different)}): start all islands with the same "
                "Method"
            )


def _same(notes: list[dict[str, Any]], key: str, what: str, advice: str) -> None:
    for rank, note in enumerate(notes):
        if note[key] != notes[0][key]:
            raise MismatchError(f"islands 0 and {rank} {what}: {advice}")


def _shape_of(part: Fragment) -> list[int]:
    """Number of values, and a checksum of names and shapes, of a fragment."""
    return [part.numel, _digest([(n, tuple(p.shape)) for n, p in zip(part.names, part.parameters, strict=True)])]


def _digest(value: object) -> int:
    return checksum(tensor_of(repr(value).encode()))


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU; its own memory, where it is contiguous and there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _like(tensor: Tensor, raw: Tensor) -> Tensor:
    """The reverse of `_raw`: a tensor of this type, shape and device."""
    return raw.view(tensor.dtype).view(tensor.shape).to(tensor.device)
