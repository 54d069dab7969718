"""The ranks of an island besides the first: the calls of a `Session`, answered by the root.

A follower hears what came of each call (`ranks`). It sends its part of the island's payload, and of a snapshot, to the
root, and gets its part of every payload in a sealed round, which it averages by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from isles.elastic.layout import check_sizes, pack_fragments, unpack_state
from isles.elastic.numbering import Numbering
from isles.elastic.ranks import ROOT, News, Ranks
from isles.elastic.session import LEAVE_SECONDS, NOTHING, RoundHandle, forget
from isles.wire.message import bytes_of, tensor_of
from isles.wire.reduction import Gathered
from isles.wire.world import Handle, Joining, Mean, Missed, MissedRound, Payload, Snapshot


def send_parts(ranks: Ranks, state: list[dict[str, Tensor]]) -> None:
    """A rank's parts of a snapshot, to the root."""
    for data in pack_fragments(state).values():
        ranks.send(tensor_of(data), ROOT)


def drain(sending: Future[None] | None) -> None:
    """Gives what is being sent the time to get there, before the connections are closed."""
    with suppress(Exception):
        if sending is not None:
            sending.result(LEAVE_SECONDS)


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
        self._sending: dict[int, Future[None]] = {}
        """Payloads that are being made and sent to the root, by round."""
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
        self.clock, _ = self._hear()
        return self.clock

    def wants(self, number: int) -> bool:
        return bool(self._hear()[0])

    def start(self, payload: Payload) -> Handle:
        number = self.numbering.number(payload.fragment, payload.round)
        self._sent[number] = payload
        if payload.weight:
            self._sending[number] = self._ranks.thread.do(self._send, payload)
        return RoundHandle(self, number)  # what goes into the store is counted on the root

    def _send(self, payload: Payload) -> None:
        """Beside the loop: this rank's part of the island's payload."""
        body = payload.body
        if payload.weight:
            self._ranks.send(body, ROOT)

    def wait(self, number: int) -> Mean:
        _, news = self._hear()
        self._made(number)
        missed: list[Missed] = []
        for decision in news.get("decisions", ()):
            if decision.get("number") == number:
                return replace(self._mean(decision), missed=tuple(missed))
            missed.append(self._missed(decision))
        return Mean(NOTHING, {}, included=False, missed=tuple(missed), superseded=True)

    def applied(self, number: int) -> bool:
        decision = self._decided.pop(number, None)
        forget(number, self._decided, self._sent, self._averages, self.arrived)
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
        for sending in (*self._sending.values(), self._saving):
            drain(sending)
        self._ranks.close()

    def _made(self, number: int) -> None:
        """Waits until the payloads of all rounds up to this one are made, and on their way. Raises what went wrong."""
        for sent in [k for k in self._sending if k <= number]:
            self._sending.pop(sent).result()

    # ---- decisions

    def _missed(self, decision: News) -> Missed:
        if "snapshot" not in decision:
            return MissedRound(decision["fragment"], decision["round"], self._mean(decision))
        fragments = decision["fragments"].result()
        self.taken = decision["snapshot"]
        self._made(self.taken)
        check_sizes(self.taken, fragments, self._joining.numels)
        forget(self.taken, self._decided, self._sent, self._averages, self.arrived)
        counted, dropped = (tuple((f, k) for f, k in decision[name]) for name in ("counted", "dropped"))
        return Snapshot(fragments, counted, dropped)

    def _mean(self, decision: News) -> Mean:
        self.taken = decision["number"]
        self._decided[self.taken] = decision
        mean = self._averages.pop(self.taken).result()
        return replace(mean, included=decision["included"], closing=decision["closing"])

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
