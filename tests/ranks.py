"""The command line of isles in one or several processes that know their rank, as torchrun starts them.

torchrun starts Python and imports torch anew for itself and for every rank, which takes longer than a small run. Here
ranks are forked from the server of `tests.processes`, which has imported all of it. What torchrun itself does is
tested with torchrun; what isles does with ranks is the same either way: `isles.cli.main`, and the same variables in the
environment.
"""

import itertools
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.processes import server

_numbers = itertools.count()


@dataclass
class Done:
    """What the ranks printed, and the exit code of the first one that failed, if one did."""

    returncode: int | None
    """None: one was still running at the time limit, and was killed."""
    stdout: str
    stderr: str


def variables(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun says to a rank on one machine, but for where the ranks meet."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def be_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process the one rank of a run: `isles.cli.main` then trains right here."""
    for name, value in variables(0, 1).items():
        monkeypatch.setenv(name, value)


def run(arguments: Sequence[str], ranks: int, folder: pathlib.Path, seconds: float = 240.0) -> Done:
    """Runs `isles ARGUMENTS` in so many ranks. They meet through a file in the folder, and print into it."""
    own = folder / f"ranks-{os.getpid()}-{next(_numbers)}"
    own.mkdir(parents=True)
    meeting = {"ISLES_RENDEZVOUS": str(own / "rendezvous")}
    processes = [
        server.Process(target=_rank, args=(list(arguments), variables(rank, ranks) | meeting, str(own / str(rank))))
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
    printed = ["".join((own / f"{rank}.{name}").read_text() for rank in range(ranks)) for name in ("out", "err")]
    return Done(next((code for code in codes if code != 0), 0), *printed)


def _rank(arguments: list[str], environment: dict[str, str], printed: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{printed}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    from isles.cli import main

    sys.exit(main(arguments))
