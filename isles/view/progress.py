"""Progress in the terminal: one live line per island, or plain lines now and then when nobody is watching.

Fed with events and nothing else, so it can sit in the process that trains or follow the log of a run from outside:

    with Progress() as progress:
        for event in follow(run_dir, stop=training_is_over):
            progress.feed(event)
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

from isles.view import units
from isles.view.events import Event
from isles.view.events import follow as follow  # part of this module's use, see above

RECENT_STEPS = 20


@dataclass
class Island:
    """Where one island is."""

    step: int = 0
    loss: float | None = None
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    wait_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    in_flight: set[tuple[int, int]] = field(default_factory=set)

    @property
    def steps_per_second(self) -> float | None:
        """Over the last few steps."""
        return len(self.seconds) / sum(self.seconds) if sum(self.seconds) > 0 else None

    @property
    def utilization(self) -> float | None:
        """The share of the last few steps that was not spent waiting for the network."""
        return 1 - sum(self.wait_seconds) / sum(self.seconds) if sum(self.seconds) > 0 else None


class Progress:
    """Shows a run while it goes on; a context manager.

    `total_steps` is taken from the config event if not given. On a terminal (or with `live=True`) every island has a
    line that is redrawn; elsewhere a plain line is printed every `every_seconds`, and one per evaluation.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        every_seconds: float = 10.0,
    ) -> None:
        self.total_steps = total_steps
        self.every_seconds = every_seconds
        self.islands: dict[int, Island] = {}
        self._stream = sys.stderr if stream is None else stream
        self._display = _Display(self._stream) if (self._stream.isatty() if live is None else live) else None
        self._tokens_per_step = 0.0
        self._printed_time = -float("inf")
        self._printed_step = 0

    def __enter__(self) -> Progress:
        if self._display:
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display:
            self._display.stop()

    def feed(self, event: Event) -> None:
        """Takes in one event, of any island, and shows what changed. Unknown kinds are passed over."""
        kind = event["event"]
        if kind == "config":
            self._configure(event)
        elif kind in ("step", "send", "apply"):
            island = self.islands.setdefault(int(event.get("island", 0)), Island())
            flight = (int(event.get("fragment", 0)), int(event.get("round", 0)))
            if kind == "send":
                island.in_flight.add(flight)
            elif kind == "apply":
                island.in_flight.discard(flight)
            else:
                island.step, island.loss = int(event["step"]), event.get("loss")
                island.seconds.append(float(event.get("seconds") or 0.0))
                island.wait_seconds.append(float(event.get("wait_seconds") or 0.0))
                self._show(int(event.get("island", 0)), float(event.get("time") or 0.0))
        elif kind == "eval":
            quality = (
                f"{units.decimal(event.get('val_loss'))}, {units.decimal(event.get('val_bits_per_byte'))} bits per byte"
            )
            self._say(f"step {event.get('step')}: validation loss {quality}")
        elif kind == "resume":
            self.islands.clear()
            self._printed_step = 0
            self._say(f"resumed at step {event.get('step')}")
        elif kind == "end":
            sent, wall = units.number_of_bytes(event.get("bytes_sent")), units.duration(event.get("wall_seconds"))
            self._say(f"finished: {event.get('steps')} steps in {wall}, {sent} sent")

    def _configure(self, event: Event) -> None:
        self._tokens_per_step = float(event.get("tokens_per_step") or 0.0) / max(1, int(event.get("islands") or 1))
        steps = (event.get("config") or {}).get("steps")
        if self.total_steps is None and isinstance(steps, int):
            self.total_steps = steps

    def _show(self, index: int, now: float) -> None:
        if self._display:
            island = self.islands[index]
            self._display.update(index, island.step, self.total_steps, self._columns([island]))
            return
        step = min(island.step for island in self.islands.values())  # the slowest: what all have done
        last = step == self.total_steps
        if step > self._printed_step and (last or now >= self._printed_time + self.every_seconds):
            self._printed_time, self._printed_step = now, step
            total = f"/{self.total_steps}" if self.total_steps else ""
            self._say("  ".join([f"step {step}{total}", *self._columns(list(self.islands.values()))]))

    def _columns(self, islands: list[Island]) -> list[str]:
        """Loss, speed, utilisation and what is in flight, of one island or of several together."""
        losses = [island.loss for island in islands if island.loss is not None]
        rates = [rate for island in islands if (rate := island.steps_per_second) is not None]
        shares = [share for island in islands if (share := island.utilization) is not None]
        fragments = sorted({fragment for island in islands for fragment, _ in island.in_flight})
        speed = units.count(sum(rates) * self._tokens_per_step) if self._tokens_per_step and rates else "-"
        numbers = ", ".join(map(str, fragments))
        flying = ("nothing", f"fragment {numbers}", f"fragments {numbers}")
        return [
            f"loss {units.decimal(sum(losses) / len(losses) if losses else None)}",
            f"{speed} tok/s",
            f"{units.share(sum(shares) / len(shares) if shares else None)} busy",
            f"{flying[len(fragments)] if len(fragments) < 3 else f'{len(fragments)} fragments'} in flight",
        ]

    def _say(self, text: str) -> None:
        if self._display:
            self._display.say(text)
        else:
            print(text, file=self._stream, flush=True)


class _Display:
    """The live lines, by `rich`, which is loaded only for them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        console = Console(file=stream, force_terminal=True, highlight=False)
        self._bars = Bars(
            TextColumn("{task.description}", style="bold", markup=False),
            *([BarColumn(bar_width=20)] if console.width >= 100 else []),  # numbers first where there is little room
            TextColumn("{task.fields[place]}", markup=False),
            *(TextColumn(f"{{task.fields[column_{index}]}}", markup=False) for index in range(4)),
            console=console,
        )
        self._tasks: dict[int, Any] = {}

    def start(self) -> None:
        self._bars.start()

    def stop(self) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        self._bars.console.print(text, markup=False)

    def update(self, island: int, step: int, total: int | None, columns: list[str]) -> None:
        fields: dict[str, Any] = {f"column_{index}": text for index, text in enumerate(columns)}
        place = f"{step}/{total}" if total else str(step)
        if island not in self._tasks:
            self._tasks[island] = self._bars.add_task(f"island {island}", total=total, place=place, **fields)
        self._bars.update(self._tasks[island], completed=step, total=total, place=place, **fields)
