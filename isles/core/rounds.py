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

An island that the others left out of a round, or that has missed rounds, follows the global model:
theta + (anchor_new - anchor_old), so that what it has learned goes into its next outer gradient. What delayed updates
have taken out of theta when it was sent is put back.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.offload import Offload
from isles.core.outer import (
    MakeOptimizer,
    OuterSGD,
    TorchOuter,
    encoded_outer_gradient,
    mix,
    move_along,
    outer_gradient,
)
from isles.core.replica import Replica
from isles.core.schedule import Due
from isles.core.state import OuterState, Sent, load_outer_state, outer_memory, save_outer_state
from isles.core.stats import Event, Kind, Stats, phase
from isles.wire.codecs import codecs
from isles.wire.packing import is_finite
from isles.wire.world import ElasticWorld, Handle, Mean, Missed, Payload, Snapshot, World, is_elastic

logger = logging.getLogger("isles")
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
        self.fragments, self._replica, self._island = replica.fragments, replica, replica.island
        self._method, self._world, self._weight, self.stats, self._on_event = method, world, weight, stats, on_event
        self._elastic = world if is_elastic(world) else None
        codec = dataclasses.replace(codecs[method.codec], stochastic=method.rounding == "stochastic")
        self.codec = codec.contracting() if method.error_feedback else codec
        self._sgd = OuterSGD.of(method)
        states = [self._new_state(fragment, make_outer is None) for fragment in self.fragments]
        self.offload = Offload(states, outer_device)
        self.torch_outer = TorchOuter(make_outer, [state.anchor for state in states]) if make_outer else None
        on_cpu = outer_device is None and all(state.anchor.is_cpu for state in states)
        self._steps_in_background = on_cpu and method.update == "fresh" and method.overlap > 0 and make_outer is None
        self.total_weight = weight
        """Of those who took part in the last round."""
        self.step = 0
        """How many the island has taken, for messages and events."""
        self._uncounted = [0] * len(states)
        """Steps that were sent in a round without this island, by fragment: they are in its next outer gradient."""
        self._closing, self._excluded = False, list[tuple[int, Sent]]()
        """At the end, where islands come and go: what was sent and not counted."""

    def _new_state(self, fragment: Fragment, has_velocity: bool) -> OuterState:
        anchor = fragment.read()
        residual = torch.zeros_like(anchor) if self._method.error_feedback else None
        return OuterState(anchor, self._sgd.init(anchor) if has_velocity else None, residual)

    def anchors(self) -> list[Tensor]:
        return [state.anchor for state in self.offload.settle()]

    # ---- send

    def send(self, due: Due, *, closing: bool = False) -> None:
        """Starts the mean of a fragment's outer gradients over the islands."""
        if self._elastic and not self._elastic.wants(due.fragment, due.round):
            return
        begin = time.perf_counter()
        self._replica.check_trainable(self.step, self._method.sync_every)
        fragment, eager = self.fragments[due.fragment], self._method.update == "eager"
        state = self.offload.take(due.fragment, changing=("residual",))
        delta, finite = self._outer_gradient(fragment, state, closing)
        if self._island.any([not finite])[0]:
            self._recover(due)
            if state.residual is not None:
                state.residual.zero_()
        elif due.fragment == 0:
            self._replica.remember_buffers()
        sits_out, state.was_reset = state.was_reset, False
        steps = 0 if sits_out else self._unsent_steps(due.fragment)
        weight = 0.0 if sits_out or (closing and not steps) else self._weight
        if sits_out:
            delta = torch.zeros_like(state.anchor)
            self.stats.nonfinite_rounds += 1
            self.tell("nonfinite", due)
        encoded: Tensor | Callable[[], Tensor] = delta
        if delta.dtype is not torch.uint8:
            here = eager or state.residual is not None or not delta.is_cpu
            encoded = self._encode(delta) if here else functools.partial(self._encode, delta)
        ordinary = not closing and due.round > self._method.dense_rounds
        sent = Sent(weight / self.total_weight if eager and ordinary else 0.0, closing, steps)
        in_background = self._steps_in_background and ordinary
        then = functools.partial(self._step_aside, state, sent, due.round) if in_background else None
        where = (due.fragment, due.round, self.codec, fragment.numel)
        sent.payload = Payload(*where, weight, encoded, self.step, steps, closing, then=then)
        if state.residual is not None and not sits_out:
            sent.residual = state.residual.clone() if self._elastic else None
            torch.sub(delta, sent.decoded(delta.device), out=state.residual)
        sent.handle = self._world.start(sent.payload)
        state.rounds[due.round], state.sent_step, self._uncounted[due.fragment] = sent, self.step, 0
        self._count_send(due, sent, time.perf_counter() - begin)

    def _outer_gradient(self, fragment: Fragment, state: OuterState, closing: bool) -> tuple[Tensor, bool]:
        """Delta_m, encoded already where both are one pass over memory; and whether it is finite.

        In a closing round a fragment whose last round is still in flight leaves out what that one contains.
        """
        in_flight = list(state.rounds.values()) if closing and self._method.update == "fresh" else []
        with phase("isles.outer_gradient"):
            if in_flight:
                return outer_gradient(state.anchor, fragment, -in_flight[0].decoded(state.anchor.device))
            if state.residual is None:
                with phase("isles.encode"):
                    encoded = encoded_outer_gradient(state.anchor, fragment, self.codec)
                if encoded is not None:
                    return encoded
            return outer_gradient(state.anchor, fragment, state.residual)

    def _encode(self, delta: Tensor) -> Tensor:
        """The payload of Delta_m."""
        with phase("isles.encode"):
            return self.codec.encode(delta).cpu()

    def _recover(self, due: Due) -> None:
        """Weights that are not finite go back to the global values, and their rounds do not count.

        All fragments at once, not only the one that is due: weights that are left at NaN would spoil the others again
        in the next forward pass.
        """
        logger.warning(
            "island %d: the outer gradient of fragment %d is not finite at step %d; what is not finite goes back to "
            "the global weights, and the island sits out those rounds",
            self._world.rank,
            due.fragment,
            self.step,
        )
        for index, fragment in enumerate(self.fragments):
            if index == due.fragment or self._island.any([not is_finite(fragment.read())])[0]:
                state = self.offload.take(index)
                fragment.write(state.anchor)
                state.was_reset = True
        self._replica.heal()

    # ---- apply

    def apply(self, due: Due) -> None:
        """Waits for a round, takes the outer step with it, and mixes the result with the island's weights."""
        state, method = self.offload.take(due.fragment), self._method
        sent = state.rounds.get(due.round)
        dense = sent is not None and 0 < due.round <= method.dense_rounds
        fresh = state.rounds[due.round + method.delay_rounds] if method.update == "eager" and not dense else None
        if self._elastic and sent is None:
            self._catch_up(due, self._wait_for(self._elastic.watch(due.fragment, due.round), due))
            return
        mean = None if sent is None else self._wait_for(sent.handle, due)
        state.rounds.pop(due.round, None)
        if mean is not None and not mean.included:
            self._catch_up(due, mean, sent)
            return
        self._outer_step(due, sent, mean, fresh)
        with phase("isles.mix"):
            alpha = 0.0 if dense else method.mixing
            mix(self.fragments[due.fragment], self.offload.take(due.fragment).anchor, alpha)
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

    def _outer_step(self, due: Due, sent: Sent | None, mean: Mean | None, fresh: Sent | None = None) -> None:
        """anchor = OuterOpt(anchor, Delta), where Delta is the mean of the round that is due.

        With eager updates, Delta = mean + share * own fresh contribution - share * own contribution in the mean.
        """
        state = self.offload.take(due.fragment, changing=("anchor", "velocity"))
        if sent is not None and sent.stepped is not None and not (mean and mean.missed):
            self._sgd.give_back(state.anchor, state.velocity)
            state.anchor, state.velocity = sent.stepped
            state.outer_steps = due.round
            return
        method, closing = self._method, mean is not None and mean.closing
        dense = mean is not None and 0 < due.round <= method.dense_rounds
        late = 0 if dense or method.update == "fresh" else method.delay_rounds
        delta = mean.values.to(state.anchor.device) if mean is not None and mean.weights else None
        with phase("isles.outer_step"):
            if method.update == "eager" and not closing and not dense:
                delta = self._refreshed(delta, fresh, sent, state.anchor)
            if delta is None:
                return
            averaged = dense or (closing and state.outer_steps <= method.dense_rounds)
            if not closing:
                state.outer_steps = due.round + late
            if averaged:
                state.anchor.sub_(delta)
            elif self.torch_outer is None:
                self._sgd.update(state.anchor, delta, state.velocity, *method.outer_at(state.outer_steps))
            else:
                self.offload.step_at_home(due.fragment, self.torch_outer.update, delta)

    def _refreshed(self, mean: Tensor | None, fresh: Sent | None, stale: Sent | None, anchor: Tensor) -> Tensor | None:
        """mean + share * fresh - share * stale, where there are such."""
        for own, sign in ((fresh, 1.0), (stale, -1.0)):
            if own is not None and mean is None:
                mean = own.decoded(anchor.device).mul_(sign * own.share)
            elif own is not None and mean is not None:
                own.payload.codec.accumulate(own.payload.body.to(anchor.device), mean, sign * own.share)
        return mean

    def _step_aside(self, state: OuterState, sent: Sent, number: int, mean: Mean) -> None:
        """Takes the outer step in the background, as soon as the mean has arrived; it takes effect when it is due.

        Nothing reads an anchor between the step at which its fragment is sent and the one at which the result is
        applied, but for whoever looks at the global model, and that must not change before its time: so it goes to
        other memory.
        """
        if mean.weights:
            settings = self._method.outer_at(number)
            sent.stepped = self._sgd.update_aside(state.anchor, mean.values, state.velocity, *settings)

    # ---- rounds without this island

    def _catch_up(self, due: Due, mean: Mean, sent: Sent | None = None) -> None:
        """A round that this island sent nothing to, or that the others completed without what it had sent."""
        self._follow(due, mean)
        if mean.superseded:
            return
        if sent is not None:
            self._put_back(due.fragment, sent)
            self.stats.excluded_rounds += 1
        else:
            self.stats.catch_up_rounds += 1
        self.tell("catch_up" if sent is None else "excluded", due, late_seconds=mean.late_seconds)
        if self._elastic:
            self._has_applied(due)

    def apply_missed(self, missed: Missed) -> None:
        """What the others did without this island."""
        if isinstance(missed, Snapshot):
            self._load(missed)
        else:
            self._catch_up(Due(missed.fragment, missed.round), missed.mean)

    def _follow(self, due: Due, mean: Mean) -> None:
        """An outer step that this island had no part in. With delayed updates theta gives up what it has just sent."""
        state, fragment = self.offload.take(due.fragment), self.fragments[due.fragment]
        old = state.anchor.clone()
        if not mean.superseded:
            self._outer_step(due, None, mean)
        new = self.offload.take(due.fragment).anchor
        if self._method.update == "delayed" and state.sent_step == self.step and state.rounds:
            mix(fragment, new, self._method.mixing)
        else:
            move_along(fragment, old, new)

    def _put_back(self, index: int, sent: Sent) -> None:
        """What was sent and not counted is this island's again."""
        if self._closing:
            self._excluded.append((index, sent))
            return
        state, fragment = self.offload.take(index, changing=("residual",)), self.fragments[index]
        self._uncounted[index] += sent.steps
        if state.residual is not None and sent.residual is not None:
            state.residual.copy_(sent.residual)
        if self._method.update == "delayed" and sent.payload.weight:
            left = sent.decoded(state.anchor.device).mul_(1 - self._method.mixing)
            fragment.write(fragment.read().sub_(left))

    def _load(self, snapshot: Snapshot) -> None:
        """A snapshot takes the place of all rounds up to it. Steps that it counts leave theta, others stay there."""
        for index, saved in enumerate(snapshot.fragments):
            state, fragment = self.offload.take(index, changing=("anchor", "velocity")), self.fragments[index]
            old = state.anchor.clone()
            load_outer_state(state, saved)
            if self.torch_outer:
                self.torch_outer.load_state(index, outer_memory(saved))
            move_along(fragment, old, state.anchor)
            for number in [round for place, round in snapshot.counted if place == index]:
                sent = state.rounds.pop(number)
                if self._method.update == "fresh" and sent.payload.weight:
                    fragment.write(fragment.read().add_(sent.decoded(old.device)))
            for number in [round for place, round in snapshot.dropped if place == index]:
                self._put_back(index, state.rounds.pop(number))

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
        return self.step - self.offload.take(index).sent_step + self._uncounted[index]

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
        self._closing = True
        rounds = [Due(index, number) for index, state in enumerate(self.offload.settle()) for number in state.rounds]
        for due in sorted(rounds, key=lambda due: world.order(*due)):
            if due.round in self.offload.states[due.fragment].rounds:  # else a snapshot has taken its place
                self._close_round(due)
        for fragment, state in zip(self.fragments, self.offload.settle(), strict=True):
            fragment.write(state.anchor)
        for index, sent in self._excluded:
            fragment = self.fragments[index]
            fragment.write(fragment.read().sub_(sent.decoded(self.offload.states[index].anchor.device)))
            self._uncounted[index] += sent.steps
        self._closing, self._excluded = False, []

    def _close_round(self, due: Due) -> None:
        """The outer step of a round, and nothing else: nothing is trained any more."""
        rounds = self.offload.take(due.fragment).rounds
        sent = rounds[due.round]
        mean = self._wait_for(sent.handle, due, closing=sent.closing)
        rounds.pop(due.round, None)
        if not mean.superseded:
            self._outer_step(due, sent if mean.included else None, mean)
            if not mean.included and sent.payload.weight:
                self._put_back(due.fragment, sent)
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
