"""Checkpoints that survive a crash at any moment, a full disk, and islands on different machines.

Each island writes its own file, `checkpoints/STEP/island-R.pt`, under a temporary name, flushes it to disk and
renames it. A small JSON file next to it, the manifest, has its size and checksum. A file without a manifest, or that
does not match it, is not a checkpoint. No island waits for another. To resume, the islands exchange which steps they
hold and take the newest that all of them have, so machines with separate disks need nothing shared.

The state is copied at once and written by a thread, while training goes on. A failed write is an error at the next
checkpoint or at the end, and leaves earlier checkpoints alone. Loading never executes anything (`weights_only`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


class Checkpoints:
    """The checkpoints of one island in a run's folder."""

    def __init__(self, folder: Path, island: int, keep: int) -> None:
        self.folder, self.island, self.keep = folder, island, keep
        self._writer: threading.Thread | None = None
        self._failure: OSError | None = None

    def path(self, step: int) -> Path:
        """Where this island's part of a checkpoint is."""
        return self.folder / f"{step:08d}" / f"island-{self.island}.pt"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Starts writing a checkpoint; `state` must not change any more. Raises if the one before could not be
        written.
        """
        self.wait()
        self._writer = threading.Thread(target=self._write, args=(step, state), name="isles-checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Until what was started is on disk; raises OSError if it is not."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            good = self.steps()
            last = f"the checkpoint of step {good[-1]} is intact" if good else "there is no earlier checkpoint"
            raise OSError(f"a checkpoint could not be written to {self.folder} ({failure.strerror or failure}); {last}")

    def _write(self, step: int, state: dict[str, Any]) -> None:
        path = self.path(step)
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            manifest = {"step": step, "bytes": part.stat().st_size, "crc32": _crc32(part)}
            part.rename(path)
            _write_atomically(path.with_suffix(".json"), json.dumps(manifest).encode())
            self._remove_old()
        except OSError as error:
            self._failure = error
        except RuntimeError as error:  # torch's writer reports a full disk so
            self._failure = OSError(str(error).splitlines()[0])
        finally:
            part.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            path = self.path(step)
            path.with_suffix(".json").unlink(missing_ok=True)  # first: without it the file does not count
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another island still has its part there, or was faster
                path.parent.rmdir()

    def steps(self) -> list[int]:
        """The steps of which this island holds a good checkpoint, oldest first."""
        manifests = self.folder.glob(f"*/island-{self.island}.json")
        return sorted(int(each.parent.name) for each in manifests if each.parent.name.isdigit() and self._matches(each))

    def _matches(self, manifest: Path) -> bool:
        try:
            written = json.loads(manifest.read_text())
            return bool(manifest.with_suffix(".pt").stat().st_size == written["bytes"])
        except (OSError, ValueError, KeyError):
            return False

    def load(self, step: int) -> dict[str, Any]:
        """This island's part of a checkpoint."""
        path = self.path(step)
        if json.loads(path.with_suffix(".json").read_text())["crc32"] != _crc32(path):
            raise ValueError(
                f"the checkpoint {path} is damaged (checksum): remove the folder {path.parent.name} and resume"
            )
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(f"{path} is not a checkpoint of isles: it holds something else than tensors") from error
        return state


def newest_common(held: Iterable[Iterable[int]]) -> int | None:
    """The newest step of which every island holds a checkpoint.

    >>> newest_common([[100, 200], [100, 200, 300]])
    200
    """
    common = set.intersection(*(set(steps) for steps in held))
    return max(common) if common else None


def _write_atomically(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part-manifest")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value
