from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from isles.view import metrics, tensorboard
from isles.view.wandb import WeightsAndBiases
from isles.view.watcher import watcher_of
from tests.test_view_synthetic import save, synthetic


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


def test_weights_and_biases_and_prometheus_have_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logged: list[dict[str, float]] = []
    metrics_of: list[tuple[str, dict[str, str]]] = []

    class FakeRun:
        def define_metric(self, name: str, **options: str) -> None:
            metrics_of.append((name, options))

        def log(self, numbers: dict[str, float]) -> None:
            logged.append(numbers)

        def finish(self) -> None:
            self.finished = True

    run = FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run))
    log = synthetic("streaming", steps=40, eval_every=20)
    for event in log:
        if event["event"] == "apply":
            event["slack_seconds"] = 0.25
    recorder, feed = Recorder(), WeightsAndBiases("project", {}).feed
    board = tensorboard.TensorBoard("unused", writer=recorder)
    for event in log:
        board.feed(event)
        feed(event)
    assert run.finished
    assert ("*", {"step_metric": "step"}) in metrics_of
    names = {name for numbers in logged for name in numbers} - {"step"}
    assert names == set(recorder.scalars)
    assert "time/overlap_slack_seconds/island_1" in names
    [last] = [numbers for numbers in logged if numbers["step"] == 40 and "train/loss/island_1" in numbers]
    assert last["train/loss/island_1"] == recorder.scalars["train/loss/island_1"][-1][1]
    save(log, tmp_path / "run")
    text = metrics.text(watcher_of([str(tmp_path / "run")]))
    for name in names:
        group, _, island = name.partition("/island_")
        label = f',island="{island}"' if island else ""
        assert f'isles_{group.replace("/", "_")}{{run="streaming"{label}}} ' in text
