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
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from isles.core.device import Upload, pinned, sides_of
from isles.core.encoding import Encoder, add_decoded, decoded
from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.offload import Offload
from isles.core.outer import MakeOptimizer, OuterSGD, TorchOuter, mix, move_along
from isles.core.recovery import Recovery, say
from isles.core.replica import Replica
from isles.core.schedule import Due
from isles.core.state import OuterState, Sent, load_outer_state, outer_memory, save_outer_state
from isles.core.stats import Event, Kind, Stats, phase
from isles.wire.codecs import codecs
from isles.wire.world import ElasticWorld, Handle, Mean, Missed, Payload, Snapshot, World, is_elastic

OUTER = ("anchor", "velocity")
"""What an outer step changes."""
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
        self._sgd = OuterSGD.of(method)
        states = [self._new_state(fragment, make_outer is None) for fragment in self.fragments]
        self._sides = sides_of([state.anchor.device for state in states])
        self.offload = Offload(states, outer_device, self._sides)
        self._encoder = Encoder(self.codec, keep=method.update == "eager")
        self._recovery = Recovery(replica, self.offload, self._sides)
        self.torch_outer = TorchOuter(make_outer, [state.anchor for state in states]) if make_outer else None
        on_host = all(state.anchor.is_cpu for state in states)
        self._steps_in_background = on_host and method.update == "fresh" and method.overlap > 0 and make_outer is None
        self.looks_ahead = self.offload.in_use or any(side.asynchronous for side in self._sides)
        """Whether something is to be copied to the device one step before it is needed."""
        if self.looks_ahead and any(side.asynchronous for side in self._sides):
            self._sgd.room = lambda numel, device: pinned(numel, torch.float32)
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
        fragment, side, feedback = self.fragments[due.fragment], self._sides[due.fragment], self._feedback
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
        sent.steps_aside = self._steps_in_background and ordinary
        body = self._recovery.watch(due, sent, encoding) if late else encoding.body
        self._start(due, sent, weight, None if sits_out else body)
        state.rounds[due.round], state.sent_step, self._uncounted[due.fragment] = sent, self.step, 0
        self._count_send(due, sent, time.perf_counter() - begin)

    def _start(self, due: Due, sent: Sent, weight: float, body: Tensor | Callable[[], Tensor | None] | None) -> None:
        """Hands a payload to the world."""
        index, on_device = due.fragment, self._sides[due.fragment].asynchronous
        then = functools.partial(self._arrive, due, sent) if sent.steps_aside or on_device else None
        where = (index, due.round, self.codec, self.fragments[index].numel)
        sent.payload = Payload(*where, weight, body, self.step, sent.steps, sent.closing, then=then)
        if sent.steps_aside:
            self.offload.write(index)  # another thread reads it where it is kept
        sent.handle = self._world.start(sent.payload)

    @property
    def _feedback(self) -> tuple[str, ...]:
        """What error feedback keeps."""
        return ("residual",) if self._method.error_feedback else ()

    def _in_flight(self, index: int, closing: bool) -> Tensor | None:
        """In a closing round a fragment whose last round is still in flight leaves out what that one contains."""
        rounds = list(self.offload.peek(index).rounds.values())
        return -self._own(index, rounds[0]) if rounds and closing and self._method.update == "fresh" else None

    def _own(self, index: int, sent: Sent) -> Tensor:
        """An outer gradient of this island, as the others got it, where the fragment is."""
        if not self._sides[index].asynchronous:
            return sent.decoded(self.offload.states[index].anchor.device)
        return decoded(sent.payload.codec, self._own_payload(index, sent), sent.payload.numel)

    def _own_payload(self, index: int, sent: Sent) -> Tensor:
        """The payload of an outer gradient of this island, on the device of the fragment."""
        if sent.here is None:
            return Upload(self._sides[index], sent.payload.body).result()
        self._sides[index].hold(sent.ready, sent.here)
        return sent.here

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
            self.offload.prefetch(due.fragment, self._feedback)
        for due in applies:
            sent = self.offload.peek(due.fragment).rounds.get(due.round)
            if sent is None or not (sent.steps_aside and hasattr(sent.handle, "arrived")):
                self.offload.prefetch(due.fragment)
            if sent is not None:
                sent.is_next = True  # before the look at `upload`: `_arrive` does it the other way round
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
        if not self._outer_step(due, sent, mean, fresh, alpha):
            with phase("isles.mix"):
                mix(self.fragments[due.fragment], self.offload.take(due.fragment, ()).anchor, alpha)
        if fresh is not None and self.offload.in_use:
            fresh.here = None
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

    def _outer_step(
        self, due: Due, sent: Sent | None, mean: Mean | None, fresh: Sent | None = None, alpha: float | None = None
    ) -> bool:
        """anchor = OuterOpt(anchor, Delta), where Delta is the mean of the round that is due.

        With eager updates, Delta = mean + share * own fresh contribution - share * own contribution in the mean. Given
        alpha, theta may be mixed in the same pass over memory: returns whether it was.
        """
        if sent is not None and sent.stepped is not None and not (mean and mean.missed):
            self._sgd.give_back(*self.offload.replace(due.fragment, sent.stepped, sent.upload))
            self.offload.peek(due.fragment).outer_steps = due.round
            return False
        state = self.offload.take(due.fragment, OUTER, changing=OUTER)
        method, closing = self._method, mean is not None and mean.closing
        dense = mean is not None and 0 < due.round <= method.dense_rounds
        late = 0 if dense or method.update == "fresh" else method.delay_rounds
        delta = self._mean_here(due.fragment, sent, mean) if mean is not None and mean.weights else None
        with phase("isles.outer_step"):
            if method.update == "eager" and not closing and not dense:
                delta = self._refreshed(due.fragment, delta, fresh, sent)
            if delta is None:
                return False
            averaged = dense or (closing and state.outer_steps <= method.dense_rounds)
            if not closing:
                state.outer_steps = due.round + late
            if averaged:
                state.anchor.sub_(delta)
            elif self.torch_outer is not None:
                self.offload.step_at_home(due.fragment, self.torch_outer.update, delta)
            else:
                step = (state.anchor, delta, state.velocity, *method.outer_at(state.outer_steps))
                if alpha is not None and self._sgd.update_and_mix(*step, self.fragments[due.fragment], alpha):
                    return True
                self._sgd.update(*step)
        return False

    def _mean_here(self, index: int, sent: Sent | None, mean: Mean) -> Tensor:
        """The mean of a round, on the device of its fragment."""
        upload = None if sent is None or sent.stepped is not None else sent.upload
        return (upload or Upload(self._sides[index], mean.values)).result()

    def _refreshed(self, index: int, mean: Tensor | None, fresh: Sent | None, stale: Sent | None) -> Tensor | None:
        """mean + share * fresh - share * stale, where there are such."""
        for own, sign in ((fresh, 1.0), (stale, -1.0)):
            if own is None:
                continue
            share, codec = sign * own.share, own.payload.codec
            if mean is None:
                mean = self._own(index, own).mul_(share)
            elif self._sides[index].asynchronous:
                add_decoded(codec, self._own_payload(index, own), mean, share)
            else:
                codec.accumulate(own.payload.body, mean, share)
        return mean

    def _arrive(self, due: Due, sent: Sent, mean: Mean) -> None:
        """In the background, as soon as a mean has arrived: takes the outer step, or gets the mean ready for a device.

        The step takes effect when it is due. Nothing reads an anchor between the step at which its fragment is sent and
        the one at which the result is applied, but for whoever looks at the global model, and that must not change
        before its time: so it goes to other memory.
        """
        if not mean.weights:
            return
        side, values = self._sides[due.fragment], mean.values
        if sent.steps_aside:
            state, settings = self.offload.at_home(due.fragment), self._method.outer_at(due.round)
            sent.stepped = self._sgd.update_aside(state.anchor, values, state.velocity, *settings)
            values = sent.stepped[0]
        if side.asynchronous:
            sent.upload = Upload(side, values)
            if sent.is_next:
                sent.upload.start()

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
        state, fragment = self.offload.take(due.fragment, ()), self.fragments[due.fragment]
        old = state.anchor.clone()
        if not mean.superseded:
            self._outer_step(due, None, mean)
        new = self.offload.take(due.fragment, ()).anchor
        if self._method.update == "delayed" and state.sent_step == self.step and state.rounds:
            mix(fragment, new, self._method.mixing)
        else:
            move_along(fragment, old, new)

    def _put_back(self, index: int, sent: Sent) -> None:
        """What was sent and not counted is this island's again."""
        if self._closing:
            self._excluded.append((index, sent))
            return
        feedback, fragment = self._feedback, self.fragments[index]
        state = self.offload.take(index, feedback, changing=feedback, aside=True)
        self._uncounted[index] += sent.steps
        if state.residual is not None and sent.residual is not None:
            with self._sides[index].follow():
                state.residual.copy_(sent.residual)
        if self._method.update == "delayed" and sent.payload.weight:
            left = self._own(index, sent).mul_(1 - self._method.mixing)
            fragment.write(fragment.read().sub_(left))

    def _load(self, snapshot: Snapshot) -> None:
        """A snapshot takes the place of all rounds up to it. Steps that it counts leave theta, others stay there."""
        for index, saved in enumerate(snapshot.fragments):
            state, fragment = self.offload.take(index, OUTER, changing=OUTER), self.fragments[index]
            old = state.anchor.clone()
            load_outer_state(state, saved)
            if self.torch_outer:
                self.torch_outer.load_state(index, outer_memory(saved))
            move_along(fragment, old, state.anchor)
            for number in [round for place, round in snapshot.counted if place == index]:
                sent = state.rounds.pop(number)
                if self._method.update == "fresh" and sent.payload.weight:
                    fragment.write(fragment.read().add_(self._own(index, sent)))
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
        return self.step - self.offload.peek(index).sent_step + self._uncounted[index]

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
            fragment.write(fragment.read().sub_(self._own(index, sent)))
            self._uncounted[index] += sent.steps
        self._closing, self._excluded = False, []

    def _close_round(self, due: Due) -> None:
        """The outer step of a round, and nothing else: nothing is trained any more."""
        rounds = self.offload.peek(due.fragment).rounds
        sent = rounds[due.round]
        mean = self._wait_for(sent.handle, due, closing=sent.closing)
        self.recover(sent)
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
