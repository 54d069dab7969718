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

The anchor is the outer copy, never the mixed weights. With fresh and delayed updates it is the same on every
island, bit for bit; with eager updates every island has its own, and they agree once updates stop. Own
contributions are taken *as the others see them*, encoded and decoded, so that what an island adds early is
exactly what it later takes back. Outer arithmetic is fp32 on flat vectors, whatever the model's precision.
Inner optimizer state stays local.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isles.core import agreement, fused_outer
from isles.core.ahead import Ahead
from isles.core.arguments import check_arguments, check_device, check_options, check_overlap, engaged
from isles.core.fragments import Fragment, cut, trainable_parameters
from isles.core.method import Method
from isles.core.outer import OuterSGD, encoded_outer_gradient, mix, outer_gradient
from isles.core.phases import phase
from isles.core.replica import Replica
from isles.core.schedule import Due, Schedule
from isles.core.sharded import load_sharded, read_notes, save_sharded
from isles.core.shelf import Shelf
from isles.core.state import OuterState, Sent, check_saved, load_state, save_state
from isles.core.stats import Counted, Event, Kind, Stats
from isles.wire.codecs import codecs
from isles.wire.fused import warm_up
from isles.wire.island import Island, reshard
from isles.wire.memory import remember
from isles.wire.packing import is_finite
from isles.wire.world import Handle, LostPeerError, MismatchError, Payload, World, default_world

logger = logging.getLogger("isles")
T = TypeVar("T")


class DiLoCo:
    """Synchronises `model` with the other islands of `world` while `optimizer` trains it; a context manager.

    `weight` is this island's say in the mean, for shards of unequal size. All islands must start with the
    same parameters; `sync_initial=True` gives everybody those of island 0. An island that is slower than the
    others may have an `overlap` of its own. `outer_device="cpu"` keeps the outer state in host memory. `on_event`
    is called with every `Event`.

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
        outer_device: str | torch.device | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        check_arguments(model, optimizer, method, weight)
        check_options(world, sync_initial, on_event)
        self._overlap = check_overlap(overlap, method)
        self.model, self.optimizer, self.method, self.weight = model, optimizer, method, float(weight)
        self._island = Island.of(model, trainable_parameters(model).items())
        self.fragments = cut(model, method, self._island)
        self.schedule = Schedule.of(dataclasses.replace(method, overlap=self._overlap), len(self.fragments))
        self.world = default_world() if world is None else world
        self.step_count = 0
        self.stats = Stats()
        self._on_event = on_event
        codec = dataclasses.replace(codecs[method.codec], stochastic=method.rounding == "stochastic")
        self._codec = codec.contracting() if method.error_feedback else codec
        self._replica = Replica(model, optimizer, self.fragments, self._island)
        self._link = Counted(self.world, self.stats)
        self._total_weight = agreement.at_start(self._link, method, self.weight, self._replica, sync_initial)
        self._outer = OuterSGD.of(method)
        self._ahead = Ahead(self._outer)
        self._states = [self._new_state(fragment) for fragment in self.fragments]
        self._shelf = Shelf(self._states, check_device(outer_device))
        self._has_thread = getattr(self.world, "waits_anywhere", False)
        self._takes_steps_ahead = (
            self._has_thread
            and self.schedule.lateness > 0
            and method.update == "fresh"
            and outer_device is None
            and all(state.anchor.device.type == "cpu" for state in self._states)
        )
        warm_up({self._codec.kernels, fused_outer.GROUP})
        self._resumed = False
        self._cut_short = ""
        self._showing_global = False
        self._closed = False
        self._hook = optimizer.register_step_post_hook(lambda *_: self._after_step())
        engaged.add(optimizer)

    def _new_state(self, fragment: Fragment) -> OuterState:
        anchor = remember(fragment.read())
        residual = torch.zeros_like(anchor) if self.method.error_feedback else None
        return OuterState(anchor, self._outer.init(anchor), residual)

    # ---- after every inner step

    def _after_step(self) -> None:
        if self._showing_global:
            raise RuntimeError(
                "optimizer.step() inside global_model(): the model holds the global weights there, train outside"
            )
        self._check_resumed()
        self._in_one_go(self._exchange)

    def _exchange(self) -> None:
        """What is due after this step."""
        self.step_count += 1
        for due in self.schedule.sends(self.step_count):
            if not self.fragments[due.fragment].is_empty:
                self._send(due)
        for due in self.schedule.applies(self.step_count):
            if not self.fragments[due.fragment].is_empty:
                self._apply(due)
        if self._shelf.in_use:
            self._shelf.put_back()
            coming = self.step_count + 1
            due_then = (*self.schedule.sends(coming), *self.schedule.applies(coming))
            self._shelf.prefetch(due.fragment for due in due_then)

    def _in_one_go(self, exchange: Callable[[], None]) -> None:
        """A Ctrl-C in the midst of an exchange leaves an island that has done a part of what the others do. It must not
        go on as if nothing had happened. (A world that has failed says so itself, again and again.)
        """
        try:
            exchange()
        except (LostPeerError, MismatchError):
            raise
        except BaseException as error:
            self._cut_short = type(error).__name__
            raise

    def _check_whole(self) -> None:
        if self._cut_short:
            raise RuntimeError(
                f"step {self.step_count} was cut short by {self._cut_short}, and this island may no longer agree with "
                "the others: restart all islands from their last checkpoint"
            )

    def _check_resumed(self) -> None:
        """Before anything is exchanged after `load_state_dict`: have all islands loaded the same?"""
        self._check_whole()
        if self._resumed:
            agreement.after_resume(self.world, self._shares_anchors(), self.step_count, self._anchors())
            self._resumed = False

    def _shares_anchors(self) -> bool:
        """Whether all islands have the same anchors at the same step."""
        return self.method.update != "eager" and self._overlap == self.method.overlap

    def _anchors(self) -> list[Tensor]:
        self._shelf.settle()
        return [state.anchor for state in self._states]

    def _send(self, due: Due) -> None:
        begin = time.perf_counter()
        fragment, state = self.fragments[due.fragment], self._shelf.take(due.fragment)
        delta, finite = self._outer_gradient(fragment, state)
        if self._island.any([not finite])[0]:
            self._recover(due)
            if state.residual is not None:
                state.residual.zero_()
        sits_out, state.void = state.void, False
        weight = 0.0 if sits_out else self.weight
        if sits_out:
            delta = torch.zeros_like(state.anchor)
            self.stats.nonfinite_rounds += 1
            self._tell("nonfinite", due)
        eager = self.method.update == "eager"
        beside = self._has_thread and delta.device.type == "cpu" and not eager and state.residual is None
        body = None if beside and not _is_encoded(delta) else self._encode(delta)
        if state.residual is not None and body is not None and not sits_out:
            torch.sub(delta, self._codec.decode(body, fragment.numel), out=state.residual)
        encoded = body if body is not None else lambda: self._encode(delta)
        payload = Payload(due.fragment, due.round, self._codec, fragment.numel, weight, encoded)
        handle = self._link.start(payload)
        share = weight / self._total_weight if eager else 0.0
        sent = Sent(handle, self._codec, body if eager else None, share)
        if self._takes_steps_ahead:
            sent.ahead = self._ahead.step(handle, state)
        state.rounds[due.round] = sent
        self._count_send(due, handle, payload.num_bytes, fragment.numel, time.perf_counter() - begin)

    def _outer_gradient(self, fragment: Fragment, state: OuterState) -> tuple[Tensor, bool]:
        """Delta_m, encoded already where both are one pass over memory; and whether it is finite."""
        with phase("isles.outer_gradient"):
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
        fragment, state = self.fragments[due.fragment], self._shelf.take(due.fragment)
        fresh = state.rounds[due.round + self.method.delay_rounds] if self.method.update == "eager" else None
        self._outer_step(due, fresh)
        with phase("isles.mix"):
            mix(fragment, state.anchor, self.method.mixing)

    def _outer_step(self, due: Due, fresh: Sent | None = None) -> None:
        """anchor = OuterOpt(anchor, Delta), where Delta is the mean of the round that is due.

        With eager updates, Delta = mean + share * own fresh contribution - share * own contribution in the mean.
        """
        state = self._shelf.take(due.fragment)
        stale = state.rounds.pop(due.round, None)
        if stale is not None and stale.ahead is not None:
            mean = self._ahead.put_in_place(state, self._wait_for(stale.ahead.result, due))
            self._total_weight = mean.total_weight or self._total_weight
            return
        delta = None if stale is None else self._mean(stale, due, state.anchor.device)
        with phase("isles.outer_step"):
            own = [
                (sent.codec, sent.body.to(state.anchor.device), sign * sent.share)
                for sent, sign in ((fresh, 1.0), (stale, -1.0))
                if sent is not None and sent.body is not None
            ]
            if own and delta is not None:
                delta = delta.clone()  # the mean itself is shared with islands in other threads
            for codec, body, share in own:
                if delta is None:
                    delta = codec.decode(body, state.anchor.numel()).mul_(share)
                else:
                    codec.accumulate(body, delta, share)
            if delta is not None:
                self._outer.update(state.anchor, delta, state.velocity)

    def _mean(self, sent: Sent, due: Due, device: torch.device) -> Tensor | None:
        """The mean of a round; None if nobody took part."""
        mean = self._wait_for(sent.handle.wait, due)
        if not mean.weights:
            return None
        self._total_weight = mean.total_weight
        return mean.values if mean.values.device == device else mean.values.to(device)

    def _wait_for(self, result: Callable[[], T], due: Due) -> T:
        """What comes of a round, and counts the time that is spent waiting for it."""
        begin = time.perf_counter()
        with phase("isles.wait"):
            found = result()
        seconds = time.perf_counter() - begin
        self.stats.applies += 1
        self.stats.wait_seconds += seconds
        self._tell("apply", due, seconds=seconds)
        return found

    def _recover(self, due: Due) -> None:
        """The island has gone astray: what is not finite goes back to the global value, and its rounds do not count.

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
            if index == due.fragment or self._is_astray(fragment.read()):
                state = self._shelf.take(index)
                fragment.write(state.anchor)
                state.void = True
        self._replica.heal_optimizer()

    def _is_astray(self, values: Tensor) -> bool:
        """Whether there is a value, on any rank of the island, that is not finite."""
        return self._island.any([not is_finite(values)])[0]

    def _count_send(self, due: Due, handle: Handle, num_bytes: int, numel: int, seconds: float) -> None:
        self.stats.sends += 1
        self.stats.payload_bytes += num_bytes
        self.stats.payload_parameters += numel
        self._tell("send", due, num_bytes=handle.bytes_sent, seconds=seconds)

    def _tell(self, kind: Kind, due: Due, **more: Any) -> None:
        if self._on_event is not None:
            self._on_event(Event(kind, self.step_count, due.fragment, due.round, **more))

    # ---- the global model

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """The model with the outer parameters in it, for evaluation and export; afterwards the island's own are back.

        Buffers are the island's own. With eager updates the outer parameters are this island's view of them.
        """
        if self._showing_global:
            raise RuntimeError("global_model() inside global_model()")
        own = [fragment.snapshot() for fragment in self.fragments]
        self._show(self._anchors())
        self._showing_global = True
        try:
            yield self.model
        finally:
            self._showing_global = False
            reshard(self.model)
            with torch.no_grad():
                for fragment, snapshot in zip(self.fragments, own, strict=True):
                    fragment.restore(snapshot)

    @torch.no_grad()
    def _show(self, vectors: list[Tensor]) -> None:
        reshard(self.model)
        for fragment, vector in zip(self.fragments, vectors, strict=True):
            fragment.write(vector)

    @torch.no_grad()
    def finish(self) -> None:
        """Applies what is in flight and leaves the identical global model on every island; all islands call it.

        What an island has learned since it last sent a fragment is not in the global model: end on a step at
        which fragments are sent if that matters. Floating-point buffers (BatchNorm statistics) become the
        mean over islands, others those of island 0.
        """
        if self._showing_global:
            raise RuntimeError("finish() inside global_model(): leave it first")
        self._check_resumed()
        self._in_one_go(self._finish)

    def _finish(self) -> None:
        for index, state in enumerate(self._states):
            for number in list(state.rounds):
                self._outer_step(Due(index, number))
            self._shelf.put_back()
        agreement.at_finish(self._link, self.method, self.weight, self._anchors())
        self._show(self._anchors())
        agreement.average_buffers(self._link, self.weight, self._replica)
        self._link.gather(b"")  # nobody leaves before all have what they wait for

    def __enter__(self) -> DiLoCo:
        if self._closed:
            raise RuntimeError("this DiLoCo is closed: make a new one (and load_state_dict to go on)")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Takes the hook off the optimizer, and ends the thread that takes outer steps. Nothing in flight is waited
        for; `finish()` before it if that matters.
        """
        self._closed = True
        self._ahead.close()
        self._hook.remove()
        engaged.discard(self.optimizer)

    # ---- checkpoints

    def state_dict(self, *, replica: bool = True, sharded: bool = False) -> dict[str, Any]:
        """Everything, so that a resumed run is the same run: outer state, rounds in flight, and the replica.

        Rounds in flight are waited for. The replica is the island's own parameters, buffers and inner optimizer;
        `replica=False` leaves it out for those who save model and optimizer themselves. Tensors are copies. It loads
        with torch.load(weights_only=True). In an island of several ranks each has its own; `sharded=True` gives all of
        them together one state for torch.distributed.checkpoint, which fits any number of ranks (`isles.core.sharded`).
        """
        if replica and self._showing_global:
            raise RuntimeError(
                "state_dict() inside global_model(): the model holds the global weights there, save outside"
            )
        self._check_whole()
        self._shelf.settle()
        about = {
            "version": 1,
            "island": self.world.rank,
            "method": self.method.as_dict(),
            "overlap": self._overlap,
            "step": self.step_count,
            "total_weight": self._total_weight,
        }
        if sharded:
            state = save_sharded(about, self.fragments, self._states, self.stats, self._island)
        else:
            fragments = [save_state(f, s) for f, s in zip(self.fragments, self._states, strict=True)]
            state = {**about, "stats": dataclasses.asdict(self.stats), "fragments": fragments}
        if replica:
            with self._unhooked():
                state["replica"] = self._replica.state_dict(sharded)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict()` was taken. Every island loads its own, of the same step."""
        self._shelf.settle()
        sharded = isinstance(state, dict) and "notes" in state
        about = read_notes(state) if sharded else state
        check_saved(about, self.method, self._overlap, self.fragments, self.world.rank)
        if "replica" in state:
            reshard(self.model)
            with self._unhooked():
                self._replica.load_state_dict(state["replica"], sharded)
        if sharded:
            self.stats = load_sharded(state, self.fragments, self._states, self._island)
        else:
            self.stats = Stats(**state["stats"])
            for outer, saved in zip(self._states, state["fragments"], strict=True):
                load_state(outer, saved)
        self._link.stats = self.stats
        self.step_count = about["step"]
        self._total_weight = about["total_weight"]
        self._resumed, self._cut_short = True, ""

    @contextmanager
    def _unhooked(self) -> Iterator[None]:
        """An optimizer that has no state yet is made to have one by a step that changes nothing, and does not count."""
        self._hook.remove()
        try:
            yield
        finally:
            self._hook = self.optimizer.register_step_post_hook(lambda *_: self._after_step())


def _is_encoded(delta: Tensor) -> bool:
    return delta.dtype is torch.uint8
