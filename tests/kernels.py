"""Compiled kernels for tests: one process compiles them, whoever else comes meanwhile waits and loads the result.

In a fresh checkout they take half a minute of a core. Workers of pytest and the servers they fork from would all start
on it at once.
"""

import fcntl
from pathlib import Path

import isles  # noqa: F401  (says which kernels there are)
from isles.wire import fused


def warm_up() -> None:
    with Path(fused.__file__).open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # until the file is closed, or this process ends
        fused.warm_up()
