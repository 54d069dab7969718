"""Many jobs: one at a time on every core, each in a process of its own, and what is finished is kept.

A process per job, rather than workers that take one job after the other: memory and compiled code go with it, and a
job that dies (out of memory, an instruction that the processor lacks) is known by its exit code. It is forked from a
server that has torch loaded already, so it starts at once.

A finished record is a file in the cache, named by the hash of its job (`key_of`). A study that is stopped therefore
goes on where it was, and two studies that need the same run share it. Ctrl-C ends the processes and is passed on; a
process whose parent is gone ends by itself.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TextIO

from isles.reproduce.job import Job, Text, key_of
from isles.train.tokens import default_cache
from isles.view import units


@dataclass(frozen=True)
class Task:
    """A job under the name that a study gives it."""

    name: str
    job: Job
    key: str


def run_tasks(
    tasks: Sequence[Task],
    text: Text,
    *,
    workers: int,
    cache: Path | None = None,
    compile_model: bool | None = None,
    done: Mapping[str, dict[str, Any]] | None = None,
    again: bool = False,
    stream: TextIO | None = None,
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Every task with its record: those known from before first, then each as it is finished.

    Known are those in `done`, by key, and those in the cache; `again` runs them all anew. With one worker they run in
    this process, one after the other.
    """
    folder = record_folder(cache)
    known: dict[str, dict[str, Any]] = {}
    for task in tasks if not again else ():
        if found := (done or {}).get(task.key) or _read(folder / f"{task.key}.json"):
            known[task.key] = found
    for task in tasks:
        if task.key in known:
            yield task, known[task.key]
    waiting: dict[str, list[Task]] = {}
    for task in tasks:
        if task.key not in known:
            waiting.setdefault(task.key, []).append(task)
    jobs = [(key, alike[0].job) for key, alike in waiting.items()]
    progress = Progress(jobs, workers, stream)
    runner = in_turn if workers == 1 else side_by_side
    for key, record in runner(jobs, text, workers, compile_model):
        _write(folder / f"{key}.json", json.dumps(record))
        progress.finished(waiting[key][0], record)
        for task in waiting[key]:
            yield task, record


def tasks_of(configurations: dict[str, Job], seeds: Iterable[int], text: Text) -> list[Task]:
    """Every configuration with every seed, a whole seed at a time."""
    digests = {job.vocabulary: text.tokens(job.vocabulary).digest for job in configurations.values()}
    seeded = [(name, dataclasses.replace(job, seed=seed)) for seed in seeds for name, job in configurations.items()]
    return [Task(name, job, key_of(job, text, digests[job.vocabulary])) for name, job in seeded]


def record_folder(cache: Path | None = None) -> Path:
    """Where finished records are kept."""
    folder = (cache or default_cache()) / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Progress:
    """A line per finished job, with the time left; it goes by the work that is done, not by the number of jobs."""

    def __init__(self, jobs: Sequence[tuple[str, Job]], workers: int, stream: TextIO | None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total, self._count = len(jobs), 0
        self._cost, self._done = sum(job.cost for _, job in jobs), 0.0
        self._begin, self._workers = time.monotonic(), workers
        if jobs:
            self._say(f"{len(jobs)} runs to go, {workers} at a time")

    def finished(self, task: Task, record: dict[str, Any]) -> None:
        self._count += 1
        self._done += task.job.cost
        so_far = time.monotonic() - self._begin
        left = so_far * (self._cost - self._done) / self._done
        loss = units.decimal(record["val_loss"], 4)
        took, remaining = units.duration(record["seconds"]), units.duration(left)
        self._say(
            f"[{self._count}/{self._total}] {task.name}, seed {task.job.seed}: {loss} in {took}; {remaining} left"
        )

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def in_turn(
    jobs: Sequence[tuple[str, Job]], text: Text, workers: int, compile_model: bool | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One after the other, in this process."""
    import torch

    from isles.reproduce.train import train

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for key, job in jobs:
            yield key, train(job, text, compile_model=compile_model)
    finally:
        torch.set_num_threads(threads)


def side_by_side(
    jobs: Sequence[tuple[str, Job]], text: Text, workers: int, compile_model: bool | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """In processes, `workers` at a time."""
    context = process_context()
    ahead = sorted(jobs, key=lambda item: (item[1].seed, -item[1].cost))  # the longest of a seed first
    running: dict[Any, tuple[str, Any]] = {}
    try:
        while ahead or running:
            while ahead and len(running) < workers:
                key, job = ahead.pop(0)
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(send, job, text, compile_model))  # type: ignore[attr-defined]
                process.start()
                send.close()
                running[receive] = (key, process)
            for ready in multiprocessing.connection.wait(list(running)):
                key, process = running.pop(ready)
                yield key, _answer(ready, process)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _answer(receive: Any, process: Any) -> dict[str, Any]:
    """What a job sent; its error is raised here."""
    try:
        record, error = receive.recv()
    except EOFError:
        process.join()
        raise ValueError(
            f"a run ended with exit code {process.exitcode} and no result: is there enough memory? "
            "What is finished is kept; start again to go on"
        ) from None
    process.join()
    if error is not None:
        raise error
    return record  # type: ignore[no-any-return]


def _work(send: Any, job: Job, text: Text, compile_model: bool | None) -> None:
    """The process of one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent sees to it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from isles.reproduce.train import train

    torch.set_num_threads(1)
    try:
        send.send((train(job, text, compile_model=compile_model), None))
    except Exception as error:
        send.send((None, error if isinstance(error, (ValueError, OSError)) else RuntimeError(repr(error))))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def process_context() -> BaseContext:
    """How processes are started: forked from a server that has torch loaded, or, where there is none, from nothing."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["isles.reproduce.forked"])
    return context


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "val_loss" in record else None


def _write(path: Path, content: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(content, "utf-8")
    os.replace(partial, path)
