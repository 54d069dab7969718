"""Compiled kernels: ready before the first step, or not used at all.

Some loops are written twice: in PyTorch, which is their definition and runs everywhere, and for numba, which turns
them into one pass over memory on the CPU. Both give the same bits, so it never matters which one runs, only how
fast. This module sees to it that training never waits for the compiler:

    register(module, groups)     says where the kernels of a group are; imports nothing
    warm_up(groups)              compiles them in a thread (or loads them from numba's cache on disk), waits for it
                                 up to a limit, and returns whether they are ready
    kernels(group)               what is ready, else None: the caller then takes the PyTorch way

Only `warm_up` imports numba and only its thread compiles. What is not ready in time is used from the moment it is;
until then, or for ever where there is no numba, PyTorch does the work, and one line in the log says so.
ISLES_FUSED=0 in the environment turns kernels off.

A module of kernels has a dict `KERNELS`: for each group its functions, decorated with `kernel`, and the one signature
that each is compiled for.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

logger = logging.getLogger("isles")

LIMIT_SECONDS = 60.0
"""How long `warm_up` waits by default. All kernels compile in a fraction of it; from the cache in a fraction of a
second.
"""

Kernels = Mapping[str, Callable[..., Any]]

_modules: dict[str, str] = {}
_ready: dict[str, Kernels] = {}
_workers: dict[str, threading.Thread] = {}
_said: set[str] = set()
_lock = threading.Lock()


def register(module: str, groups: Collection[str]) -> None:
    """Says that `module` holds the kernels of these groups."""
    _modules.update(dict.fromkeys(groups, module))


def kernels(group: str) -> Kernels | None:
    """The functions of a group by name, if they are compiled."""
    return _ready.get(group)


def warm_up(groups: Collection[str] | None = None, *, limit_seconds: float = LIMIT_SECONDS) -> bool:
    """Makes kernels ready, all that are known or those of some groups, and returns whether they are.

    Any number of threads and processes may do this at once. A second call costs nothing. Groups may be the `kernels` of
    codecs: the empty name, of those that have none, is passed over.
    """
    wanted = set(_modules if groups is None else groups) - {""}
    if unknown := sorted(wanted - _modules.keys()):
        raise ValueError(f"no kernels called {', '.join(unknown)}: choose from {', '.join(sorted(_modules))}")
    if os.environ.get("ISLES_FUSED") == "0":
        _say("off", logging.INFO, "ISLES_FUSED=0: kernels are off, codecs run in PyTorch")
        return False
    if importlib.util.find_spec("numba") is None:
        _say("missing", logging.INFO, "no numba (pip install 'isles[fast]'): codecs run in PyTorch, more slowly")
        return False
    deadline = time.monotonic() + limit_seconds
    for worker in _start(wanted):
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            line = f"kernels are not compiled after {limit_seconds:g} s: until they are, codecs run in PyTorch"
            _say("late", logging.WARNING, line)
            return False
    return wanted <= _ready.keys()


def _start(groups: Collection[str]) -> set[threading.Thread]:
    """The threads that compile these groups, or have done so; a group is compiled once."""
    with _lock:
        if missing := [group for group in sorted(groups) if group not in _workers]:
            # Not a daemon: the interpreter must not be taken down around a running compiler.
            worker = threading.Thread(target=_compile_all, args=(missing,), name="isles-warm-up", daemon=False)
            _workers.update(dict.fromkeys(missing, worker))
            worker.start()
        return {_workers[group] for group in groups}


def _compile_all(groups: Collection[str]) -> None:
    try:
        for group in groups:
            _ready[group] = _compile(group)
    except _MainThreadEnded:
        pass
    except Exception as error:  # whatever is wrong with numba here, there is a way without it
        line = f"kernels do not compile here, codecs run in PyTorch: {type(error).__name__}: {error}"
        _say("broken", logging.WARNING, line)


class _MainThreadEnded(Exception):
    """The program is over and waits for this thread."""


def _compile(group: str) -> Kernels:
    compiled = {}
    for name, (function, signature) in importlib.import_module(_modules[group]).KERNELS[group].items():
        if not threading.main_thread().is_alive():
            raise _MainThreadEnded
        if not function.signatures:
            function.compile(signature)
            function.disable_compile()  # anything else than the one signature is an error, not a surprise of a second
        compiled[name] = function
    return compiled


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator: a function for numba. It runs without the GIL, and rounds as written: no fused multiply-add.

    The cache is beside the module, or in the user's cache directory where that cannot be written; where neither can be,
    every process compiles for itself.
    """
    import numba

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place for a cache
        return numba.njit(**options)(function)


def _say(what: str, level: int, line: str) -> None:
    """Once in a process, however many islands live in it."""
    with _lock:
        if what in _said:
            return
        _said.add(what)
    logger.log(level, line)
