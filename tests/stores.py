"""Stores for tests: memory, a folder, a real S3 server; and islands as threads that are joined by one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any

KINDS = ("memory", "folder", "s3")


@contextlib.contextmanager
def s3_server(log: list[str] | None = None) -> Iterator[str]:
    """moto's S3 server on a free port. It says which one it took in its log, which has a line for every request."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "Running on http://" in line:
                address = line.split("Running on ")[1].split()[0]
                break
        lines = [] if log is None else log
        threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True).start()  # or its pipe fills up
        yield address
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def new_store(kind: str, folder: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The url of an empty store, and options."""
    if kind == "memory":
        yield f"memory://{uuid.uuid4().hex}", {}
    elif kind == "folder":
        yield str(folder / uuid.uuid4().hex), {}
    else:
        with s3_server() as address:
            urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"))
            own = {"access_key_id": "id", "secret_access_key": "secret", "region": "us-east-1"}
            yield "s3://bucket/some/run", {"endpoint": address, **own}


def threads(*functions: Callable[[], Any], seconds: float = 200.0) -> list[Any]:
    """Runs all of them at the same time; raises the first error."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in started:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in started:
        while thread.is_alive() and not errors and time.monotonic() < deadline:
            thread.join(0.05)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in started), "islands that hang"
    return results


def in_order(count: int) -> list[Callable[[Callable[[], Any]], Any]]:
    """For each of `count` islands a function that makes its DiLoCo when those before it have made theirs: islands are
    numbered in the order of joining.
    """
    turns = [threading.Event() for _ in range(count + 1)]
    turns[0].set()

    def turn(index: int) -> Callable[[Callable[[], Any]], Any]:
        def make(made: Callable[[], Any]) -> Any:
            turns[index].wait()
            try:
                return made()
            finally:
                turns[index + 1].set()

        return make

    return [turn(index) for index in range(count)]
