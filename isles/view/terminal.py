"""`isles watch --terminal`: the numbers of the live page, for those without a browser.

On a terminal the block of text is drawn again in its place; elsewhere it is printed now and then. It ends when all runs
are finished or stopped.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import Any, TextIO

from isles.view import units
from isles.view.watcher import Watched, Watcher

REDRAW_SECONDS, PRINT_SECONDS = 0.5, 10.0
HEADS = ("island", "state", "step", "loss", "tokens/s", "busy", "waits", "up", "down", "slack", "last event")


def show(watcher: Watcher, stream: TextIO | None = None) -> dict[str, Any]:
    """Shows the runs until they are over; returns the state of each."""
    stream = sys.stdout if stream is None else stream
    on_terminal = stream.isatty()
    with _display(stream) if on_terminal else nullcontext() as display:
        printed = -float("inf")
        while True:
            runs, now = watcher.looked_at(), time.time()
            phases = [run.state(now)["phase"] for run in runs]
            over = all(phase in ("finished", "stopped") for phase in phases)
            if not any(run.source.behind for run in runs):
                if display is not None:
                    display.update(block(runs, now))
                elif over or time.monotonic() > printed + PRINT_SECONDS:
                    printed = time.monotonic()
                    print(block(runs, now), end="\n\n" if not over else "\n", file=stream, flush=True)
                if over:
                    return {"runs": [{"name": run.live.name, **run.state(now)} for run in runs]}
                time.sleep(REDRAW_SECONDS)


def block(runs: list[Watched], now: float) -> str:
    """All runs as lines of text, without control characters: names and messages come from others."""
    return "\n\n".join("\n".join([_line(run, now), *_table(run, now), *_problems(run, now)]) for run in runs)


def _line(run: Watched, now: float) -> str:
    state, summary = run.state(now), run.live.summary()
    if state["phase"] == "absent":
        return _clean(f"there is no run at {run.place} yet")
    total = f"/{state['steps']}" if state["steps"] else ""
    parts = [run.live.name, state["phase"], f"{'clock' if state['elastic'] else 'step'} {state['step']}{total}"]
    if state["loss"] is not None:
        parts.append(f"loss {units.decimal(state['loss'])}")
    if summary["val_loss"] is not None:
        parts.append(f"validation {units.decimal(summary['val_loss'])}")
    if state["tokensPerSecond"]:
        parts.append(f"{units.count(state['tokensPerSecond'])} tokens/s")
    if state["bytesPerStep"]:
        fewer = state["denseBytes"] / state["bytesPerStep"] if state["denseBytes"] else None
        against = f", {units.ratio(fewer)} less than data-parallel" if fewer else ""
        parts.append(f"{units.number_of_bytes(state['bytesPerStep'])} a step{against}")
    if state["secondsLeft"] is not None and state["phase"] == "running":
        parts.append(f"{units.duration(state['secondsLeft'])} left")
    return _clean("  ".join(parts))


def _table(run: Watched, now: float) -> list[str]:
    rows = [HEADS, *(_cells(row, now) for row in run.islands(now))]
    if len(rows) == 1:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(row: dict[str, Any], now: float) -> tuple[str, ...]:
    clock = f" ({row['clock']})" if row["clock"] is not None and row["clock"] != row["step"] else ""
    out = f"out of {row['outInARow']}" if row["state"] == "out" else row["state"]
    return (
        str(row["island"]),
        out,
        f"{row['step']}{clock}",
        units.decimal(row["loss"]),
        units.count(row["tokensPerSecond"]),
        units.share(row["utilization"]),
        units.brief(row["waitSeconds"]),
        units.number_of_bytes(row["sent"]),
        units.number_of_bytes(row["received"]),
        units.brief(row["slack"]),
        f"{units.duration(max(0.0, now - row['lastTime']))} ago" if row["lastTime"] else "-",
    )


def _problems(run: Watched, now: float) -> list[str]:
    return [_clean(f"! {problem.what} {problem.todo}") for problem in run.problems(now)]


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _display(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.live import Live as Display
    from rich.text import Text

    class Plain(Display):
        def update(self, renderable: Any, *, refresh: bool = True) -> None:
            super().update(Text(str(renderable), no_wrap=True, overflow="ellipsis"), refresh=refresh)

    return Plain(console=Console(file=stream, highlight=False), auto_refresh=False)
