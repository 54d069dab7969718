"""Starting the islands of a run on this machine, watching them, and stopping them cleanly.

Every island is a process of its own, as it would be on a machine of its own. This process trains nothing, and
does not even load torch: it shows the event log. When an island dies, the next exchange of the others fails,
and they exit; those that do not are killed. Ctrl-C asks all islands to stop at the same step, a little ahead,
where they save and exit; a second one kills them at once. What an island prints goes to `island-R.log` in the
run's folder.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isles.train.config import TrainConfig
from isles.view import events
from isles.view.progress import Progress

STOP_FILE = "stop"
"""In a run's folder: the step at which all islands are to save and leave."""
FAILED, USER_MISTAKE, LOST_PEER, STOPPED = 1, 2, 3, 130
"""Exit codes of an island."""


def launch(config: TrainConfig) -> dict[str, Any]:
    """Runs all islands to the end; returns the summary of the run. Raises ValueError for a user's mistake,
    SystemExit else.
    """
    folder = Path(config.run)
    (folder / STOP_FILE).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="isles-") as scratch, watching(config):
        islands = [_start(config, rank, Path(scratch) / "rendezvous") for rank in range(config.islands)]
        try:
            codes = _wait(islands, config)
        finally:
            for island in islands:
                if island.poll() is None:
                    island.kill()
                island.wait()
    _check(codes, config)  # after all progress has been shown: its message is the last line
    return summary_of(folder)


def launch_elastic(config: TrainConfig) -> dict[str, Any]:
    """Runs islands that come and go, on this machine: each until it is done, whatever becomes of the others. The first
    Ctrl-C lets them leave.
    """
    folder = Path(config.run)
    (folder / STOP_FILE).unlink(missing_ok=True)
    with watching(config):
        islands = [_start(config, rank) for rank in range(config.islands)]
        try:
            try:
                codes = [island.wait() for island in islands]
            except KeyboardInterrupt:
                (folder / STOP_FILE).touch()
                codes = [island.wait() for island in islands]
        finally:
            for island in islands:
                if island.poll() is None:
                    island.kill()
                island.wait()
    again = "start the same command again to go on"
    if all(code == 0 for code in codes):
        return summary_of(folder)
    if any(code == STOPPED for code in codes) and all(code in (0, STOPPED) for code in codes):
        print(f"isles train: {_last_line(config, codes.index(STOPPED))}; {again}", file=sys.stderr)
        raise SystemExit(STOPPED)
    failed = next(rank for rank, code in enumerate(codes) if code not in (0, STOPPED))
    if codes[failed] == USER_MISTAKE:
        raise ValueError(_last_line(config, failed))
    why = f"was ended by {signal.Signals(-codes[failed]).name}" if codes[failed] < 0 else _last_line(config, failed)
    where = f"{config.run}/island-{failed}.log"
    raise SystemExit(f"isles train: an island started here failed: {why} (full output: {where}); {again}")


@contextmanager
def watching(config: TrainConfig) -> Iterator[None]:
    """Shows the progress from now on, and feeds other viewers of the event log, until the block ends."""
    over = threading.Event()
    path = Path(config.run) / events.FILE_NAME
    begin = path.stat().st_size if path.exists() else 0
    watchers = _watchers(config)
    with _page(config), Progress(total_steps=config.steps) as progress:

        def watch() -> None:
            for event in events.follow(path, over.is_set, position=begin):
                for watcher in (progress.feed, *watchers):
                    watcher(event)

        thread = threading.Thread(target=watch, name="isles-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=10)


@contextmanager
def _page(config: TrainConfig) -> Iterator[None]:
    """The live page, if it is wanted."""
    if not config.watch:
        yield
        return
    from isles.view.server import Server
    from isles.view.watcher import watcher_of

    with Server(watcher_of([config.run])) as server:
        print(f"watch: {server.url}", file=sys.stderr, flush=True)
        yield
        server.linger()


def _watchers(config: TrainConfig) -> list[Any]:
    watchers: list[Any] = []
    if config.tensorboard:
        from isles.view.tensorboard import TensorBoard

        watchers.append(TensorBoard(Path(config.run) / "tensorboard").feed)
    if config.wandb:
        from isles.view.wandb import WeightsAndBiases

        watchers.append(WeightsAndBiases(config.wandb, config.as_dict()).feed)
    return watchers


def summary_of(folder: Path) -> dict[str, Any]:
    """What the run wrote at its end."""
    ends = [event for event in events.read(folder) if event["event"] == "end"]
    return {name: value for name, value in ends[-1].items() if name not in ("event", "time", "island")}


def _start(config: TrainConfig, rank: int, rendezvous: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts an island; without a rendezvous it finds the others by itself."""
    size = str(config.islands)
    threads = str(config.threads or max(1, (os.cpu_count() or 1) // config.islands))
    environment = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": threads}
    if rendezvous is not None:
        environment |= {"RANK": str(rank), "WORLD_SIZE": size, "ISLES_RENDEZVOUS": str(rendezvous)}
    with (Path(config.run) / f"island-{rank}.log").open("wb") as log:
        command = [sys.executable, "-m", "isles.train.worker", config.run]
        # Its own session: a Ctrl-C in the terminal is for this process alone, which passes it on in an orderly way.
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _wait(islands: list[subprocess.Popen[bytes]], config: TrainConfig) -> list[int | None]:
    """Until all have ended; returns their exit codes, None for one that does not end. The first Ctrl-C asks them to."""
    try:
        return _codes(islands, config)
    except KeyboardInterrupt:
        _ask_to_stop(Path(config.run), config)
        return _codes(islands, config)


def _codes(islands: list[subprocess.Popen[bytes]], config: TrainConfig) -> list[int | None]:
    """Of all islands, when they have ended, or when one has failed and the others have had their time to notice."""
    deadline = float("inf")
    while any(island.poll() is None for island in islands) and time.monotonic() < deadline:
        time.sleep(0.05)
        if deadline == float("inf") and any(island.poll() for island in islands):
            deadline = time.monotonic() + config.timeout_seconds + 30
    return [island.poll() for island in islands]


def _check(codes: list[int | None], config: TrainConfig) -> None:
    """Raises if an island has not ended well."""
    if any(code not in (0, STOPPED) for code in codes):
        _explain(codes, config)
    if STOPPED in codes:
        print(
            f"isles train: {_last_line(config, 0)}; continue with: isles train --resume --run {config.run}",
            file=sys.stderr,
        )
        raise SystemExit(STOPPED)


def _ask_to_stop(folder: Path, config: TrainConfig) -> None:
    """Names a step that no island has reached yet: about a second ahead."""
    steps = (
        [event for event in events.read(folder) if event["event"] == "step"]
        if (folder / "events.jsonl").exists()
        else []
    )
    pace = statistics.median(event["seconds"] for event in steps[-20:]) if steps else 1.0
    step = max((event["step"] for event in steps), default=0) + 2 + int(1.0 / max(pace, 1e-3))
    part = folder / (STOP_FILE + ".part")
    part.write_text(str(min(step, config.steps)))
    part.rename(folder / STOP_FILE)


def _explain(codes: list[int | None], config: TrainConfig) -> None:
    failed = [rank for rank, code in enumerate(codes) if code not in (0, STOPPED)]
    mistaken = [rank for rank in failed if codes[rank] == USER_MISTAKE]
    if mistaken:
        raise ValueError(_last_line(config, mistaken[0]))
    killed = [rank for rank in failed if (codes[rank] or 0) < 0]
    resume = f"continue with: isles train --resume --run {config.run}"
    if killed:
        name = signal.Signals(-(codes[killed[0]] or 0)).name
        raise SystemExit(f"isles train: island {killed[0]} was ended by {name}, and the others stopped; {resume}")
    first = min(failed, key=lambda rank: codes[rank] == LOST_PEER)  # an island that lost a peer is not the cause
    why = f"{_last_line(config, first)} (full output: {config.run}/island-{first}.log)"
    raise SystemExit(f"isles train: island {first} failed: {why}; {resume}")


def _last_line(config: TrainConfig, rank: int) -> str:
    lines = (Path(config.run) / f"island-{rank}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
