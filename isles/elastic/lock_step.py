"""Islands of several ranks in a store: one rank reads and writes, all of them decide alike.

The ranks of an island (FSDP2, DDP, tensor parallelism) train one replica in lock step, so they make the same calls in
the same order. The first rank, the *root*, is the island's member of the run. At every call it does what an island of
one rank does, and tells the others over the island's fast links what came of it: the clock, the rounds that were
decided, or the error. So an island is in a round with all its ranks or not at all.

    up      what a rank sends, encoded, and its part of a snapshot. The root makes one payload of them (`layout`).
    down    of every payload in a sealed round, the part of this rank. Each rank averages its own.
    told    what came of a call: a small message, in the training loop (`ranks`).

Up and down go on beside the training loop, as everything else does: in each rank one thread does all this, in order.
Nobody waits for a message that has not been announced, or that is not the answer to a call that all ranks make.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from isles.elastic.decisions import Apply, Load
from isles.elastic.documents import DamagedError
from isles.elastic.follower import Follower, drain, send_parts
from isles.elastic.layout import Layout, label, pack_fragments, unpack_state
from isles.elastic.numbering import Numbering
from isles.elastic.objects import Contribution, Manifest, digest
from isles.elastic.ranks import NOTHING, ROOT, News, Ranks
from isles.elastic.session import Session
from isles.wire.message import bytes_of, tensor_of
from isles.wire.world import Handle, Joining, Mean, MismatchError, Missed, Payload, Snapshot

R = TypeVar("R")


def join_as_ranks(joining: Joining, numbering: Numbering, make_session: Callable[..., Session]) -> Session | Follower:
    """The session of this rank of an island; all of them call this at the same time."""
    ranks = Ranks(joining.ranks)
    about = [joining.settings, joining.model, joining.numels]
    if ranks.rank != ROOT:
        try:
            ranks.send(tensor_of(json.dumps(about).encode()), ROOT)
            while ranks.hear()[0]:
                send_parts(ranks, [{"anchor": tensors["anchor"]} for tensors in joining.state()])
        except BaseException:
            ranks.close()
            raise
        return Follower(ranks, joining, numbering)

    def pack_start(state: list[dict[str, Tensor]]) -> dict[str, bytes]:
        ranks.tell(True, {})  # there is no run yet: every rank sends what it starts from
        return gather_parts(ranks, state)

    try:
        everybody = [about, *(json.loads(bytes_of(ranks.receive(rank))) for rank in ranks.others)]
        for rank, (settings, _, _) in enumerate(everybody):
            if settings != joining.settings:
                raise MismatchError(f"ranks 0 and {rank} of an island have different settings: start them alike")
        layout = Layout(
            joining.codec, [list(each) for each in zip(*(numels for _, _, numels in everybody), strict=True)]
        )
        model = json.dumps({f"rank {rank}": digest(text.encode()) for rank, (_, text, _) in enumerate(everybody)})
        whole = replace(joining, model=model)
        session = make_session(whole, numbering, layout, pack_start, functools.partial(Root, ranks))
    except BaseException as error:
        ranks.tell_error(error)
        ranks.close()
        raise
    ranks.tell(False, {})
    return session


def gather_parts(ranks: Ranks, state: list[dict[str, Tensor]]) -> dict[str, bytes]:
    """The parts of all ranks, by label, on the root."""
    parts = pack_fragments(state)
    for rank in ranks.others:
        parts |= {label(index, rank): bytes_of(ranks.receive(rank)) for index in range(len(state))}
    return parts


class Root(Session):
    """The first rank: an island of the run, that tells the other ranks."""

    def __init__(self, ranks: Ranks, *arguments: Any) -> None:
        self._ranks = ranks
        self._averages: deque[tuple[News, list[Tensor]]] = deque()
        """Rounds that are sealed and read: what the others are to be told of them, and each rank's part."""
        self._decisions: list[News] = []
        self._parts: list[list[Tensor]] = []
        """Of snapshots among them: for every fragment, the parts of the other ranks."""
        self._told: Any = None
        self._sending: Future[None] | None = None
        """The last message to another rank."""
        super().__init__(*arguments)

    def _tell(self, action: Callable[..., R], *arguments: Any, **more: Callable[[R], Any]) -> R:
        """Does something, and tells the other ranks what came of it."""
        try:
            answer = action(*arguments)
        except BaseException as error:
            self._ranks.tell_error(error)
            raise
        news: News = {name: told(answer) for name, told in more.items()}
        averages = [self._averages.popleft() for _ in range(len(self._averages))]
        if averages:
            news["averages"] = [about for about, _ in averages]
        if self._decisions:
            news["decisions"], self._decisions = self._decisions, []
        if (place := [self.number, list(self.members)]) != self._told:
            news["place"], self._told = [*place, self.clock], place
        self._ranks.tell(int(answer) if isinstance(answer, int) else 0, news)
        messages, self._parts = [*(parts for _, parts in averages), *self._parts], []
        for message in messages:
            for rank, data in zip(self._ranks.others, message, strict=True):
                self._sending = self._ranks.thread.do(self._ranks.send, data, rank)
        return answer

    # ---- the calls that all ranks make

    def join(self) -> Iterator[Missed]:
        missed = super().join()
        while (each := self._tell(next, missed, None)) is not None:
            yield each

    def reach(self, clock: int) -> int:
        return self._tell(super().reach, clock)

    def wants(self, number: int) -> bool:
        return self._tell(super().wants, number)

    def wait(self, number: int) -> Mean:
        return self._tell(super().wait, number)

    def last_rounds(self, fragments: Sequence[int]) -> list[tuple[int, int]]:
        return self._tell(super().last_rounds, fragments, rounds=list)

    def finish(self) -> None:
        self._tell(super().finish)

    def start(self, payload: Payload) -> Handle:
        whole = functools.partial(self._gather, payload)
        return super().start(replace(payload, numel=self.layout.numel(payload.fragment), encoded=whole))

    def leave(self) -> None:
        super().leave()
        drain(self._sending)  # the others may be behind
        self._ranks.close()

    # ---- decisions

    def _mean(self, decision: Apply) -> Mean:
        mean, place = super()._mean(decision), self.numbering.place(decision.number)
        what = {name: getattr(decision, name) for name in ("number", "included", "closing", "save", "sealed")}
        self._decisions.append({**what, "fragment": place.fragment, "round": place.round})
        return mean

    def _snapshot(self, decision: Load) -> Snapshot:
        snapshot = super()._snapshot(decision)
        self._decisions.append(
            {"snapshot": decision.manifest.round, "counted": snapshot.counted, "dropped": snapshot.dropped}
        )
        return snapshot

    def _unpack(self, manifest: Manifest) -> list[dict[str, Tensor]]:
        """The first rank's parts come first."""
        own, expected = len(self.layout.numels), len(self.layout.numels) * self._ranks.size
        if len(manifest.parts) != expected:
            raise DamagedError(f"snapshot {manifest.round} has {len(manifest.parts)} parts, not {expected}")
        kept = [self.driver.kept[part.name] for part in manifest.parts]
        self._parts += [[tensor_of(kept[rank * own + index]) for rank in self._ranks.others] for index in range(own)]
        return [unpack_state(kept[index], manifest.parts[index].name) for index in range(own)]

    # ---- beside the loop, in the codec's thread

    def _gather(self, payload: Payload) -> Tensor | None:
        """The body of the island's payload; None if, as all ranks know by now, it has nothing to contribute."""
        bodies, wanted = [payload.body], self.layout.num_bytes(payload.fragment)
        if not payload.weight:
            return None
        bodies += [self._ranks.receive(rank) for rank in self._ranks.others]
        whole = torch.cat(bodies)
        assert whole.numel() == wanted, f"{[body.numel() for body in bodies]} bytes, not {wanted}"
        return whole

    def _share_out(
        self,
        number: int,
        bodies: list[Tensor],
        weights: list[float],
        factors: list[float] | None,
        contributions: tuple[Contribution, ...],
    ) -> list[Tensor]:
        """The root's part of every body; the other ranks get theirs, of those that count."""
        fragment = self.numbering.place(number).fragment
        places = [self.layout.place(fragment, rank) for rank in range(self._ranks.size)]
        present = [index for index, weight in enumerate(weights) if weight > 0]
        islands = [contributions[index].island for index in present]
        average = {"number": number, "islands": islands, "weights": [weights[index] for index in present]}
        average["factors"] = None if factors is None else [factors[index] for index in present]
        counted = [bodies[index] for index in present]
        parts = [torch.cat([NOTHING, *(body[places[rank]] for body in counted)]) for rank in self._ranks.others]
        self._averages.append(({**average, "fragment": fragment, "own": self.number in islands}, parts))
        return [body[places[ROOT]] for body in bodies]

    def _pack(self, state: list[dict[str, Tensor]]) -> dict[str, bytes]:
        return gather_parts(self._ranks, state)
