"""What the live page costs with many islands and a long log, against an empty one; in chromium, by playwright.

Both pages are served here and opened in turns; the best of several openings counts. *First paint* is the browser's own
first-contentful-paint, *ready* is when the first data is drawn. An *update* is the CPU time that the main thread of the
page takes for one answer: scripts, layout, painting. Of the full page all visible charts are drawn anew each time, as
its log grows by one step of every island. Memory is that of its JavaScript, and what the server keeps of the run, of
this log and of one twice as long. What being watched costs a run is measured in `isles.bench.watched`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.bench import watched
from isles.view.server import Server
from isles.view.watcher import Watcher, watcher_of

MISSING = "the part page needs chromium and playwright: apt-get install chromium, pip install playwright"
PERIOD, OVERLAP, FRAGMENTS, STEP_SECONDS = 30, 2, 4, 0.5
OPENINGS = 3
PATIENCE_MILLISECONDS = 600_000
"""Of a machine that does other things, too."""


def measure(islands: int, events: int, updates: int, watching: watched.Sizes) -> dict[str, Any]:
    """Times of an empty page and of one with a long log; of a run while it is watched and while it is not."""
    program = _chromium()
    with tempfile.TemporaryDirectory(prefix="isles-bench-") as scratch:
        log = _Log(Path(scratch) / "run", islands)
        log.grow(events)
        with _browser(program) as browser:
            folders = {"empty": Path(scratch) / "nothing", "full": log.folder}
            opened = [{name: _opening(browser, folder) for name, folder in folders.items()} for _ in range(OPENINGS)]
            pages = {
                name: {what: min(each[name][what] for each in opened) for what in ("paint_seconds", "ready_seconds")}
                | _updates(browser, folder, log if name == "full" else None, updates)
                for name, folder in folders.items()
            }
            server = _server(log.folder)
            log.grow(events)
            longer = {**_updates(browser, log.folder, log, 1), **_server(log.folder)}
            run = watched.measure(browser, watching)
    growth = {"heap": longer["heap_bytes"] / pages["full"]["heap_bytes"]}
    growth["kept"] = longer["kept_bytes"] / server["kept_bytes"]
    return {"islands": islands, "events": events, **pages, "server": server, "growth": growth, "watched": run}


def _opening(browser: Any, folder: Path) -> dict[str, float]:
    """Of a page whose server has read nothing yet."""
    with Server(watcher_of([str(folder)])) as server:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(server.url)
        page.wait_for_selector("html[data-ready]", state="attached", timeout=PATIENCE_MILLISECONDS)
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        ready = page.evaluate("performance.getEntriesByName('isles-ready')[0].startTime")
        page.close()
    return {"paint_seconds": (ready if paint is None else paint) / 1e3, "ready_seconds": ready / 1e3}


def _updates(browser: Any, folder: Path, log: _Log | None, updates: int) -> dict[str, float]:
    """Of a page that has seen all of the log."""
    with Server(watcher_of([str(folder)])) as server:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(server.url)
        page.wait_for_selector("html[data-behind=false]", state="attached", timeout=PATIENCE_MILLISECONDS)
        metrics = page.context.new_cdp_session(page)
        metrics.send("Performance.enable", {"timeDomain": "threadTicks"})
        busy = _busy_seconds(metrics)
        for _ in range(updates):
            begun = page.evaluate("performance.getEntriesByName('isles-update')[0].startTime")
            if log is not None:
                log.grow_by_a_step()
            while page.evaluate("performance.getEntriesByName('isles-update')[0].startTime") == begun:
                page.wait_for_timeout(50)
        took = (_busy_seconds(metrics) - busy) / updates
        metrics.send("HeapProfiler.collectGarbage")
        heap = page.evaluate("performance.memory.usedJSHeapSize")
        page.close()
    return {"update_seconds": took, "heap_bytes": float(heap)}


def _busy_seconds(metrics: Any) -> float:
    """CPU time of the page's main thread: scripts, layout, painting."""
    found = metrics.send("Performance.getMetrics")["metrics"]
    return next(float(each["value"]) for each in found if each["name"] == "TaskDuration")


def _server(folder: Path) -> dict[str, float]:
    """Reading all of the log, what is kept of it, and the size of an answer to a page that has seen the rest."""
    begin = time.perf_counter()
    watcher = watcher_of([str(folder)])
    _read(watcher)
    seconds = time.perf_counter() - begin
    again = watcher.update(watcher.boot, watcher.update()["version"])
    tracemalloc.start()
    kept = watcher_of([str(folder)])
    _read(kept)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "read_seconds": seconds,
        "kept_bytes": float(kept_bytes),
        "log_bytes": float((folder / "events.jsonl").stat().st_size),
        "answer_bytes": float(len(json.dumps(again))),
    }


def _read(watcher: Watcher) -> None:
    while any(run.source.behind for run in watcher.looked_at()):
        pass


class _Log:
    """The event log of a run that goes on."""

    def __init__(self, folder: Path, islands: int) -> None:
        self.folder, self._islands, self._step = folder, islands, 0
        self._begin = time.time()
        folder.mkdir()
        fragments = [{"numel": 250_000, "layers": str(index)} for index in range(FRAGMENTS)]
        method = {"sync_every": PERIOD, "overlap": OVERLAP, "codec": "e3m0", "update": "fresh"}
        about = {"islands": islands, "method": method, "method_name": "streaming", "parameters": 1_000_000, "layers": 4}
        more = {"fragments": fragments, "tokens_per_step": 1024 * islands, "config": {"steps": 10**6}, "name": "bench"}
        self._write([{"event": "config", "island": 0, **about, **more}])

    def grow(self, events: int) -> None:
        written = 1
        while written < events:
            written += self.grow_by_a_step()

    def grow_by_a_step(self) -> int:
        self._step += 1
        made = list(self._events(self._step))
        self._write(made)
        return len(made)

    def _events(self, step: int) -> Iterator[dict[str, Any]]:
        for island in range(self._islands):
            place = {"island": island, "step": step}
            for fragment in range(FRAGMENTS):
                offset = fragment * PERIOD // FRAGMENTS
                number, phase = divmod(step - offset, PERIOD)
                where = {**place, "fragment": fragment, "round": number + (offset > 0)}
                if phase == 0 and number + (offset > 0) > 0:
                    yield {"event": "send", **where, "num_bytes": 125_000}
                if phase == OVERLAP and number + (offset > 0) > 0:
                    yield {"event": "apply", **where, "seconds": 0.001, "slack_seconds": 0.3}
            numbers = {"loss": 3 + 5 / (1 + step / 100), "seconds": STEP_SECONDS, "wait_seconds": 0.001}
            yield {
                "event": "step",
                **place,
                **numbers,
                "bytes_sent": 4000,
                "bytes_received": 4000,
                "tokens": 1024 * step,
            }

    def _write(self, events: list[dict[str, Any]]) -> None:
        time_of = self._begin + STEP_SECONDS * self._step
        with (self.folder / "events.jsonl").open("a") as stream:
            stream.writelines(json.dumps({**event, "time": time_of}) + "\n" for event in events)


class _browser:
    """Chromium; a context manager."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __enter__(self) -> Any:
        from playwright.sync_api import sync_playwright  # type: ignore[import-not-found,unused-ignore]

        self._playwright = sync_playwright().start()
        options = ["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"]
        self._browser = self._playwright.chromium.launch(executable_path=self._program, args=options)
        return self._browser

    def __exit__(self, *exception: object) -> None:
        self._browser.close()
        self._playwright.stop()


def check() -> None:
    """Raises unless the part can be measured here."""
    _chromium()


def _chromium() -> str:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        import playwright.sync_api  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        program = None
    if program is None:
        raise ValueError(MISSING)
    return program
