from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isles.view import tensorboard
from tests.test_view_synthetic import synthetic


class Recorder:
    """Stands in for torch's SummaryWriter, which needs the tensorboard package."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.texts: list[str] = []

    def add_scalar(self, tag: str, value: float, global_step: int, walltime: float) -> None:
        self.scalars.setdefault(tag, []).append((global_step, value))

    def add_text(self, tag: str, text: str, walltime: float) -> None:
        self.texts.append(text)

    def close(self) -> None:
        self.closed = True


def test_events_become_curves():
    recorder = Recorder()
    with tensorboard.TensorBoard("unused", writer=recorder) as board:
        for event in synthetic("streaming", steps=40, eval_every=20):
            board.feed(event)
    assert recorder.closed
    for island in range(2):
        assert [step for step, _ in recorder.scalars[f"train/loss/island_{island}"]] == list(range(1, 41))
        shares = [value for _, value in recorder.scalars[f"time/compute_utilization/island_{island}"]]
        assert all(0 < share <= 1 for share in shares)
    assert [step for step, _ in recorder.scalars["validation/loss"]] == [20, 40]
    assert recorder.texts[0].startswith("    def read(path):\n")


def test_without_tensorboard_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        tensorboard.write([], tmp_path)
