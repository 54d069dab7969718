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
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from isles.elastic.decisions import Apply, Load
from isles.elastic.layout import Layout, check_sizes, label, pack_fragments, unpack_state
from isles.elastic.numbering import Numbering
from isles.elastic.objects import Contribution, DamagedError, Manifest, digest
from isles.elastic.ranks import ROOT, News, Ranks
from isles.elastic.session import LEAVE_SECONDS, NOTHING, RoundHandle, Session
from isles.wire.message import bytes_of, tensor_of
from isles.wire.reduction import Gathered
from isles.wire.world import Handle, Joining, Mean, MismatchError, Missed, MissedRound, Payload, Snapshot

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


def send_parts(ranks: Ranks, state: list[dict[str, Tensor]]) -> None:
    """A rank's parts of a snapshot, to the root."""
    for data in pack_fragments(state).values():
        ranks.send(tensor_of(data), ROOT)


def gather_parts(ranks: Ranks, state: list[dict[str, Tensor]]) -> dict[str, bytes]:
    """The parts of all ranks, by label, on the root."""
    parts = pack_fragments(state)
    for rank in ranks.others:
        parts |= {label(index, rank): bytes_of(ranks.receive(rank)) for index in range(len(state))}
    return parts


def finish(sending: Future[None] | None) -> None:
    """Gives what is being sent the time to get there, before the connections are closed."""
    with suppress(Exception):
        if sending is not None:
            sending.result(LEAVE_SECONDS)


class Root(Session):
    """The first rank: an island of the run, that tells the other ranks."""

    def __init__(self, ranks: Ranks, *arguments: Any) -> None:
        self._ranks = ranks
        self._averages: deque[tuple[News, list[Tensor]]] = deque()
        """Rounds that are sealed and read: what the others are to be told of them, and each rank's part."""
        self._decisions: list[News] = []
        self._parts: list[list[bytes]] = []
        """Of snapshots among them: the parts of all other ranks."""
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
        sends: list[list[Tensor]] = []
        while self._averages:
            average, parts = self._averages.popleft()
            news.setdefault("averages", []).append(average)
            sends.append(parts)
        if self._decisions:
            news["decisions"], self._decisions = self._decisions, []
        if (place := [self.number, list(self.members)]) != self._told:
            news["place"], self._told = [*place, self.clock], place
        self._ranks.tell(int(answer) if isinstance(answer, int) else 0, news)
        for parts in sends:
            self._send(parts)
        for snapshot in self._parts:
            for data in zip(*[iter(snapshot)] * len(self._ranks.others), strict=True):
                self._send(list(map(tensor_of, data)))
        self._parts = []
        return answer

    def _send(self, messages: Sequence[Tensor]) -> None:
        """A message to every other rank, beside the loop."""
        for rank, message in zip(self._ranks.others, messages, strict=True):
            self._sending = self._ranks.thread.do(self._ranks.send, message, rank)

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
        finish(self._sending)  # the others may be behind
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
        self._parts.append([kept[rank * own + index] for index in range(own) for rank in self._ranks.others])
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
        cut = lambda place: [bodies[index][place] for index in present]
        parts = [torch.cat([NO_BYTES, *cut(places[rank])]) for rank in self._ranks.others]
        self._averages.append(({**average, "fragment": fragment, "own": self.number in islands}, parts))
        return [body[places[ROOT]] for body in bodies]

    def _pack(self, state: list[dict[str, Tensor]]) -> dict[str, bytes]:
        return gather_parts(self._ranks, state)


NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Follower:
    """Every other rank: the same calls as of a `Session`, answered by the root."""

    def __init__(self, ranks: Ranks, joining: Joining, numbering: Numbering) -> None:
        self.numbering = numbering
        self.number: int | None = None
        self.members: tuple[int, ...] = ()
        self.taken = self.clock = 0
        self._ranks, self._joining = ranks, joining
        self._sent: dict[int, Payload] = {}
        self._averages: dict[int, Future[Mean]] = {}
        self._decided: dict[int, News] = {}
        self.arrived: dict[int, float] = {}
        self._sending: Future[None] | None = None
        self._saving: Future[None] | None = None
        self._left = False

    def _hear(self) -> tuple[int, News]:
        """What the root says. Receiving what it announces is begun."""
        value, news = self._ranks.hear()
        for average in news.get("averages", ()):
            self._averages[average["number"]] = self._ranks.thread.do(self._average, average)
        for decision in news.get("decisions", ()):
            if "snapshot" in decision:
                decision["fragments"] = self._ranks.thread.do(self._receive_state)
        if "place" in news:
            self.number, members, self.clock = news["place"]
            self.members = tuple(members)
        return value, news

    # ---- the calls that all ranks make

    def join(self) -> Iterator[Missed]:
        while decisions := self._hear()[1].get("decisions"):
            yield from map(self._missed, decisions)

    def reach(self, clock: int) -> int:
        self._finish_sending()
        self.clock, _ = self._hear()
        return self.clock

    def wants(self, number: int) -> bool:
        return bool(self._hear()[0])

    def start(self, payload: Payload) -> Handle:
        number = self.numbering.number(payload.fragment, payload.round)
        self._sent[number] = payload
        if payload.weight:
            self._sending = self._ranks.thread.do(self._send, payload)
        return RoundHandle(self, number)  # what goes into the store is counted on the root

    def _send(self, payload: Payload) -> None:
        """Beside the loop: this rank's part of the island's payload."""
        body = payload.body
        if payload.weight:
            self._ranks.send(body, ROOT)

    def wait(self, number: int) -> Mean:
        _, news = self._hear()
        self._finish_sending()
        missed: list[Missed] = []
        for decision in news.get("decisions", ()):
            if decision.get("number") == number:
                return replace(self._mean(decision), missed=tuple(missed))
            missed.append(self._missed(decision))
        return Mean(NOTHING, {}, included=False, missed=tuple(missed), superseded=True)

    def applied(self, number: int) -> bool:
        decision = self._decided.pop(number, None)
        self._forget(number)
        if decision is not None and decision["save"]:
            state = self._joining.state()
            self._saving = self._ranks.thread.do(send_parts, self._ranks, state)
        return decision is not None and decision["sealed"]

    def last_rounds(self, fragments: Sequence[int]) -> list[tuple[int, int]]:
        return [(fragment, round) for fragment, round in self._hear()[1]["rounds"]]

    def finish(self) -> None:
        self._hear()

    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        finish(self._sending)
        finish(self._saving)
        self._ranks.close()

    def _finish_sending(self) -> None:
        """The last payload is made, and on its way."""
        if self._sending is not None:
            self._sending.result()  # raises what went wrong
            self._sending = None

    # ---- decisions

    def _missed(self, decision: News) -> Missed:
        if "snapshot" not in decision:
            return MissedRound(decision["fragment"], decision["round"], self._mean(decision))
        fragments = decision["fragments"].result()
        self.taken = decision["snapshot"]
        check_sizes(self.taken, fragments, self._joining.numels)
        self._forget(self.taken)
        counted, dropped = (tuple((f, k) for f, k in decision[name]) for name in ("counted", "dropped"))
        return Snapshot(fragments, counted, dropped)

    def _mean(self, decision: News) -> Mean:
        self.taken = decision["number"]
        self._decided[self.taken] = decision
        mean = self._averages.pop(self.taken).result()
        return replace(mean, included=decision["included"], closing=decision["closing"])

    def _forget(self, number: int) -> None:
        for known in (self._decided, self._sent, self._averages, self.arrived):
            for old in [each for each in known.copy() if each <= number]:
                del known[old]

    # ---- beside the loop

    def _average(self, average: News) -> Mean:
        """The mean of a round, of this rank's part; takes the outer step ahead of time where the island is in it."""
        number, weights, islands = average["number"], average["weights"], average["islands"]
        numel, codec, sent = self._joining.numels[average["fragment"]], self._joining.codec, self._sent.get(number)
        bodies = list(self._ranks.receive(ROOT).view(len(islands), codec.num_bytes(numel)))
        gathered = Gathered(bodies, weights, codec, numel, average["factors"])
        result = gathered.result(sent is not None and sent.gathers)
        mean = Mean(result, dict(zip(islands, weights, strict=True)))
        if average["own"] and sent is not None and sent.then is not None:
            sent.then(mean)
        self.arrived[number] = time.perf_counter()
        return mean

    def _receive_state(self) -> list[dict[str, Tensor]]:
        return [unpack_state(bytes_of(self._ranks.receive(ROOT)), "a part of a snapshot") for _ in self._joining.numels]
