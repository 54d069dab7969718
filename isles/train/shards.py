"""An island of several ranks in the trainer: its model in shards (FSDP2), and its checkpoints.

Every layer, and the model around them, is sharded over the ranks of the island, so a rank holds and exchanges only its
part. A checkpoint of such an island is written by torch.distributed.checkpoint, all ranks together, into
`checkpoints/STEP/island-I/`; a JSON file next to it, the manifest, marks it as complete. It can be resumed with another
number of ranks per island. The ranks of one island need a disk that all of them see; islands share nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from isles.core.fragments import find_layers
from isles.train.batches import IGNORED, Batch, ValidationBatches


def shard(model: nn.Module, mesh: Any) -> None:
    """Shards every layer over the mesh, and then what is left, in place."""
    from torch.distributed.fsdp import fully_shard

    for names in find_layers(model):
        layer = os.path.commonpath([name.replace(".", "/").rpartition("/")[0] for name in names])
        fully_shard(model.get_submodule(layer.replace("/", ".")), mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_model(model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model in one piece, on the CPU of the island's first rank; None on the others. All its ranks call this."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not weights:
        return None
    whole = build()
    whole.load_state_dict(weights)
    return whole


def share_out(batches: ValidationBatches, rank: int, size: int) -> Iterator[Batch]:
    """This rank's part of the batches. All ranks get the same number, since a pass through a sharded model takes all of
    them. A rank that is one short gets a batch without targets.
    """
    padding: Batch | None = None
    count = 0
    for number, batch in enumerate(batches):
        padding = padding or Batch(batch.inputs, batch.targets.clone().fill_(IGNORED), batch.segments)
        if number % size == rank:
            count += 1
            yield batch
    if padding is not None and count < -(-len(batches) // size):
        yield padding


class ShardedCheckpoints:
    """The checkpoints of one island of several ranks, or of one rank that goes on with those of several."""

    def __init__(self, folder: Path, island: int, keep: int, group: Any = None) -> None:
        self.folder, self.island, self.keep, self.group = folder, island, keep, group

    def path(self, step: int) -> Path:
        """Where the island's part of a checkpoint is."""
        return self.folder / f"{step:08d}" / f"island-{self.island}"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes a checkpoint; all ranks of the island call this at the same time."""
        path = self.path(step)
        about = {name: value for name, value in state.items() if name != "state"}
        try:
            save(state["state"], checkpoint_id=path, process_group=self.group, no_dist=self.group is None)
            if self.group is None or dist.get_rank(self.group) == 0:
                manifest = path.with_suffix(".sharded.json")
                part = manifest.with_suffix(".part")
                part.write_text(json.dumps(about))
                part.rename(manifest)
                self._remove_old()
        except CheckpointException as error:
            raise OSError(f"a checkpoint could not be written to {path} ({error}); earlier ones are intact") from error

    def wait(self) -> None:
        """Nothing is under way after `save`."""

    def _remove_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            self.path(step).with_suffix(".sharded.json").unlink(missing_ok=True)  # first: without it nothing counts
            shutil.rmtree(self.path(step), ignore_errors=True)
            with contextlib.suppress(OSError):
                self.path(step).parent.rmdir()

    def steps(self) -> list[int]:
        """The steps of which the island holds a complete checkpoint, oldest first."""
        manifests = self.folder.glob(f"*/island-{self.island}.sharded.json")
        return sorted(int(each.parent.name) for each in manifests if each.parent.name.isdigit())

    def about(self, step: int) -> dict[str, Any]:
        """What was saved with the state: configuration and totals."""
        about: dict[str, Any] = json.loads(self.path(step).with_suffix(".sharded.json").read_text())
        return about

    def load(self, step: int, into: dict[str, Any]) -> None:
        """Fills in a state of the right form; all ranks of the island call this at the same time."""
        try:
            load(into, checkpoint_id=self.path(step), process_group=self.group, no_dist=self.group is None)
        except CheckpointException as error:
            raise ValueError(f"the checkpoint {self.path(step)} cannot be read ({error}): remove it, resume") from error

    def global_model(self, step: int) -> dict[str, Tensor]:
        """The outer parameters and the buffers in a checkpoint, by name."""
        described = FileSystemReader(self.path(step)).read_metadata().state_dict_metadata
        anchors = {key: key.split(".anchor.", 1)[1] for key in described if ".anchor." in key}
        own = {key: key.removeprefix("replica.model.") for key in described if key.startswith("replica.model.")}
        buffers = {key: name for key, name in own.items() if name not in anchors.values()}
        state: dict[str, Any] = {
            key: torch.empty(described[key].size, dtype=described[key].properties.dtype)  # type: ignore[union-attr]
            for key in (*anchors, *buffers)
        }
        load(state, checkpoint_id=self.path(step), no_dist=True)
        return {name: state[key] for key, name in {**buffers, **anchors}.items()}
