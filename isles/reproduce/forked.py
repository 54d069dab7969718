"""What processes of `pool` have in memory from their start: the server they are forked from imports this once.

The first step of any optimizer imports torch._dynamo, which takes seconds; here it is imported once for all runs.

A study that is stopped while it asks the server for a process breaks off in the middle of a message. The server would
say so with a traceback, long after the study's own last word; it ends quietly instead.
"""

from __future__ import annotations

import sys
from types import TracebackType

import torch._dynamo  # noqa: F401

import isles.reproduce.train  # noqa: F401


def _say_all_but_the_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, EOFError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say_all_but_the_end
