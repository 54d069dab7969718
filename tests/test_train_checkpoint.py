"""Checkpoints: whatever happens while one is written, the one before stays good, and nothing in a file is executed."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from isles.train import checkpoint
from isles.train.checkpoint import Checkpoints, newest_common


def state(number: int) -> dict:
    return {"weights": torch.full((100,), float(number)), "step": number}


def test_saves_loads_and_keeps_the_last_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, island=0, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, state(step))
    checkpoints.wait()
    assert checkpoints.steps() == [20, 30]
    assert torch.equal(checkpoints.load(30)["weights"], state(30)["weights"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000020", "00000030"]


def test_islands_share_a_folder_without_touching_each_other(tmp_path):
    islands = [Checkpoints(tmp_path, island, keep=1) for island in range(3)]
    for step in (1, 2):
        for island in islands[: 3 if step == 1 else 2]:
            island.save(step, state(step))
            island.wait()
    assert [island.steps() for island in islands] == [[2], [2], [1]]
    assert newest_common(island.steps() for island in islands) is None
    assert newest_common([[1, 2], [2, 3], [0, 2]]) == 2


def test_a_full_disk_is_a_clear_error_and_leaves_the_last_one_intact(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, island=0, keep=2)
    checkpoints.save(1, state(1))
    checkpoints.wait()

    def no_space(value, file):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.torch, "save", no_space)
    checkpoints.save(2, state(2))
    with pytest.raises(OSError, match=r"No space left.*step 1 is intact"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert torch.equal(checkpoints.load(1)["weights"], state(1)["weights"])
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("moment", ["in the file", "before the note", "in the note", "before the last rename"])
def test_a_crash_at_any_moment_of_the_writing_leaves_the_one_before(tmp_path, moment):
    checkpoints = Checkpoints(tmp_path, island=0, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(step))
    checkpoints.wait()
    path = checkpoints.path(2)
    if moment == "in the file":
        path.rename(path.with_suffix(".part"))
        path.with_suffix(".json").unlink()
    elif moment == "before the note":
        path.with_suffix(".json").unlink()
    elif moment == "in the note":
        path.with_suffix(".json").write_text('{"step": 2, "by')
    else:
        path.with_suffix(".json").rename(path.with_suffix(".part-manifest"))
    again = Checkpoints(tmp_path, island=0, keep=2)
    assert again.steps() == [1]
    again.save(2, state(2))
    again.wait()
    assert again.steps() == [1, 2], "and what is lying about is not in the way"


def test_damage_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path, island=0, keep=2)
    checkpoints.save(1, state(1))
    checkpoints.wait()
    data = bytearray(checkpoints.path(1).read_bytes())
    data[len(data) // 2] ^= 1
    checkpoints.path(1).write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        checkpoints.load(1)
    checkpoints.path(1).write_bytes(data[:-1])
    assert checkpoints.steps() == [], "a truncated one does not count at all"


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def test_loading_never_executes_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", island=0, keep=2)
    path = checkpoints.path(1)
    path.parent.mkdir(parents=True)
    torch.save({"state": Trap()}, path)
    note = {"step": 1, "bytes": path.stat().st_size, "crc32": checkpoint._crc32(path)}
    path.with_suffix(".json").write_text(json.dumps(note))
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoints.load(1)
    assert not (tmp_path / "sprung").exists()
