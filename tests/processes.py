"""Real processes for tests: start a few over gloo, run one function in each, collect what became of every one.

`run(function, islands, folder)` gives one `Outcome` per process: what the function returned, or the exception that it
raised, or the exit code of a process that died without saying anything. Whatever is still running at the time limit, or
once everybody in `until` has reported, is killed by its id, and only that.

Processes are forked from a server that has imported torch once and done nothing with it (`tests.preloaded`), so that
starting one costs milliseconds instead of seconds. They meet through a file in a folder of the test: no port to collide
with another test.
"""

import importlib
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import pickle
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

server = multiprocessing.get_context("forkserver")
_numbers = itertools.count()


@dataclass
class Outcome:
    """What became of one process."""

    value: Any = None
    error: str = ""
    """The name of the exception's class."""
    message: str = ""
    trace: str = ""
    exit_code: int | None = None
    """None: it was still running when it was killed."""
    reported: bool = False

    @property
    def text(self) -> str:
        return f"{self.error}: {self.message}"


def start_server() -> None:
    """Starts the server, which gets ready by itself. There is one in a process, and whoever starts it says what it
    imports: it has to be here before a test of isles.reproduce starts one that has less.
    """
    trainers = ["tests.preloaded_trainers"] if "tests.trainers" in sys.modules else []
    server.set_forkserver_preload(["tests.preloaded", *trainers])
    multiprocessing.forkserver.ensure_running()


def run(
    function: Any,
    islands: int,
    folder: pathlib.Path,
    *arguments: Any,
    seconds: float = 100.0,
    until: tuple[int, ...] | None = None,
    ranks: int | None = None,
) -> list[Outcome]:
    """Runs `function(rank, *arguments)` in `islands` processes that share a default process group.

    `function` lives at the top level of a module. `until`: the ranks that count; once they are done, the others are
    killed, so that a test need not wait for a process that sleeps. `ranks`: so many processes share a default group,
    and the next ones another; 0: there is none.
    """
    rendezvous = folder / f"rendezvous-{os.getpid()}-{next(_numbers)}"
    outcomes = [Outcome() for _ in range(islands)]
    place = (function.__module__, function.__qualname__)
    processes, pipes = [], {}
    for rank in range(islands):
        receiver, sender = server.Pipe(duplex=False)
        process = server.Process(target=_child, args=(sender, place, rank, islands, ranks, str(rendezvous), arguments))
        process.start()
        sender.close()
        processes.append(process)
        pipes[receiver] = rank
    counted = set(range(islands) if until is None else until)
    deadline = time.monotonic() + seconds
    try:
        while counted & set(pipes.values()) and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                _read(pipe, outcomes[pipes.pop(pipe)])
        for rank in sorted(counted):
            processes[rank].join(max(0.0, deadline - time.monotonic()))
    finally:
        for process, outcome in zip(processes, outcomes, strict=True):
            outcome.exit_code = process.exitcode
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
    return outcomes


def values(
    function: Any,
    islands: int,
    folder: pathlib.Path,
    *arguments: Any,
    seconds: float = 100.0,
    ranks: int | None = None,
) -> list[Any]:
    """As `run`, for functions that must succeed everywhere: what they returned."""
    outcomes = run(function, islands, folder, *arguments, seconds=seconds, ranks=ranks)
    for rank, outcome in enumerate(outcomes):
        assert outcome.reported, f"process {rank} said nothing: exit code {outcome.exit_code} (None: it hung)"
        assert not outcome.error, f"process {rank} raised {outcome.text}\n{outcome.trace}"
        assert outcome.exit_code == 0, f"process {rank} ended with {outcome.exit_code}"
    return [outcome.value for outcome in outcomes]


def _read(pipe: Connection, outcome: Outcome) -> None:
    try:
        outcome.value, outcome.error, outcome.message, outcome.trace = pickle.loads(pipe.recv_bytes())
        outcome.reported = True
    except EOFError:  # it died without a word; the exit code says how
        pass
    finally:
        pipe.close()


def free_address() -> str:
    """HOST:PORT on this machine where nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def _child(
    pipe: Connection,
    place: tuple[str, str],
    rank: int,
    size: int,
    ranks: int | None,
    rendezvous: str,
    arguments: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function = getattr(importlib.import_module(place[0]), place[1])
    members = size if ranks is None else ranks
    if members:
        group, own_rank = divmod(rank, members)
        method = f"file://{rendezvous}-{group}"
        dist.init_process_group("gloo", init_method=method, rank=own_rank, world_size=members)
    try:
        report = (function(rank, *arguments), "", "", "")
    except Exception as error:
        report = (None, type(error).__name__, str(error), traceback.format_exc())
    # Straight out, as a program that has come to its end: no barrier, no tidying up that would hide a lost message.
    pipe.send_bytes(pickle.dumps(report))  # bytes: `send` would share tensors with a process that is about to end
    pipe.close()
