"""The engine: one class for DiLoCo, Streaming DiLoCo, delayed and eager updates.

Each island trains its own replica with an ordinary optimizer. After every inner step the schedule says which
fragments are sent and which results are applied. For one fragment, with `theta` the island's weights and
`anchor` the last global value:

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

At the end a closing round sends what no mean contains yet, so that the final model contains every step.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isles.core.arguments import (
    check_arguments,
    check_device,
    check_options,
    check_overlap,
    optimizers_in_use,
    unwrap_optimizer,
)
from isles.core.fragments import Fragment, cut, trainable_parameters
from isles.core.handshake import Handshake
from isles.core.island import Island, reshard
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
from isles.core.replica import Replica, host_copy
from isles.core.schedule import Due, Schedule
from isles.core.sharded import load_sharded, read_notes, save_sharded
from isles.core.state import VERSION, OuterState, Sent, check_saved, load_state, save_state
from isles.core.stats import Event, Kind, Stats, phase
from isles.wire.codecs import codecs
from isles.wire.fused import OUTER, warm_up
from isles.wire.groups import check_apart
from isles.wire.packing import is_finite
from isles.wire.world import LostPeerError, Mean, MismatchError, MissedRound, Payload, World, default_world

logger = logging.getLogger("isles")
CLOSING = 0
"""The number of the round with which `finish()` ends. Rounds of the schedule have numbers from 1."""


class DiLoCo:
    """Synchronises `model` with the other islands of `world` while `optimizer` trains it; a context manager.

    `weight` is this island's share in the mean, for shards of unequal size. All islands must start with the same
    parameters; `sync_initial=True` gives everybody those of island 0. An island that is slower than the others may have
    an `overlap` of its own. `outer_optimizer` makes another outer optimizer than the method's from the list of anchors.
    `outer_device="cpu"` keeps the outer state in host memory. `on_event` is called with every `Event`.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with DiLoCo(model, optimizer, Method.diloco(sync_every=2)) as diloco:
    ...     for _ in range(4):
    ...         model(torch.ones(2)).backward()
    ...         optimizer.step(); optimizer.zero_grad()
    >>> diloco.step_count, diloco.stats.sends
    (4, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        world: World | None = None,
        weight: float = 1.0,
        sync_initial: bool = False,
        overlap: int | None = None,
        outer_optimizer: MakeOptimizer | None = None,
        outer_device: str | torch.device | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        optimizer = unwrap_optimizer(optimizer)
        check_arguments(model, optimizer, method, weight)
        check_options(world, sync_initial, on_event, outer_optimizer)
        self._overlap = check_overlap(overlap, method)
        device = check_device(outer_device)
        self.model, self.optimizer, self.method, self.weight = model, optimizer, method, float(weight)
        self._island = Island.of(model, trainable_parameters(model).items())
        self.fragments = cut(model, method, self._island)
        self.schedule = Schedule.of(dataclasses.replace(method, overlap=self._overlap), len(self.fragments))
        self.world, self._owns_world = default_world(self._island.ranks) if world is None else (world, False)
        check_apart(self.world, self._island.ranks)
        self.step_count = 0
        self.clock = 0
        """The position in the schedule; the same as `step_count` where the set of islands is fixed."""
        self.stats = Stats()
        self.engine_seconds = 0.0
        """Spent here after inner steps, waiting included, since this DiLoCo was made."""
        self._on_event = on_event
        codec = dataclasses.replace(codecs[method.codec], stochastic=method.rounding == "stochastic")
        self._codec = codec.contracting() if method.error_feedback else codec
        self._replica = Replica(model, optimizer, self.fragments, self._island)
        self._handshake = Handshake(self.world, self.stats, self.weight)
        self._sgd = OuterSGD.of(method)
        with torch.no_grad():
            states = [self._new_state(fragment, outer_optimizer is None) for fragment in self.fragments]
        self._offload = Offload(states, device)
        self._torch_outer = outer_optimizer and TorchOuter(outer_optimizer, [state.anchor for state in states])
        settings = {
            "method": method.as_dict(),
            "outer_optimizer": self._torch_outer.describe() if self._torch_outer else None,
        }
        try:
            self._total_weight = self._handshake.start(settings, self._replica, sync_initial)
        except BaseException:
            self._give_back()
            raise
        if sync_initial:
            for state, fragment in zip(self._offload.states, self.fragments, strict=True):
                state.anchor.copy_(fragment.read())
        self._steps_in_background = (
            method.update == "fresh"
            and self._overlap > 0
            and device is None
            and outer_optimizer is None
            and all(state.anchor.is_cpu for state in states)
        )
        warm_up({self._codec.kernels, OUTER})
        self._resumed = self._finished = self._showing_global = self._paused = self._closed = False
        self._interrupted_by = ""
        self._hook = optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))
        optimizers_in_use.add(optimizer)

    def _new_state(self, fragment: Fragment, has_velocity: bool) -> OuterState:
        anchor = fragment.read()
        residual = torch.zeros_like(anchor) if self.method.error_feedback else None
        return OuterState(anchor, self._sgd.init(anchor) if has_velocity else None, residual)

    # ---- after every inner step

    def _after_step(self, *_: object) -> None:
        if self._paused:
            return
        begin = time.perf_counter()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "optimizer.step() is being captured into a CUDA graph, which would never call isles again: capture forward "
                "and backward only, and call optimizer.step() outside the graph"
            )
        if self._showing_global:
            raise RuntimeError(
                "optimizer.step() inside global_model(): the model holds the global weights there, train outside"
            )
        self._check_resumed()
        self._all_or_nothing(self._exchange)
        self.engine_seconds += time.perf_counter() - begin

    def _exchange(self) -> None:
        """What is due after this step."""
        self.step_count += 1
        self.clock += 1
        self._finished = False
        for due in self.schedule.sends(self.clock):
            if not self.fragments[due.fragment].is_empty:
                self._send(due)
        for due in self.schedule.applies(self.clock):
            if not self.fragments[due.fragment].is_empty:
                self._apply(due)
        if self._offload.in_use:
            self._offload.write_back()
            coming = self.clock + 1
            due_then = (*self.schedule.sends(coming), *self.schedule.applies(coming))
            self._offload.prefetch(due.fragment for due in due_then)

    def _send(self, due: Due, *, closing: bool = False) -> None:
        begin = time.perf_counter()
        self._replica.check_trainable(self.step_count, self.method.sync_every)
        fragment = self.fragments[due.fragment]
        state = self._offload.take(due.fragment, changing=("residual",))
        delta, finite = self._outer_gradient(fragment, state, closing)
        if self._island.any([not finite])[0]:
            self._recover(due)
            if state.residual is not None:
                state.residual.zero_()
        elif due.fragment == 0:
            self._replica.remember_buffers()
        sits_out, state.was_reset = state.was_reset, False
        weight = 0.0 if sits_out else self.weight
        if sits_out:
            delta = torch.zeros_like(state.anchor)
            self.stats.nonfinite_rounds += 1
            self._tell("nonfinite", due)
        encoded: Tensor | Callable[[], Tensor] = functools.partial(self._encode, delta)
        if self.method.update == "eager" or state.residual is not None or _is_encoded(delta) or not delta.is_cpu:
            encoded = self._encode(delta)
        share = weight / self._total_weight if self.method.update == "eager" and not closing else 0.0
        sent = Sent(share, closing)
        then = functools.partial(self._step_aside, state, sent) if self._steps_in_background and not closing else None
        place = (due.fragment, due.round, self._codec, fragment.numel, weight)
        payload = sent.payload = Payload(*place, encoded, self.step_count, then)
        if state.residual is not None and not sits_out:
            torch.sub(delta, self._codec.decode(payload.body.to(delta.device), fragment.numel), out=state.residual)
        sent.handle = self.world.start(payload)
        state.rounds[due.round] = sent
        state.sent_step = self.step_count
        self._count_send(due, sent, time.perf_counter() - begin)

    def _outer_gradient(self, fragment: Fragment, state: OuterState, closing: bool) -> tuple[Tensor, bool]:
        """Delta_m, encoded already where both are one pass over memory; and whether it is finite.

        In a closing round a fragment whose last round is still in flight leaves out what that one contains.
        """
        in_flight = [sent for sent in state.rounds.values() if closing and self.method.update == "fresh"]
        with phase("isles.outer_gradient"):
            if in_flight:
                return outer_gradient(state.anchor, fragment, -in_flight[0].decoded(state.anchor.device))
            if state.residual is None:
                with phase("isles.encode"):
                    encoded = encoded_outer_gradient(state.anchor, fragment, self._codec)
                if encoded is not None:
                    return encoded
            return outer_gradient(state.anchor, fragment, state.residual)

    def _encode(self, delta: Tensor) -> Tensor:
        """The payload of Delta_m, if it is not one already."""
        if _is_encoded(delta):
            return delta
        with phase("isles.encode"):
            return self._codec.encode(delta).cpu()

    def _apply(self, due: Due) -> None:
        fragment, state = self.fragments[due.fragment], self._offload.take(due.fragment)
        fresh = state.rounds[due.round + self.method.delay_rounds] if self.method.update == "eager" else None
        sent = state.rounds.pop(due.round, None)
        mean = None if sent is None else self._wait_for(sent, due)
        if mean is not None and not mean.included:
            self._move_along(due, mean)
            return
        for missed in mean.missed if mean is not None else ():
            self._catch_up(missed)
        self._outer_step(due.fragment, sent, mean, fresh)
        state = self._offload.take(due.fragment)
        with phase("isles.mix"):
            mix(fragment, state.anchor, self.method.mixing)

    def _outer_step(self, index: int, sent: Sent | None, mean: Mean | None, fresh: Sent | None = None) -> None:
        """anchor = OuterOpt(anchor, Delta), where Delta is the mean of the round that is due.

        With eager updates, Delta = mean + share * own fresh contribution - share * own contribution in the mean.
        """
        state = self._offload.take(index, changing=("anchor", "velocity"))
        if sent is not None and sent.stepped is not None and not (mean and mean.missed):
            self._sgd.give_back(state.anchor, state.velocity)
            state.anchor, state.velocity = sent.stepped
            state.outer_steps += 1
            return
        device = state.anchor.device
        delta = mean.values.to(device) if mean is not None and mean.weights else None
        with phase("isles.outer_step"):
            closing = sent is not None and sent.closing
            if self.method.update == "eager" and not closing:
                for own, sign in ((fresh, 1.0), (sent, -1.0)):
                    if own is not None:
                        codec, body, share = own.payload.codec, own.payload.body.to(device), sign * own.share
                        if delta is None:
                            delta = codec.decode(body, state.anchor.numel()).mul_(share)
                        else:
                            codec.accumulate(body, delta, share)
            if delta is None:
                return
            if closing and state.outer_steps == 0:
                state.anchor.sub_(delta)
                return
            state.outer_steps += 1
            if self._torch_outer:
                self._offload.step_at_home(index, self._torch_outer.update, delta)
            else:
                self._sgd.update(state.anchor, delta, state.velocity)

    def _step_aside(self, state: OuterState, sent: Sent, mean: Mean) -> None:
        """Takes the outer step in the background, as soon as the mean has arrived; it takes effect when it is due.

        Nothing reads an anchor between the step at which its fragment is sent and the one at which the result is
        applied, but for `global_model()`, which must not see it before its time: so it goes to other memory.
        """
        if mean.weights:
            sent.stepped = self._sgd.update_aside(state.anchor, mean.values, state.velocity)

    def _move_along(self, due: Due, mean: Mean) -> None:
        """A round that the others completed without this island: it follows the global model, and keeps what it has
        learned for its next outer gradient.
        """
        self.stats.excluded_rounds += 1
        self._tell("excluded", due)
        for missed in (*mean.missed, MissedRound(due.fragment, due.round, mean)):
            self._catch_up(missed)

    def _catch_up(self, missed: MissedRound) -> None:
        old = self._offload.take(missed.fragment).anchor.clone()
        self._outer_step(missed.fragment, None, missed.mean)
        move_along(self.fragments[missed.fragment], old, self._offload.take(missed.fragment).anchor)
        self.stats.catch_up_rounds += 1
        self._tell("catch_up", Due(missed.fragment, missed.round))

    def _wait_for(self, sent: Sent, due: Due) -> Mean:
        """The mean of a round; counts the time that is spent waiting for it."""
        begin = time.perf_counter()
        with phase("isles.wait"):
            mean = sent.handle.wait()
        seconds = time.perf_counter() - begin
        self._total_weight = mean.total_weight or self._total_weight
        self.stats.applies += 1
        self.stats.wait_seconds += seconds
        self.stats.islands = len(mean.weights)
        self._tell("apply", due, seconds=seconds)
        return mean

    def _recover(self, due: Due) -> None:
        """Weights that are not finite go back to the global values, and their rounds do not count.

        All fragments at once, not only the one that is due: weights that are left at NaN would spoil the others again
        in the next forward pass.
        """
        logger.warning(
            "island %d: the outer gradient of fragment %d is not finite at step %d; what is not finite goes back to "
            "the global weights, and the island sits out those rounds",
            self.world.rank,
            due.fragment,
            self.step_count,
        )
        for index, fragment in enumerate(self.fragments):
            if index == due.fragment or self._island.any([not is_finite(fragment.read())])[0]:
                state = self._offload.take(index)
                fragment.write(state.anchor)
                state.was_reset = True
        self._replica.heal()

    def _count_send(self, due: Due, sent: Sent, seconds: float) -> None:
        self.stats.bytes_sent += sent.handle.bytes_sent
        self.stats.bytes_received += sent.handle.bytes_received
        if sent.closing:
            return
        self.stats.sends += 1
        self.stats.payload_bytes += sent.payload.num_bytes
        self.stats.payload_parameters += sent.payload.numel
        self._tell("send", due, num_bytes=sent.handle.bytes_sent, seconds=seconds)

    def _tell(self, kind: Kind, due: Due, **more: Any) -> None:
        if self._on_event is not None:
            self._on_event(Event(kind, self.step_count, due.fragment, due.round, **more))

    # ---- what may go wrong in between

    def _all_or_nothing(self, exchange: Callable[[], None]) -> None:
        """A Ctrl-C in the midst of an exchange leaves an island that has done a part of what the others do. It must not
        go on as if nothing had happened. (A world that has failed says so itself, again and again.)
        """
        try:
            exchange()
        except (LostPeerError, MismatchError):
            raise
        except BaseException as error:
            self._interrupted_by = type(error).__name__
            raise

    def _check_resumed(self) -> None:
        """Before anything is exchanged after `load_state_dict`: have all islands loaded the same?"""
        self._check_not_interrupted()
        if self._resumed:
            shared = self.method.update != "eager" and self._overlap == self.method.overlap
            self._handshake.resume(self.step_count, self._anchors() if shared else None)
            self._resumed = False

    def _check_not_interrupted(self) -> None:
        if self._interrupted_by:
            raise RuntimeError(
                f"step {self.step_count} was interrupted by {self._interrupted_by}, and this island may no longer agree "
                "with the others: restart all islands from their last checkpoint"
            )

    # ---- the global model

    def _anchors(self) -> list[Tensor]:
        return [state.anchor for state in self._offload.settle()]

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """The model with the outer parameters in it, for evaluation and export; afterwards the island's own are back.

        Buffers are the island's own. With eager updates the outer parameters are this island's view of them.
        """
        if self._showing_global:
            raise RuntimeError("global_model() inside global_model()")
        own = [fragment.snapshot() for fragment in self.fragments]
        self._showing_global = True
        try:
            self._show_anchors()
            yield self.model
        finally:
            self._showing_global = False
            reshard(self.model)
            with torch.no_grad():
                for fragment, snapshot in zip(self.fragments, own, strict=True):
                    fragment.restore(snapshot)

    @torch.no_grad()
    def _show_anchors(self) -> None:
        reshard(self.model)
        for fragment, anchor in zip(self.fragments, self._anchors(), strict=True):
            fragment.write(anchor)

    @torch.no_grad()
    def finish(self) -> None:
        """Leaves the identical global model, with every step in it, on every island; all islands call it.

        What is in flight is applied, and a closing round adds what was learned since each fragment was last sent.
        Floating-point buffers that differ (BatchNorm statistics) become the mean over islands, others those of island 0.
        """
        if self._showing_global:
            raise RuntimeError("finish() inside global_model(): leave it first")
        self._check_resumed()
        reshard(self.model)
        self._replica.check_trainable()
        self._all_or_nothing(self._finish)
        self._finished = True

    def _finish(self) -> None:
        self._handshake.finish(self.step_count)
        self._close_rounds()
        if self.method.update == "eager":
            self._handshake.average_anchors(self._anchors())
        self._show_anchors()
        self._handshake.same_model(self._replica)

    def _close_rounds(self) -> None:
        """Sends what was learned since the last sends, and takes the outer steps of all rounds in flight, these last ones
        included. A fragment that has never had an outer step becomes the mean of the islands' weights instead: without
        momentum a first, short step would lose much of what was learned (docs/log.md, "The closing round").
        """
        for index, state in enumerate(self._offload.settle()):
            if state.sent_step < self.step_count and not self.fragments[index].is_empty:
                self._send(Due(index, CLOSING), closing=True)
        for index, state in enumerate(self._offload.settle()):
            for number in list(state.rounds):
                sent = state.rounds.pop(number)
                mean = sent.handle.wait() if sent.closing else self._wait_for(sent, Due(index, number))
                self._outer_step(index, sent, mean)
            self._offload.write_back()

    def __enter__(self) -> DiLoCo:
        if self._closed:
            raise RuntimeError("this DiLoCo is closed: make a new one (and load_state_dict to go on)")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None and self.world.size > 1 and not self._finished:
                known = isinstance(error, (LostPeerError, MismatchError))  # to the others as well
                self._leave("" if known else f"at step {self.step_count}: {type(error).__name__}: {error}")
            self.close()

    def close(self) -> None:
        """Takes the hook off the optimizer, and gives back what was made for the default world. Nothing in flight is
        waited for; call `finish()` before it if that matters.
        """
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        optimizers_in_use.discard(self.optimizer)
        self._give_back("" if self._finished else f"at step {self.step_count}: it was closed before finish()")

    def _give_back(self, reason: str = "") -> None:
        if self._owns_world:
            self._leave(reason)
        self._island.close()

    def _leave(self, reason: str) -> None:
        close = getattr(self.world, "close", None)
        if close is not None:
            close(reason)

    # ---- checkpoints

    def state_dict(self, *, replica: bool = True, sharded: bool = False) -> dict[str, Any]:
        """Everything, so that a resumed run is the same run: outer state, rounds in flight, and the replica.

        Rounds in flight are waited for. The replica is the island's own parameters, buffers and inner optimizer;
        `replica=False` leaves it out for those who save model and optimizer themselves. Tensors are copies on the CPU.
        It loads with torch.load(weights_only=True). In an island of several ranks each has its own; `sharded=True` gives
        all of them together one state for torch.distributed.checkpoint, which fits any number of ranks
        (`isles.core.sharded`).
        """
        if replica and self._showing_global:
            raise RuntimeError(
                "state_dict() inside global_model(): the model holds the global weights there, save outside"
            )
        self._check_not_interrupted()
        states = self._offload.settle()
        about = {
            "version": VERSION,
            "island": self.world.rank,
            "method": self.method.as_dict(),
            "overlap": self._overlap,
            "step": self.step_count,
            "clock": self.clock,
            "total_weight": self._total_weight,
            "outer_optimizer": self._outer_name(),
        }
        if sharded:
            state = save_sharded(about, self.fragments, states, self.stats, self._island, self._torch_outer)
        else:
            fragments = [save_state(f, s) for f, s in zip(self.fragments, states, strict=True)]
            state = {**about, "stats": dataclasses.asdict(self.stats), "fragments": fragments}
            if self._torch_outer:
                state["outer_state"] = host_copy(self._torch_outer.optimizer.state_dict())
        if replica:
            with self._pause():
                state["replica"] = self._replica.state_dict(sharded)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict()` was taken. Every island loads its own, of the same step."""
        states = self._offload.settle()
        sharded = isinstance(state, dict) and "notes" in state
        about = read_notes(state) if sharded else state
        check_saved(about, self.method, self._overlap, self.fragments, self.world.rank, self._outer_name())
        if "replica" in state:
            reshard(self.model)
            with self._pause():
                self._replica.load_state_dict(state["replica"], sharded)
        if sharded:
            self.stats = load_sharded(state, self.fragments, states, self._island, self._torch_outer)
        else:
            self.stats = Stats(**state["stats"])
            for own, saved in zip(states, state["fragments"], strict=True):
                load_state(own, saved)
            if self._torch_outer:
                self._torch_outer.optimizer.load_state_dict(state["outer_state"])
        self._handshake.stats = self.stats
        self.step_count, self.clock = about["step"], about["clock"]
        self._total_weight = about["total_weight"]
        self._resumed, self._interrupted_by, self._finished = True, "", False

    def _outer_name(self) -> str | None:
        return type(self._torch_outer.optimizer).__name__ if self._torch_outer else None

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """An optimizer that has no state yet is given one by a step that changes nothing, and does not count."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


def _is_encoded(delta: Tensor) -> bool:
    return delta.dtype is torch.uint8
