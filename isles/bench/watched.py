"""What being watched costs a run, and how soon the page says that an island has died.

The run, the server and the browser are processes of their own, on this machine: `isles train` with two islands, `isles
watch`, chromium. The run goes on while the page is opened and closed in turns. Its *pace*, in steps per second by its
own log, is compared with the turns before and after; the median counts. *Noise* is the pace in turns without a page
against the one before it, without a page too: what the machine does by itself. Each island has one thread, so on two
cores server and browser take what they need from the islands, and that is in the ratio.

Then one island is killed. The time from the signal until the page has the sentence about it is taken by this process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.view import events
from isles.view.sources import is_alive

ISLANDS, VICTIM = 2, 1
RUN = ["--islands", str(ISLANDS), "--threads", "1", "--data", "synthetic:0.2", "--tokenizer", "bytes"]
RUN += ["--model", "micro", "--batch-size", "4", "--sequence-length", "128", "--steps", "1000000"]
RUN += ["--method", "streaming", "--sync-every", "30", "--overlap", "2"]
RUN += ["--eval-every", "0", "--checkpoint-every", "1000000", "--sample-tokens", "0"]
START_SECONDS, END_SECONDS = 600.0, 30.0
"""Until the run must have begun to train, and have ended."""
TURN_BYTES = 10_000
"""That the log grows by in a turn, at least: some twenty steps."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    turn_seconds: float
    turns: int
    """In which the page is open; before, between and after them it is not."""
    kills: int


FULL, QUICK = Sizes(turn_seconds=5.0, turns=8, kills=3), Sizes(turn_seconds=0.2, turns=2, kills=1)


def measure(browser: Any, sizes: Sizes) -> dict[str, Any]:
    """The pace of a run with the page open against without, and the seconds until a killed island is told."""
    told: list[float] = []
    pace: dict[str, Any] = {}
    for _ in range(sizes.kills):
        with _run() as folder, _watch(folder) as url:
            pace = pace or _pace(browser, url, folder, sizes)
            told.append(_told(browser, url, folder))
    return {**pace, "told_seconds": max(told), "told_seconds_median": statistics.median(told), "kills": len(told)}


def _pace(browser: Any, url: str, folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Turns go alone, watched, alone; alone, watched, alone; and so on."""
    turns = []
    for _ in range(sizes.turns):
        turns.append(_turn(folder, sizes))
        with _opened(browser, url):
            turns.append(_turn(folder, sizes))
        turns.append(_turn(folder, sizes))
    steps = [event["time"] for event in _events(folder) if event["event"] == "step" and event["island"] == 0]
    paces = [_steps_per_second([time for time in steps if begin <= time < end]) for begin, end in turns]
    groups = [paces[start : start + 3] for start in range(0, len(paces), 3)]
    ratios = [2 * watched / (before + after) for before, watched, after in groups]
    noise = [first / last for (_, _, last), (first, _, _) in itertools.pairwise(groups)]
    return {
        "steps_per_second": statistics.median(pace for group in groups for pace in (group[0], group[2])),
        "ratio": statistics.median(ratios),
        "ratios": sorted(ratios),
        "noise": sorted(noise),
    }


def _steps_per_second(times: list[float]) -> float:
    """
    >>> _steps_per_second([1.0, 1.5, 2.0])
    2.0
    """
    return (len(times) - 1) / (times[-1] - times[0])


def _turn(folder: Path, sizes: Sizes) -> tuple[float, float]:
    """When it began and ended. On a busy machine it is longer: there must be some steps in it."""
    begin, size = time.time(), (folder / events.FILE_NAME).stat().st_size
    while time.time() < begin + sizes.turn_seconds or (folder / events.FILE_NAME).stat().st_size < size + TURN_BYTES:
        time.sleep(0.05)
    return begin, time.time()


def _told(browser: Any, url: str, folder: Path) -> float:
    with _opened(browser, url) as page:
        page.wait_for_selector(".state[data-phase=running]")
        victim = next(each["pid"] for each in _events(folder) if each["event"] == "island" and each["island"] == VICTIM)
        begin = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        page.locator(".problems .severe", has_text=f"Island {VICTIM} (process {victim}) has ended").wait_for()
        return time.perf_counter() - begin


@contextlib.contextmanager
def _opened(browser: Any, url: str) -> Iterator[Any]:
    """A page that has drawn something."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1e3 * START_SECONDS)
    try:
        page.goto(url)
        page.wait_for_selector("html[data-ready]", state="attached")
        yield page
    finally:
        page.close()


@contextlib.contextmanager
def _run() -> Iterator[Path]:
    """Islands that train, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="isles-bench-") as scratch:
        folder, environment = Path(scratch) / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "isles.cli", "train", "--run", str(folder), *RUN]
        with (Path(scratch) / "output").open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            try:
                _wait_for_rounds(folder, process)
                yield folder
            finally:
                for event in _events(folder):
                    if event["event"] == "island" and is_alive(event["pid"], event["time"]):
                        os.kill(event["pid"], signal.SIGKILL)
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Of a run whose islands are gone, or that has not begun."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for_rounds(folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not any(event["event"] == "apply" for event in _events(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            said = (folder.parent / "output").read_text().strip().splitlines()
            raise RuntimeError(f"isles train did not start: {said[-1] if said else 'it said nothing'}")
        time.sleep(0.2)


@contextlib.contextmanager
def _watch(folder: Path) -> Iterator[str]:
    """`isles watch` beside it: the address."""
    command = [sys.executable, "-m", "isles.cli", "watch", str(folder), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.wait()


def _events(folder: Path) -> list[dict[str, Any]]:
    """All events so far. The log of a run that is just beginning may not be there yet."""
    file = folder / events.FILE_NAME
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.split("\n") if line]
