"""Where islands meet that share no process group: a store at an address that all of them know.

A trainer takes the default process group for the ranks of one site: it averages losses over it, wraps DDP around it and
shards data by its size. So islands of a trainer must not share one. Here island 0 hosts a store (torch's TCPStore) at
HOST:PORT, and the others connect to it. Every island leaves a note there that says how many islands and ranks it was
told of; when all notes are there and agree, the store is a place to make a gloo group in.

An island may have several ranks: those of the default group that name the same island. Each meets the ranks at its
place in the other islands.

A store that all islands have joined is complete. Whoever comes to it later has met an older run that is about to end,
and waits for the next store at the same address.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from isles.wire.groups import private_store
from isles.wire.world import LostPeerError, MismatchError

POLL_SECONDS = 0.05
LINGER_SECONDS = 5.0
"""So long the host of a store keeps it for those who have not read yet why it leaves."""


@dataclass
class Meeting:
    """A store that all islands have joined."""

    store: Store
    """For the ranks at one place of all islands."""
    is_host: bool
    """Whether the store ends with this process."""


def meet(address: str, island: int, islands: int, timeout_seconds: float) -> Meeting:
    """Joins the islands at an address; all ranks of all islands call this."""
    host, port = check_address(address)
    if isinstance(islands, bool) or not isinstance(islands, int) or islands < 1:
        raise ValueError(f"islands={islands!r} must be a whole number from 1: how many islands there are")
    if isinstance(island, bool) or not isinstance(island, int) or not 0 <= island < islands:
        raise ValueError(f"island={island!r} must be a whole number from 0 to {islands - 1}: this one's, of {islands}")
    deadline = time.monotonic() + timeout_seconds
    ranks = _ranks_of_island(island, deadline)
    place = ranks.index(dist.get_rank()) if ranks else 0
    is_host = island == 0 and place == 0
    base = _host(host, port) if is_host else _join(host, port, place, island, deadline)
    visit = _Visit(base, address, island, islands, place, max(1, len(ranks)))
    try:
        visit.announce()
        visit.wait_for_all(deadline)
        base.set(f"complete/{place}", "")
    except RuntimeError as error:
        if isinstance(error, LostPeerError):
            raise
        raise LostPeerError(f"the store at {address} is gone: island 0 has ended; start all islands again") from error
    finally:
        with contextlib.suppress(RuntimeError):
            base.add("done", 1)
            base.add(f"done/{island}", 1)
            if is_host and not base.check([f"complete/{place}"]):  # own ranks are waited for before they have come
                linger(lambda: base.add("done", 0) >= base.add("came", 0) and base.add("done/0", 0) >= visit.ranks)
    return Meeting(PrefixStore(f"place/{place}", base), is_host)


def linger(is_over: Callable[[], bool]) -> None:
    """Keeps the store for those who have yet to read in it, but not for long."""
    deadline = time.monotonic() + LINGER_SECONDS
    while not is_over() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def check_address(address: object) -> tuple[str, int]:
    """Host and port.

    >>> check_address("10.8.0.1:29500"), check_address("[::1]:29500")
    (('10.8.0.1', 29500), ('::1', 29500))
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f'address={address!r} must be "HOST:PORT", such as "10.8.0.1:29500": where island 0 listens')
    return host, int(port)


def _ranks_of_island(island: int, deadline: float) -> list[int]:
    """The ranks of the default group that are of this island; empty without a default group."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    everybody = range(dist.get_world_size())
    store = private_store("connect", everybody)
    store.set(str(dist.get_rank()), str(island))
    while missing := [rank for rank in everybody if not store.check([str(rank)])]:
        if time.monotonic() > deadline:
            raise LostPeerError(f"ranks {missing} of the default group have not called TorchWorld.connect: all must")
        time.sleep(POLL_SECONDS)
    return [rank for rank in everybody if store.get(str(rank)) == str(island).encode()]


def _host(host: str, port: int) -> Store:
    _resolve(host, port)
    try:
        return TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(
            f"port {port} of this machine is in use, by another run or another program: give all islands another one "
            "(or another number, if this is not island 0)"
        ) from None


def _join(host: str, port: int, place: int, island: int, deadline: float) -> Store:
    """Connects to island 0's store, once there is one that is not complete."""
    why = "nothing listens there"
    while True:
        left = deadline - time.monotonic()
        try:  # TCPStore itself prints a page for every attempt that fails
            with socket.create_connection((host, port), timeout=max(POLL_SECONDS, left)):
                pass
            store = TCPStore(host, port, wait_for_workers=False, timeout=datetime.timedelta(seconds=max(1.0, left)))
            if not store.check([f"complete/{place}"]):
                return store
            why = "a run that has all its islands is there"
        except socket.gaierror:
            _resolve(host, port)
        except (OSError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
        if time.monotonic() > deadline:
            raise LostPeerError(
                f"island {island} cannot meet island 0 at {host}:{port} ({why}): start island 0, and see whether its "
                f"machine can be reached (nc -vz {host} {port})"
            )
        time.sleep(POLL_SECONDS)


def _resolve(host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port)
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"the host {host!r} is unknown here: give the name or address of island 0's machine") from None


@dataclass
class _Visit:
    """This rank among those at the same place of all islands."""

    store: Any
    address: str
    island: int
    islands: int
    place: int
    ranks: int

    def announce(self) -> None:
        self.store.add("came", 1)
        if self.store.add(f"taken/{self.place}/{self.island}", 1) > 1:
            raise ValueError(
                f"an island {self.island} has come to {self.address} already: give every island a number of its own "
                "(if that one has ended, start all islands again)"
            )
        note = {"islands": self.islands, "ranks": self.ranks}
        self.store.set(f"here/{self.place}/{self.island}", json.dumps(note))

    def wait_for_all(self, deadline: float) -> None:
        """Raises MismatchError as soon as a note differs, and LostPeerError that names who has not come."""
        compared: set[tuple[int, int]] = set()
        wanted = {(place, other) for other in range(self.islands) for place in (0, self.place)}
        while True:
            for place, other in sorted(wanted - compared):
                if self.store.check([f"here/{place}/{other}"]):
                    self._compare(other, json.loads(self.store.get(f"here/{place}/{other}")))
                    compared.add((place, other))
            if compared == wanted:
                return
            if time.monotonic() > deadline:
                missing = sorted({other for _, other in wanted - compared})
                which = f"island{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                raise LostPeerError(
                    f"{which} of {self.islands} did not come to {self.address} in time: start all islands, with the "
                    "same address and islands="
                )
            time.sleep(POLL_SECONDS)

    def _compare(self, other: int, note: dict[str, int]) -> None:
        for what, own in (("islands", self.islands), ("ranks", self.ranks)):
            if note[what] != own:
                said = f"islands={own}" if what == "islands" else f"{own} ranks"
                theirs = f"islands={note[what]}" if what == "islands" else f"{note[what]} ranks"
                raise MismatchError(
                    f"island {self.island} has {said}, island {other} has {theirs}: start all islands in the same way"
                )
