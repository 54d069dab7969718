"""What an island does with its fragments: sends outer gradients, takes outer steps, applies results.

For one fragment, with `theta` the island's weights and `anchor` the last global value:

    send    Delta_m = anchor - theta                          start the mean over islands, do not wait
    apply   anchor  = OuterOpt(anchor, Delta)                 Delta: the mean that was started `lateness` steps ago
            theta   = alpha * theta + (1 - alpha) * anchor

What Delta is decides the method:

    fresh     the mean of this round, `overlap` inner steps after it was sent   (overlap 0, one fragment: DiLoCo)
    delayed   the mean of k rounds ago, zero while there is none
    eager     the same, with the island's own stale share replaced by its fresh one:
              Delta(t - kH) + share * (Delta_m(t) - Delta_m(t - kH)),  share = weight / sum of weights (1/M)

The anchor is the outer copy, never the mixed weights. With fresh and delayed updates it is the same on every island,
bit for bit; with eager updates every island has its own, and they agree once updates stop. Own contributions are taken
*as the others see them*, encoded and decoded, so that what an island adds early is exactly what it later takes back.
Outer arithmetic is fp32 on flat vectors, whatever the model's precision. Inner optimizer state stays local.

`isles.core.outer_steps` takes the outer step. An island that the others left out of a round, or that has missed rounds,
follows the global model: `isles.core.following`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from isles.core.device import sides_of
from isles.core.encoding import Encoder
from isles.core.following import Following
from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.offload import Offload
from isles.core.outer import MakeOptimizer, OuterSGD, TorchOuter, mix
from isles.core.outer_steps import OuterSteps
from isles.core.recovery import Recovery, say
from isles.core.replica import Replica
from isles.core.schedule import Due
from isles.core.state import OuterState, Sent, feedback_vectors, save_outer_state
from isles.core.stats import Event, Kind, Stats, phase
from isles.core.warm_up import warm_up
from isles.wire.codecs import codecs
from isles.wire.world import ElasticWorld, Handle, Mean, Missed, Payload, Snapshot, World, is_elastic

CLOSING = 0
"""The number of the round with which `close` ends. Rounds of the schedule have numbers from 1."""


class Rounds:
    """The rounds of all fragments of one island."""

    def __init__(
        self,
        replica: Replica,
        method: Method,
        world: World,
        weight: float,
        stats: Stats,
        on_event: Callable[[Event], None] | None,
        make_outer: MakeOptimizer | None,
        outer_device: torch.device | None,
    ) -> None:
        self.fragments, self._replica = replica.fragments, replica
        self._method, self._world, self._weight, self.stats, self._on_event = method, world, weight, stats, on_event
        self._elastic = world if is_elastic(world) else None
        codec = dataclasses.replace(codecs[method.codec], stochastic=method.rounding == "stochastic")
        self.codec = codec.contracting() if method.error_feedback else codec
        sgd = OuterSGD.of(method)
        states = [self._new_state(fragment, None if make_outer else sgd) for fragment in self.fragments]
        self._sides = sides_of([state.anchor.device for state in states])
        self.offload = Offload(states, outer_device, self._sides)
        self._encoder = Encoder(self.codec, keep=method.update == "eager")
        self._recovery = Recovery(replica, self.offload, self._sides)
        self.torch_outer = TorchOuter(make_outer, [state.anchor for state in states]) if make_outer else None
        where = (method, self.fragments, self.offload, self._sides)
        self._steps = OuterSteps(*where, sgd, self.torch_outer)
        self._following = Following(*where, self._steps, self.torch_outer)
        self.warm_up = functools.partial(warm_up, method, self.codec, *where[1:], None if make_outer else sgd)
        self.looks_ahead = self.offload.in_use or any(side.asynchronous for side in self._sides)
        """Whether something is to be copied to the device one step before it is needed."""
        self.total_weight = weight
        """Of those who took part in the last round."""
        self.step = 0
        """How many the island has taken, for messages and events."""

    def _new_state(self, fragment: Fragment, sgd: OuterSGD | None) -> OuterState:
        anchor = fragment.read()
        residual = torch.zeros_like(anchor) if self._method.error_feedback else None
        return OuterState(anchor, sgd.init(anchor) if sgd else None, residual)

    def anchors(self) -> list[Tensor]:
        return [state.anchor for state in self.offload.settle()]

    # ---- send

    def send(self, due: Due, *, closing: bool = False) -> None:
        """Starts the mean of a fragment's outer gradients over the islands."""
        if self._elastic and not self._elastic.wants(due.fragment, due.round):
            return
        begin = time.perf_counter()
        self._replica.check_trainable(self.step, self._method.sync_every)
        fragment, side = self.fragments[due.fragment], self._sides[due.fragment]
        feedback = feedback_vectors(self._method)
        state = self.offload.take(due.fragment, feedback, changing=feedback, aside=True)
        sent, late = Sent(closing=closing), self._recovery.is_late(due.fragment)
        if self._elastic and state.residual is not None and not state.was_reset:
            with side.follow():
                sent.residual = state.residual.clone()
        in_flight = self._in_flight(due.fragment, closing)
        encoding = self._encoder.encode(fragment, state, side, in_flight, feed_back=not state.was_reset)
        if not late and not encoding.finite:
            say(self._world.rank, due, self.step)
            self._recovery.reset([due.fragment], sits_out=True)
            if state.residual is not None:
                state.residual.zero_()
        elif due.fragment == 0:
            self._replica.remember_buffers()
        sits_out, state.was_reset = state.was_reset, False
        sent.steps = 0 if sits_out else self._unsent_steps(due.fragment)
        weight = 0.0 if sits_out or (closing and not sent.steps) else self._weight
        if sits_out:
            self._sit_out(due)
            sent.residual = None
        ordinary = not closing and due.round > self._method.dense_rounds
        sent.share = weight / self.total_weight if self._method.update == "eager" and ordinary else 0.0
        sent.here, sent.ready = encoding.here, encoding.ready
        sent.steps_aside = self._steps.in_background and ordinary
        body = self._recovery.watch(due, sent, encoding) if late else encoding.body
        self._start(due, sent, weight, None if sits_out else body)
        state.rounds[due.round], state.sent_step, self._following.uncounted[due.fragment] = sent, self.step, 0
        self._count_send(due, sent, time.perf_counter() - begin)

    def _start(self, due: Due, sent: Sent, weight: float, body: Tensor | Callable[[], Tensor | None] | None) -> None:
        """Hands a payload to the world."""
        index, on_device = due.fragment, self._sides[due.fragment].asynchronous
        then = functools.partial(self._steps.arrive, due, sent) if sent.steps_aside or on_device else None
        where = (index, due.round, self.codec, self.fragments[index].numel)
        gathers = self._steps.gathers(index, sent, self.codec)
        sent.payload = Payload(*where, weight, body, self.step, sent.steps, sent.closing, then=then, gathers=gathers)
        if sent.steps_aside:
            self.offload.write(index)  # another thread reads it where it is kept
        sent.handle = self._world.start(sent.payload)

    def _in_flight(self, index: int, closing: bool) -> Tensor | None:
        """In a closing round a fragment whose last round is still in flight leaves out what that one contains."""
        rounds = list(self.offload.peek(index).rounds.values())
        return -self._steps.own(index, rounds[0]) if rounds and closing and self._method.update == "fresh" else None

    def _sit_out(self, due: Due) -> None:
        """A round in which this island has weight zero."""
        self.stats.nonfinite_rounds += 1
        self.tell("nonfinite", due)

    def recover(self, waited_for: Sent | None = None) -> None:
        """Acts on outer gradients that were found not to be finite after they were sent."""
        found = self._recovery.found(waited_for)
        for due, _ in found:
            say(self._world.rank, due, self.step)
            self._sit_out(due)
        if found:
            self._recovery.act_on(found)

    def look_ahead(self, sends: Iterable[Due], applies: Iterable[Due]) -> None:
        """Ends a step: outer state is written back, and what the next step needs is on its way to the device."""
        self.offload.write_back()
        for due in sends:
            self.offload.prefetch(due.fragment, feedback_vectors(self._method))
        for due in applies:
            sent = self.offload.peek(due.fragment).rounds.get(due.round)
            if sent is None or not (sent.steps_aside and hasattr(sent.handle, "arrived")):
                self.offload.prefetch(due.fragment)
            if sent is not None:
                sent.is_next = True  # before the look at `upload`: `OuterSteps.arrive` does it the other way round
                if sent.upload is not None:
                    sent.upload.start()

    # ---- apply

    def apply(self, due: Due) -> None:
        """Waits for a round, takes the outer step with it, and mixes the result with the island's weights."""
        state, method = self.offload.peek(due.fragment), self._method
        sent = state.rounds.get(due.round)
        dense = sent is not None and 0 < due.round <= method.dense_rounds
        fresh = state.rounds[due.round + method.delay_rounds] if method.update == "eager" and not dense else None
        if self._elastic and sent is None:
            self._catch_up(due, self._wait_for(self._elastic.watch(due.fragment, due.round), due))
            return
        mean = None if sent is None else self._wait_for(sent.handle, due)
        self.recover(sent)
        state.rounds.pop(due.round, None)
        if sent is not None:
            sent.payload.then = None  # which refers to `sent`: its memory would wait for the garbage collector
        if mean is not None and not mean.included:
            self._catch_up(due, mean, sent)
            return
        alpha = 0.0 if dense else method.mixing
        if not self._steps.step(due, sent, mean, fresh, alpha):
            with phase("isles.mix"):
                mix(self.fragments[due.fragment], self.offload.take(due.fragment, ()).anchor, alpha)
        if fresh is not None and (self.offload.in_use or fresh.payload.gathers):
            fresh.here = None  # it comes back with those of the others
        if self._elastic:
            self._has_applied(due)

    def _wait_for(self, handle: Handle, due: Due, *, closing: bool = False) -> Mean:
        """The mean of a round; counts the time that is spent waiting for it. What was missed before it is applied."""
        begin = time.perf_counter()
        with phase("isles.wait"):
            mean = handle.wait()
        seconds = time.perf_counter() - begin
        if not (mean.superseded or closing):
            self.total_weight = mean.total_weight or self.total_weight
            self.stats.applies += 1
            self.stats.wait_seconds += seconds
            self.stats.islands = len(mean.weights)
            arrived = getattr(handle, "arrived", None)
            self.tell("apply", due, seconds=seconds, slack_seconds=None if arrived is None else begin - arrived)
        for missed in mean.missed:
            self.apply_missed(missed)
        return mean

    # ---- rounds without this island

    def _catch_up(self, due: Due, mean: Mean, sent: Sent | None = None) -> None:
        """A round that this island sent nothing to, or that the others completed without what it had sent."""
        self._following.follow(due, mean, self.step)
        if mean.superseded:
            return
        if sent is not None:
            self._following.put_back(due.fragment, sent)
            self.stats.excluded_rounds += 1
        else:
            self.stats.catch_up_rounds += 1
        self.tell("catch_up" if sent is None else "excluded", due, late_seconds=mean.late_seconds)
        if self._elastic:
            self._has_applied(due)

    def apply_missed(self, missed: Missed) -> None:
        """What the others did without this island."""
        if isinstance(missed, Snapshot):
            self._following.load(missed)
        else:
            self.stats.applies += 1
            self._catch_up(Due(missed.fragment, missed.round), missed.mean)

    def outer_state(self) -> list[dict[str, Tensor]]:
        """Copies of what islands share, by fragment: for a snapshot."""
        states = self.offload.settle()
        memory = [self.torch_outer.state_of(i) if self.torch_outer else {} for i in range(len(states))]
        return [save_outer_state(state, more) for state, more in zip(states, memory, strict=True)]

    def _has_applied(self, due: Due) -> None:
        assert self._elastic is not None
        if self._elastic.applied(due.fragment, due.round):
            self.tell("seal", due)
        sent, received = self._elastic.traffic()
        self.stats.bytes_sent += sent
        self.stats.bytes_received += received

    def _unsent(self) -> list[int]:
        """Fragments with steps that are in no payload."""
        return [i for i, fragment in enumerate(self.fragments) if not fragment.is_empty and self._unsent_steps(i)]

    def _unsent_steps(self, index: int) -> int:
        return self.step - self.offload.peek(index).sent_step + self._following.uncounted[index]

    # ---- at the end

    def close(self, catch_up: Callable[[], None]) -> None:
        """Sends what was learned since the last sends, and takes the outer steps of all rounds in flight, these last
        ones included. A fragment that has never had an outer step becomes the mean of the islands' weights instead: a
        first, short step would lose much of what was learned (docs/log.md, "The closing round").
        """
        if self._elastic:
            self._close_elastic(self._elastic, catch_up)
            return
        for index, state in enumerate(self.offload.settle()):
            if state.sent_step < self.step and not self.fragments[index].is_empty:
                self.send(Due(index, CLOSING), closing=True)
        for index, state in enumerate(self.offload.settle()):
            for number in list(state.rounds):
                self._close_round(Due(index, number))
            self.offload.write_back()

    def _close_elastic(self, world: ElasticWorld, catch_up: Callable[[], None]) -> None:
        """The same where islands come and go: what is left is sent to the next rounds of the log, before their time.
        Should others complete these without it, it goes to the rounds after them. `catch_up` goes to where they are.
        """
        while self._unsent():
            catch_up()
            for place in world.last_rounds(self._unsent()):
                self.send(Due(*place), closing=True)
            self._wait_for_all(world)
        self._wait_for_all(world)

    def _wait_for_all(self, world: ElasticWorld) -> None:
        """Takes the outer steps of all rounds in flight. Theta is then the anchor and what nobody has counted."""
        world.finish()
        self._following.ending = True
        rounds = [Due(index, number) for index, state in enumerate(self.offload.settle()) for number in state.rounds]
        for due in sorted(rounds, key=lambda due: world.order(*due)):
            if due.round in self.offload.states[due.fragment].rounds:  # else a snapshot has taken its place
                self._close_round(due)
        self._following.end()

    def _close_round(self, due: Due) -> None:
        """The outer step of a round, and nothing else: nothing is trained any more."""
        rounds = self.offload.peek(due.fragment).rounds
        sent = rounds[due.round]
        mean = self._wait_for(sent.handle, due, closing=sent.closing)
        self.recover(sent)
        rounds.pop(due.round, None)
        if not mean.superseded:
            self._steps.step(due, sent if mean.included else None, mean)
            if not mean.included and sent.payload.weight:
                self._following.put_back(due.fragment, sent)
            if self._elastic:
                self._has_applied(due)

    # ---- counting

    def _count_send(self, due: Due, sent: Sent, seconds: float) -> None:
        self.stats.bytes_sent += sent.handle.bytes_sent
        self.stats.bytes_received += sent.handle.bytes_received
        if not sent.closing:
            self.stats.sends += 1
            self.stats.payload_bytes += sent.payload.num_bytes
            self.stats.payload_parameters += sent.payload.numel
            self.tell("send", due, num_bytes=sent.handle.bytes_sent, seconds=seconds)

    def tell(self, kind: Kind, due: Due, **more: Any) -> None:
        """An event, for whoever watches."""
        if self._on_event is not None:
            self._on_event(Event(kind, self.step, due.fragment, due.round, **more))
