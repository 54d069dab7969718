"""Python programs without a new Python: they are forked from the server of `tests.processes`, which has torch loaded.

`run(["-m", "isles.cli", "plan"], folder)` is what `python -m isles.cli plan` does in that folder. Programs of Python
that it starts with `subprocess.Popen` are forked too, unless they talk to it through pipes. That a program starts by
itself, with what it imports, is tested where that is the question (`tests/test_package.py`, torchrun).
"""

from __future__ import annotations

import atexit
import multiprocessing.forkserver
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from typing import Any

from tests.processes import server

PLAIN = {"cwd", "env", "stdout", "stderr", "start_new_session"}
"""What a fork can do of what `subprocess.Popen` can; files have to be files."""


class File:
    """An open file for another process of the server."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


class Forked:
    """A program under way. It has what is used of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[Any],
        *,
        cwd: Any = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
    ) -> None:
        out, err = 1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()
        files = File(out), File(err)
        place = str(cwd or pathlib.Path.cwd()), dict(env or os.environ), start_new_session
        self._process = server.Process(target=_become, args=([str(word) for word in command[1:]], files, *place))
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # the child would begin with whatever this one runs
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = lambda self: self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self._process.pid or 0, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """In a program: `subprocess.Popen`, or a fork where one will do."""

    def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
        files = [options.get(name) for name in ("stdout", "stderr")]
        is_python = isinstance(args, (list, tuple)) and args[0] == sys.executable
        if is_python and not rest and options.keys() <= PLAIN and not any(isinstance(file, int) for file in files):
            return Forked(args, **options)
        return super().__new__(cls)


def run(
    words: Sequence[Any], folder: pathlib.Path, *, seconds: float = 280.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in a folder, to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = {"stdout": out, "stderr": err}
        program = Forked([sys.executable, *words], cwd=folder, env={**os.environ, **environment}, **files)
        try:
            program.wait(seconds)
        finally:
            program.kill()
        program.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(words), program.wait(), out.read(), err.read())


def _become(words: list[str], files: tuple[File, File], folder: str, environment: dict[str, str], leads: bool) -> None:
    """This process is a fork of the server. It becomes the program."""
    for number, file in enumerate(files, 1):
        os.dup2(file.number, number)
    if leads:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # it is there
    subprocess.Popen = _Popen  # type: ignore[misc]
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    try:
        words = words[words[0] == "-u" :]
        if words[0] == "-m":
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # the server has imported it
            sys.argv, sys.path[0:0] = words[1:], [folder]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0:0] = words, [str(pathlib.Path(words[0]).parent)]
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
