"""Events as TensorBoard scalars, for those whose dashboards are there already. Needs the `tensorboard` package."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from isles.view.events import Event
from isles.view.scalars import curve, scalars


class TensorBoard:
    """Writes events to a TensorBoard folder as they come; a context manager."""

    def __init__(self, directory: str | os.PathLike[str], writer: Any = None) -> None:
        self._writer = _summary_writer(directory) if writer is None else writer

    def feed(self, event: Event) -> None:
        """Takes in one event. Kinds that are no numbers over steps are passed over."""
        kind, now = event["event"], event.get("time")
        for name, island, value in scalars(event):
            self._writer.add_scalar(curve(name, island), value, global_step=event.get("step"), walltime=now)
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
