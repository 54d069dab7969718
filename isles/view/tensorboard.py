"""Events as TensorBoard scalars, for those whose dashboards are there already. Needs the `tensorboard` package."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from isles.view.events import Event

# For each kind of event, its fields that become curves, and the curves' names.
SCALARS = {
    "step": {
        "loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "seconds": "time/step_seconds",
        "wait_seconds": "time/wait_seconds",
        "bytes_sent": "network/bytes_per_step",
        "tokens": "train/tokens",
    },
    "eval": {
        "val_loss": "validation/loss",
        "val_bits_per_byte": "validation/bits_per_byte",
        "bytes_sent": "network/bytes_sent",
    },
}


class TensorBoard:
    """Writes events to a TensorBoard folder as they come; a context manager."""

    def __init__(self, directory: str | os.PathLike[str], writer: Any = None) -> None:
        self._writer = _summary_writer(directory) if writer is None else writer

    def feed(self, event: Event) -> None:
        """Takes in one event. A step's curves are per island; kinds that are no numbers over steps are passed over."""
        kind, step, now = event["event"], event.get("step"), event.get("time")
        for name, tag in SCALARS.get(kind, {}).items():
            if event.get(name) is not None:
                curve = f"{tag}/island_{event.get('island', 0)}" if kind == "step" else tag
                self._writer.add_scalar(curve, event[name], global_step=step, walltime=now)
        if kind == "step" and event.get("seconds"):
            share = 1 - (event.get("wait_seconds") or 0.0) / event["seconds"]
            curve = f"time/compute_utilization/island_{event.get('island', 0)}"
            self._writer.add_scalar(curve, share, global_step=step, walltime=now)
        if kind == "sample":
            # TensorBoard reads text as Markdown: indented by four spaces it stays as it is.
            text = "".join(f"    {line}\n" for line in str(event.get("text", "")).splitlines())
            self._writer.add_text("sample", text, walltime=now)

    def close(self) -> None:
        """Writes out what is pending."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write(events: Iterable[Event], directory: str | os.PathLike[str]) -> None:
    """Writes the events of a whole run to a TensorBoard folder."""
    with TensorBoard(directory) as board:
        for event in events:
            board.feed(event)


def _summary_writer(directory: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard is not installed: pip install tensorboard") from error
    return SummaryWriter(log_dir=os.fspath(directory))
