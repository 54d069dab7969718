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

from isles.core.replica import Replica
from isles.core.stats import Stats
from isles.wire.codecs import codecs
from isles.wire.message import Note, bytes_of, checksum, tensor_of
from isles.wire.packing import is_finite
from isles.wire.world import MismatchError, Payload, World

CHUNK_BYTES = 1 << 22
"""So much of a tensor is copied at once."""
logger = logging.getLogger("isles")


class Handshake:
    """The exchanges of one island with all others that are not rounds of the schedule."""

    def __init__(self, world: World, stats: Stats, weight: float) -> None:
        self._world, self.stats, self._weight = world, stats, weight
        self._purpose, self._step = "", 0

    # ---- at the start, and after a checkpoint was loaded

    def start(self, settings: Mapping[str, Any], replica: Replica, sync_initial: bool) -> float:
        """Raises unless islands have the same settings, model and initial parameters. Returns the sum of weights."""
        self._purpose = "start"
        model = model_digest(replica)
        notes = self._gather({**settings, "sync_initial": sync_initial, "model": model, "weight": self._weight})
        _same_method(notes)
        _same(notes, "outer_optimizer", "have different outer optimizers", "give all islands the same outer_optimizer")
        _same(notes, "sync_initial", "were started with different sync_initial", "give it to all islands or to none")
        what = "have different models (number, names or shapes of parameters)"
        _same(notes, "model", what, "build the same model everywhere")
        if sync_initial:
            for tensor in self._differing({**replica.trained(), **replica.frozen(), **replica.buffers()}).values():
                self._copy_from_root(tensor)
        else:
            sums = self._checksums({**replica.trained(), **replica.frozen()})
            todo = "seed them alike, or pass sync_initial=True; to resume, make the DiLoCo first, then load_state_dict"
            _same(sums, "checksums", "start with different parameters", todo)
        return float(sum(note["weight"] for note in notes))

    def reach(self, clock: int) -> int:
        """The clock after a step: where the set of islands is fixed, all of them count the same steps."""
        return clock

    def resume(self, step: int, anchors: list[Tensor] | None) -> None:
        """Raises unless all islands resume from the same step and, where they share anchors, from the same ones."""
        self._purpose = "resume"
        shared = None if anchors is None else [tensor_checksum(anchor) for anchor in anchors]
        notes = self._gather({"resumed": step, "anchors": shared})
        if any(note["anchors"] is None for note in notes):
            notes = [{**note, "anchors": None} for note in notes]
        steps = " and ".join(map(str, sorted({note["resumed"] for note in notes})))
        advice = "load checkpoints of the same step, of the same run, everywhere"
        _same(notes, "resumed", f"resume at different steps ({steps})", advice)
        _same(notes, "anchors", "resume with different global parameters", advice)

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
                started = self._world.start(Payload(index, 0, codec, anchor.numel(), self._weight, body, self._step))
                self.stats.bytes_sent += started.bytes_sent
                self.stats.bytes_received += started.bytes_received
                anchor.copy_(started.wait().values)

    def same_model(self, replica: Replica) -> None:
        """Leaves the same model on every island, and nobody leaves before all have it. Trained parameters that differ
        become island 0's; buffers and frozen ones become the mean over islands, or island 0's if they are not float.
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

    # ---- tensors, as raw bytes, and notes, as JSON

    def _differing(self, named: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Those of the tensors that are not the same on all islands."""
        sums = zip(*(note["checksums"] for note in self._checksums(named)), strict=True)
        return dict(itertools.compress(named.items(), [len(set(alike)) > 1 for alike in sums]))

    def _checksums(self, named: Mapping[Any, Tensor]) -> list[dict[str, Any]]:
        return self._gather({"checksums": [tensor_checksum(tensor) for tensor in named.values()]})

    @torch.no_grad()
    def _copy_from_root(self, tensor: Tensor) -> None:
        """Makes this tensor what island 0 has in its place."""
        raw = _raw(tensor)
        for chunk in raw.split(CHUNK_BYTES):
            chunk.copy_(tensor_of(self._exchange(bytes_of(chunk) if self._world.rank == 0 else b"")[0]))
        tensor.copy_(_like(tensor, raw))

    def _mean_of(self, tensor: Tensor) -> Tensor:
        """The weighted mean, in float64, over the islands whose values are finite; island 0's if there are none."""
        notes = self._gather({"weight": self._weight if is_finite(tensor) else 0.0})
        weights = [note["weight"] for note in notes]
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

    def _note(self, data: bytes) -> Note:
        return Note.of(data, self._purpose, self._step)

    def _gather(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        notes = []
        for rank, text in enumerate(self._world.gather(self._note(json.dumps(note).encode()))):
            try:
                other = json.loads(text)
            except ValueError:
                raise MismatchError(f"island {rank} sent a note that is no JSON: run one isles everywhere") from None
            if not isinstance(other, dict) or other.keys() != note.keys():
                both = f"islands {self._world.rank} and {rank} are not at the same point of the program"
                raise MismatchError(f"{both}: start them in the same way")
            notes.append(other)
        return notes


def _same_method(notes: list[dict[str, Any]]) -> None:
    first = notes[0]["method"]
    for rank, note in enumerate(notes):
        pairs = ((name, value, note["method"].get(name)) for name, value in first.items())
        if different := "; ".join(f"{name}={mine!r} and {other!r}" for name, mine, other in pairs if mine != other):
            what = f"islands 0 and {rank} have different methods ({different})"
            raise MismatchError(f"{what}: start all islands with the same Method")


def _same(notes: list[dict[str, Any]], key: str, what: str, advice: str) -> None:
    for rank, note in enumerate(notes):
        if note[key] != notes[0][key]:
            raise MismatchError(f"islands 0 and {rank} {what}: {advice}")


def model_digest(replica: Replica) -> list[int]:
    """Of names and shapes: trained, cut into fragments, and frozen."""
    frozen = {name: tensor.shape for name, tensor in replica.frozen().items()}
    trained = [(part.numel, [(n, tuple(p.shape)) for n, p in part.named()]) for part in replica.fragments]
    return [_digest(trained), _digest(frozen)]


def tensor_checksum(tensor: Tensor) -> int:
    """Of the bytes of a tensor, wherever it is."""
    return checksum(_raw(tensor))


def _digest(value: object) -> int:
    return checksum(tensor_of(repr(value).encode()))


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU; its own memory, where it is contiguous and there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _like(tensor: Tensor, raw: Tensor) -> Tensor:
    """The reverse of `_raw`: a tensor of this type, shape and device."""
    return raw.view(tensor.dtype).view(tensor.shape).to(tensor.device)
