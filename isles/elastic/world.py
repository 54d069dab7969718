"""`StoreWorld`: islands that come and go, joined by a bucket or a folder.

To the engine it is a world like the others: it starts a round with a payload and waits for the mean. What is behind it
is the log of sealed rounds (`isles.elastic.protocol`), moved along by threads beside the training loop
(`isles.elastic.driver`). An island that starts is given the newest snapshot and every round after it, so its anchors
are those of the others, bit for bit. One that was left out of a round is told so, and keeps what it has learned.

An island of several ranks (FSDP2, DDP, tensor parallelism) is one writer: its first rank does all this, for all of them
(`isles.elastic.lock_step`).

What happens between joining and leaving is in `isles.elastic.session`.
"""

from __future__ import annotations

import json
import math
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from isles.elastic.decisions import Settings
from isles.elastic.driver import Driver
from isles.elastic.layout import Layout, pack_fragments
from isles.elastic.numbering import Numbering
from isles.elastic.objects import RUN, Manifest, Part, Run, digest, part_name
from isles.elastic.protocol import Member
from isles.elastic.robust import limited
from isles.elastic.session import LEAST_PATIENCE, PayloadCheck, RoundHandle, Session
from isles.elastic.store import open_store, probe
from isles.wire.message import HEADER_BYTES, check_byte_order
from isles.wire.world import Handle, Joining, Missed, Payload

if TYPE_CHECKING:
    from isles.elastic.follower import Follower

PERIODS_BETWEEN_SNAPSHOTS = 16
"""A snapshot has about the bytes of so many periods in 4 bits, two of them per parameter being in fp32."""
ROUNDS_UNTIL_GONE = 8
"""For which an island that was missing is still looked for, besides those in flight."""
LOCAL_POLL, POLL = 0.01, 0.2
"""Seconds between two looks, where asking costs nothing and where it does."""
S = TypeVar("S", bound=Session)
Pack = Callable[[list[dict[str, Tensor]]], dict[str, bytes]]
"""From the state of all fragments to the parts of a snapshot, by label."""


class StoreWorld:
    """Islands that come and go, joined by the object store or folder behind `url`.

    `quorum` is the least number of islands in a round. `patience` is for how many seconds after its own send an island
    waits for others; None: chosen from the step and the overlap; math.inf: nobody is ever left out. `timeout` is how
    long, in seconds, a store may keep failing. `key` (or ISLES_STORE_KEY) is a secret that all islands share.
    `robust` bounds what one bad island can do (`isles.elastic.robust`); all islands of a run have it or none.
    `snapshot_every` is in rounds; None: 16 periods. With `observe` it reads the global model, which needs no rights to
    write, and takes no part. `options` go to obstore: endpoint, region, credentials. Every rank of an island makes one;
    only the first rank's is used.

    >>> world = StoreWorld("memory://doctest", patience=5.0)
    >>> world.size
    1
    """

    def __init__(
        self,
        url: str,
        *,
        quorum: int = 1,
        patience: float | None = None,
        timeout: float = 600.0,
        key: str | bytes | None = None,
        robust: bool = False,
        snapshot_every: int | None = None,
        observe: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(quorum, bool) or not isinstance(quorum, int) or quorum < 1:
            raise ValueError(f"quorum={quorum!r} must be a number of islands, at least 1")
        if patience is not None and not _is_number(patience, 0.0):
            raise ValueError(f"patience={patience!r} must be a number of seconds, math.inf or None")
        if not _is_number(timeout, 1e-9) or timeout == math.inf:
            raise ValueError(f"timeout={timeout!r} must be a number of seconds greater than 0")
        if snapshot_every is not None and (not isinstance(snapshot_every, int) or snapshot_every < 1):
            raise ValueError(f"snapshot_every={snapshot_every!r} must be a number of rounds, at least 1")
        check_byte_order()
        self.store = open_store(url, key, timeout, create=not observe, **options)
        if observe and self.store.get(RUN) is None:
            raise ValueError(f"there is no run in {self.store.url}")
        self._robust = bool(robust)
        self._observe = self._is_probed = observe
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            self._probe()  # else this may be one rank of many in an island: when they join, the first one does it
        self.url, self._patience, self._snapshot_every = self.store.url, patience, snapshot_every
        poll = LOCAL_POLL if self.store.is_local else POLL
        self._settings = Settings(
            quorum=quorum,
            patience=LEAST_PATIENCE if patience is None else patience,
            poll=poll,
            longest_poll=15 * poll,
            backoff=poll,
            timeout=timeout,
        )
        self._session: Session | Follower | None = None

    def _probe(self) -> None:
        if not self._is_probed:
            probe(self.store)
        self._is_probed = True

    @property
    def rank(self) -> int:
        """This island's number, from 0, in the order of joining."""
        return 0 if self._session is None else self._session.number or 0

    @property
    def size(self) -> int:
        """How many islands were in the last round."""
        return max(1, len(self.members))

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the islands that were in the last round."""
        return () if self._session is None else self._session.members

    @property
    def last_round(self) -> int:
        """How many rounds of the log are in the global model."""
        return max(0, self._joined.taken)

    @property
    def clock(self) -> int:
        """Where in the schedule this island is."""
        return self._joined.clock

    @property
    def log_clock(self) -> int:
        """Where in the schedule the global model is: an island that joins it starts there."""
        return self._joined.numbering.clock_after(self.last_round)

    @property
    def _joined(self) -> Session | Follower:
        if self._session is None:
            raise RuntimeError("this island has not joined its run: isles.DiLoCo does that")
        return self._session

    def join(self, joining: Joining) -> Iterator[Missed]:
        """Joins the run, or makes it."""
        if self._session is not None:
            raise ValueError("this StoreWorld has joined its run already: make a new one for every DiLoCo")
        numbering = Numbering(joining.schedule, joining.empty)
        if self._robust:
            joining = replace(joining, settings=json.dumps({**json.loads(joining.settings), "robust": True}))
        if joining.ranks:
            from isles.elastic.lock_step import join_as_ranks

            self._session = join_as_ranks(joining, numbering, self._make_session)
        else:
            self._session = self._make_session(joining, numbering, Layout.of_one(joining), pack_fragments, Session)
        yield from self._session.join()

    def _make_session(
        self, joining: Joining, numbering: Numbering, layout: Layout, pack: Pack, kind: Callable[..., S]
    ) -> S:
        """The session of an island, or of its first rank. `pack` is for the state that the run starts from."""
        self._probe()
        every = self._snapshot_every or PERIODS_BETWEEN_SNAPSHOTS * len(layout.numels)
        settings = replace(self._settings, snapshot_every=every, max_payload_bytes=HEADER_BYTES + layout.most_bytes)
        token = uuid.uuid4().hex
        parts: dict[str, bytes] = {}
        if self.store.get(RUN) is None:  # what this island starts from, should it make the run
            packed = pack([{"anchor": tensors["anchor"]} for tensors in joining.state()])
            parts = {part_name(0, name, digest(data)): data for name, data in packed.items()}
        start = Manifest(0, "", tuple(Part(name, len(data), digest(data)) for name, data in parts.items()))
        own = Run(token, joining.settings, joining.model, numbering.most_in_flight + ROUNDS_UNTIL_GONE, start)
        make = lambda now: Member(own, parts, numbering, settings, token, now, observe=self._observe)
        driver = Driver(self.store, make, PayloadCheck(layout, numbering))
        weakref.finalize(self, driver.stop)
        limit = limited if self._robust else None
        return kind(driver, joining, numbering, self._patience, limit, layout)

    def start(self, payload: Payload) -> Handle:
        """Starts a round with this payload."""
        return self._joined.start(payload)

    def gather(self, data: bytes) -> list[bytes]:
        """Islands that come and go have nobody to ask at once."""
        raise RuntimeError("a StoreWorld has no gather: its islands agree by reading the same log")

    def reach(self, clock: int) -> int:
        """The training loop has taken a step."""
        return self._joined.reach(clock)

    def wants(self, fragment: int, round: int) -> bool:
        """Whether a payload of this round may still count."""
        return self._joined.wants(self.order(fragment, round))

    def watch(self, fragment: int, round: int) -> Handle:
        """A round to which this island has sent nothing; there is none before the first."""
        return RoundHandle(self._joined, self.order(fragment, round) if round > 0 else 0)

    def applied(self, fragment: int, round: int) -> bool:
        """A round has been applied; writes a snapshot, if that is this island's turn."""
        return self._joined.applied(self.order(fragment, round))

    def order(self, fragment: int, round: int) -> int:
        """The place of a round in the log."""
        return self._joined.numbering.number(fragment, round)

    def last_rounds(self, fragments: Sequence[int]) -> list[tuple[int, int]]:
        """The rounds after the last one that was sent or sealed, until each of these fragments has had one."""
        return self._joined.last_rounds(fragments)

    def finish(self) -> None:
        """The last rounds have been sent, before their time."""
        self._joined.finish()

    def close(self, reason: str = "") -> None:
        """Leaves the run, and ends the threads."""
        if self._session is not None:
            self._session.leave()

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received besides payloads that were sent, since the last call."""
        return self._joined.traffic()


def _is_number(value: Any, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
