"""The command line of isles as a program that a test talks to by signals and by its files, with torch loaded already.

`isles train` starts a process per island, and each of them imports torch: that takes longer than a small run. Here the
program is forked from the server of `tests.processes`, and its islands are forked from it. Everything else is as it is
for a user: processes with pids, parents, sessions, environments, output and exit codes of their own. That a program
starts and ends without all this is tested with programs that are started anew (`tests/test_train_run.py`).
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.processes import server

MOST_ISLANDS = 3
"""That one program starts."""
_numbers = itertools.count()


class Program:
    """`isles ARGUMENTS`: what tests use of `subprocess.Popen`. `before` is called in it first, for its islands too."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: pathlib.Path,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        own = folder / f"program-{os.getpid()}-{next(_numbers)}"
        own.mkdir(parents=True)
        self.out, self.err = own / "out", own / "err"
        """What it prints."""
        about = (list(arguments), str(folder), dict(os.environ if environment is None else environment), before)
        self._process = server.Process(target=_program, args=(*about, str(self.out), str(self.err)))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("isles", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.out.read_text(), self.err.read_text()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _program(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    before: Callable[[], object] | None,
    out: str,
    err: str,
) -> None:
    from isles import cli
    from isles.train import launch

    os.chdir(folder)
    with open(out, "wb") as output, open(err, "wb") as errors:
        _become(environment, output.fileno(), errors.fileno())
    if before is not None:
        before()
    spare = [_Island() for _ in range(MOST_ISLANDS)]
    popen = lambda command, **options: spare.pop(0).begin(command, **options)
    launch.subprocess = types.SimpleNamespace(Popen=popen)  # type: ignore[attr-defined]
    sys.exit(cli.main(arguments))


class _Island:
    """`python -m MODULE ARGUMENTS` in a process that is there before it is needed: what its parent uses of
    `subprocess.Popen`. It is forked while its parent has one thread: what a store's client does in others would never
    go on in a fork.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._writer)
            code = 1
            try:
                with os.fdopen(reader) as order:
                    code = _run_ordered(order.readline())
            finally:
                os._exit(code)
        os.close(reader)

    def begin(self, command: list[str], env: Mapping[str, str], stdout: Any, **_: Any) -> _Island:
        with os.fdopen(self._writer, "w") as order:
            order.write(json.dumps([command, dict(env), stdout.name]) + "\n")
        return self

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _run_ordered(order: str) -> int:
    """In the process of an island: runs the command, if there is one before the parent ends."""
    if not order:
        return 0
    command, environment, log = json.loads(order)
    os.setsid()
    with open(log, "ab") as output:
        _become(environment, output.fileno(), output.fileno())
    assert command[1] == "-m"
    return _run_module(command[2:])


def _become(environment: Mapping[str, str], out: int, err: int) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(out, 1)
    os.dup2(err, 2)


def _run_module(arguments: list[str]) -> int:
    """As the interpreter does it, to the end of its threads. Gives the exit code."""
    sys.argv = arguments
    code: Any = 1
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)
