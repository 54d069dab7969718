"""The islands of the crash matrix, the store between them, and everything that can be done to either.

    island 0 [namespace]---link---+
    island 1 [namespace]---link---+---[namespace]  S3 server (isles.lab.elastic.server)
    ...                           +

Every island has a link of its own, shaped in both directions; that of the store is as wide as all of them. A *slot* is
a machine: one namespace. A *life* is a process in it, from its start until it ends or is killed; whoever is started
again has a new life, in a new folder, as on a machine that has lost its disk. With a folder as the store there are no
links.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from isles.lab import nodes
from isles.lab.elastic.disk import Disk
from isles.lab.elastic.server import BUCKET
from isles.lab.namespaces import children
from isles.lab.network import Network
from isles.lab.nodes import Node
from isles.lab.programs import Program
from isles.train.launch import STOP_FILE, STOPPED
from isles.view.events import FILE_NAME, Event

PORT = 9000
AUDIT = "audit.json"
"""In the folder of an audit: what it found."""
STARTING_SECONDS = 300.0
"""For a program to start on a busy machine."""
ENDING_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the islands, their links and their store are like."""

    folder: Path
    program: Program
    islands: int = 3
    spares: int = 0
    """Machines for islands that join later."""
    bandwidth: float = 50e6
    latency: float = 0.0
    loss: float = 0.0
    mtu: int = 9000
    store: Literal["s3", "folder"] = "s3"
    disk_bytes: int = 0
    """Of the folder; 0: the disk it is on."""
    step_seconds: float = 0.1
    slower: Mapping[int, float] = field(default_factory=dict)
    """How many times as long a step takes, by slot."""

    @property
    def patience(self) -> float:
        return float(self.program.config.patience_seconds)

    @property
    def round_seconds(self) -> float:
        """Between two rounds, if nobody waits."""
        method = self.program.method()
        assert method is not None
        fragments = method.fragments if isinstance(method.fragments, int) else 1
        return self.step_seconds * method.sync_every / fragments

    def build(self) -> Fleet:
        """The fleet of these options; whoever has islands of another kind has another one."""
        return Fleet(self)


class Life:
    """One process of an island."""

    def __init__(self, slot: int, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.slot, self.folder, self.process = slot, folder, process
        self.started, self.ended, self.killed = time.time(), float("inf"), False
        self.events: list[Event] = []
        self._position, self._rest = 0, b""

    def is_alive(self) -> bool:
        """Notes the end when it finds out."""
        if self.ended == float("inf") and self.process.poll() is not None:
            self.ended = time.time()
        return self.ended == float("inf")

    def read(self) -> list[Event]:
        """All events so far."""
        file = self.folder / FILE_NAME
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(self._position)
                data = stream.read()
            self._position += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    self.events.append(json.loads(line))
        return self.events

    def of(self, kind: str) -> list[Event]:
        """Its events of a kind."""
        return [event for event in self.read() if event["event"] == kind]

    def is_in(self) -> bool:
        """Whether it has been in a round."""
        return any(event["own"] for event in self.of("round"))

    def complaint(self) -> str:
        """The last line that it printed."""
        return Node(self.slot, self.process, output_of(self.folder)).complaint()

    def failure(self) -> str | None:
        """Why it ended, if nobody wanted it to."""
        code = self.process.poll()
        return None if self.killed or code in (None, 0, STOPPED) else f"exit code {code}: {self.complaint()}"


class Fleet:
    """Machines, store and islands of one run; a context manager."""

    def __init__(self, options: Options) -> None:
        self.options, self.lives = options, list[Life]()
        self.slots = options.islands + options.spares
        self.mood = options.folder / "mood.json"
        self._server: subprocess.Popen[bytes] | None = None
        self.disk: Disk | None = None
        options.folder.mkdir(parents=True, exist_ok=True)
        links = {"latency": options.latency, "loss": options.loss}
        self.network = Network(self.slots + 1, options.bandwidth, mtu=options.mtu, **links)
        try:
            self.network.set_bandwidth(max(1e9, options.bandwidth * self.slots), self.slots)
            if options.store == "s3":
                self._serve()
            elif options.disk_bytes:
                self.disk = Disk(options.folder / "store", options.disk_bytes)
        except BaseException:
            self.close()
            raise

    # ---- the store

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/run" if self.options.store == "s3" else str(self.options.folder / "store")

    def _serve(self) -> None:
        address = self.network.address(self.slots)
        command = [sys.executable, "-m", "isles.lab.elastic.server", address, str(PORT), str(self.mood)]
        with (self.options.folder / "server.log").open("wb") as log:
            self._server = self.network.start(self.slots, command, stdout=subprocess.PIPE, stderr=log)
        assert self._server.stdout is not None
        if not self._server.stdout.readline().startswith(b"listening"):
            raise OSError(f"the S3 server did not start: see {self.options.folder / 'server.log'}")
        make = f"import urllib.request as u; u.urlopen(u.Request('http://{address}:{PORT}/{BUCKET}', method='PUT'))"
        made = self.network.start(self.slots, [sys.executable, "-c", make])
        if made.wait():
            raise OSError("the S3 server answers, and does not make a bucket")

    def set_mood(self, **mood: Any) -> None:
        """What the server does from now on (`isles.lab.elastic.server`)."""
        part = self.mood.with_suffix(".part")
        part.write_text(json.dumps(mood))
        part.rename(self.mood)

    def signal_store(self, number: signal.Signals) -> None:
        """Stops the server, or lets it go on: it keeps its objects in memory."""
        assert self._server is not None
        _signal(self._server, number)

    def served(self) -> dict[str, int]:
        """Requests, by how they ended."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self.mood.with_suffix(".served").read_text()))
        return {}

    # ---- islands

    def environment(self) -> dict[str, str]:
        own = {"AWS_ENDPOINT_URL": f"http://{self.network.address(self.slots)}:{PORT}", "AWS_REGION": "us-east-1"}
        keys = {"AWS_ACCESS_KEY_ID": "laboratory", "AWS_SECRET_ACCESS_KEY": "laboratory", "OMP_NUM_THREADS": "1"}
        return {**nodes.environment(self.network), **own, **keys}

    def start(self, slot: int) -> Life:
        """Starts an island on a machine."""
        number = sum(life.slot == slot for life in self.lives)
        folder = self.options.folder / f"island-{slot}.{number}"
        pace = self.options.step_seconds * self.options.slower.get(slot, 1.0)
        life = Life(slot, folder, self._run(slot, folder, "--step-seconds", str(pace)))
        self.lives.append(life)
        return life

    def _run(self, slot: int, folder: Path, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, *self.options.program.flags_of_run(folder), "--store", self.url, *more]
        command = self.disk.command(command) if self.disk else command
        with output_of(folder).open("wb") as log:
            return self.network.start(slot, command, env=self.environment(), stdout=log, stderr=log)

    def alive(self) -> list[Life]:
        return [life for life in self.lives if life.is_alive()]

    def kill(self, life: Life) -> None:
        """kill -9 of everything on its machine."""
        life.killed = True
        self.network.crash(life.slot)
        life.process.kill()
        life.process.wait()
        life.is_alive()

    def signal(self, life: Life, number: signal.Signals) -> None:
        """Stops an island, or lets it go on."""
        _signal(life.process, number)

    def ask_to_leave(self) -> None:
        """As a first Ctrl-C does."""
        for life in self.alive():
            (life.folder / STOP_FILE).touch()

    def audit(self) -> dict[str, Any]:
        """What the store has at the end, read by somebody who takes no part, from the store's own machine."""
        folder = self.options.folder / "audit"
        process = self._run(self.slots, folder, "--audit")
        if process.wait(ENDING_SECONDS):
            why = Node(self.slots, process, output_of(folder)).complaint()
            return {"number": None, "digest": None, "seals": [], "failure": why}
        return dict(json.loads((folder / AUDIT).read_text()))

    # ---- time

    def wait(self, seconds: float) -> None:
        """Lets so much time pass, or less if an island fails: nothing more can be learned then."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.failures():
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Until something holds; whether it does."""
        deadline = time.monotonic() + seconds
        while not (found := holds()) and time.monotonic() < deadline and not self.failures():
            time.sleep(0.1)
        return found

    def failures(self) -> dict[str, str]:
        """Islands that ended and should not have, with the reason."""
        return {life.folder.name: why for life in self.lives if (why := life.failure())}

    def close(self) -> None:
        self.network.close()
        if self.disk:
            self.disk.close()
        for life in self.lives:
            life.process.wait()
        if self._server and self._server.stdout:
            self._server.stdout.close()
            self._server.wait()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To a program in a namespace, and to nsenter, which has started it.

    nsenter stops itself when it sees that the program has stopped. Told to go on before it has done so, it would stop
    afterwards, for ever: so stopping waits for it.
    """
    programs = children(process.pid) or [process.pid]
    for pid in programs if number == signal.SIGSTOP else {process.pid, *programs}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    while number == signal.SIGSTOP and process.poll() is None and not _is_stopped(process.pid):
        time.sleep(0.01)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


def output_of(folder: Path) -> Path:
    """Where the process of a run's folder prints to: beside the folder, which is the run's alone."""
    return folder.with_name(folder.name + ".log")
