"""The engine: one class for DiLoCo, Streaming DiLoCo, delayed and eager updates.

Each island trains its own replica with an ordinary optimizer. After every inner step the schedule says which fragments
are sent and which results are applied; `isles.core.rounds` has the two lines of mathematics of each. This file has what
is around them: how a run starts, how it is looked at, saved and resumed, and how it ends. At the end a closing round
sends what no mean contains yet, so that the final model contains every step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from isles.core.arguments import (
    check_arguments,
    check_device,
    check_options,
    check_overlap,
    optimizers_in_use,
    unwrap_optimizer,
)
from isles.core.device import refuse_capture
from isles.core.elastic import Elastic, check_elastic
from isles.core.fragments import cut, trainable_parameters
from isles.core.handshake import Handshake
from isles.core.island import Island, reshard
from isles.core.method import Method
from isles.core.outer import MakeOptimizer
from isles.core.replica import Replica, host_copy
from isles.core.rounds import Rounds
from isles.core.schedule import Schedule
from isles.core.sharded import load_sharded, read_notes, save_sharded
from isles.core.state import VERSION, check_saved, load_state, save_state
from isles.core.stats import Event, Stats
from isles.wire.groups import check_apart
from isles.wire.world import LostPeerError, MismatchError, World, default_world, is_elastic


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
        self._overlap, self._outer_device = check_overlap(overlap, method), check_device(outer_device)
        self.model, self.optimizer, self.method, self.weight = model, optimizer, method, float(weight)
        island = Island.of(model, trainable_parameters(model).items())
        self.fragments = cut(model, method, island)
        own = dataclasses.replace(method, overlap=self._overlap)
        self.schedule = Schedule.of(own, len(self.fragments))
        self.step_count = 0
        self.clock = 0
        """The position in the schedule; the same as `step_count` where the set of islands is fixed."""
        self.stats = Stats()
        self.engine_seconds = 0.0
        """Spent here after inner steps, waiting included, since this DiLoCo was made."""
        self._replica = Replica(model, optimizer, self.fragments, island)
        self.world, self._owns_world = default_world(island.ranks) if world is None else (world, False)
        try:
            check_apart(self.world, island.ranks)
            check_elastic(self.world, method)
            options = (self.weight, self.stats, on_event, outer_optimizer, self._outer_device)
            self._rounds = rounds = Rounds(self._replica, own, self.world, *options)
            outer = rounds.torch_outer.describe() if rounds.torch_outer else None
            settings = {"method": method.as_dict(), "outer_optimizer": outer}
            self._membership: Handshake | Elastic
            if is_elastic(self.world):
                self._membership = Elastic(self.world, rounds, self._replica)
                self.clock = self._membership.join(settings, self.schedule)
            else:
                self._membership = Handshake(self.world, self.stats, self.weight)
                rounds.total_weight = self._membership.start(settings, self._replica, sync_initial)
        except BaseException:
            self._give_back()
            raise
        if sync_initial and not is_elastic(self.world):
            for state, fragment in zip(rounds.offload.states, self.fragments, strict=True):
                state.anchor.copy_(fragment.read())
        rounds.warm_up()
        self._resumed = self._finished = self._showing_global = self._paused = self._closed = False
        self._interrupted_by = ""
        self._hook = optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))
        optimizers_in_use.add(optimizer)

    # ---- after every inner step

    def _after_step(self, *_: object) -> None:
        if self._paused:
            return
        begin = time.perf_counter()
        refuse_capture()
        if self._showing_global:
            raise RuntimeError(
                "optimizer.step() inside global_model(): the model holds the global weights there, train outside"
            )
        self._check_resumed()
        self._all_or_nothing(self._exchange)
        self.engine_seconds += time.perf_counter() - begin

    def skip_step(self) -> None:
        """Counts a step for which a GradScaler, because of an overflow, did not call `optimizer.step()`. Islands that
        skip different steps then still agree on how many there were.
        """
        self._after_step()

    def _exchange(self) -> None:
        """What is due after this step."""
        self.step_count += 1
        self._rounds.step, self._finished = self.step_count, False
        self._rounds.recover()
        self._advance(self._membership.reach(self.clock + 1))

    def _advance(self, clock: int) -> None:
        """Does what is due up to this clock: one step, but for an island that is behind the others."""
        rounds, schedule = self._rounds, self.schedule
        while self.clock < clock:
            self.clock += 1
            for due in schedule.sends(self.clock):
                if not self.fragments[due.fragment].is_empty:
                    rounds.send(due)
            for due in schedule.applies(self.clock):
                if not self.fragments[due.fragment].is_empty:
                    rounds.apply(due)
        if rounds.looks_ahead:
            rounds.look_ahead(schedule.sends(self.clock + 1), schedule.applies(self.clock + 1))

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
            self._membership.resume(self.step_count, self._rounds.anchors() if shared else None)
            self._resumed = False

    def _check_not_interrupted(self) -> None:
        if self._interrupted_by:
            raise RuntimeError(
                f"step {self.step_count} was interrupted by {self._interrupted_by}, and this island may no longer "
                "agree with the others: restart all islands from their last checkpoint"
            )

    # ---- the global model

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """The model with the outer parameters in it, for evaluation and export; afterwards the island's own are back.

        Buffers are the island's own. With `outer_device` the island's own weights are kept there meanwhile. With eager
        updates the outer parameters are this island's view of them.
        """
        if self._showing_global:
            raise RuntimeError("global_model() inside global_model()")
        own = [fragment.snapshot(self._outer_device) for fragment in self.fragments]
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
        for fragment, anchor in zip(self.fragments, self._rounds.anchors(), strict=True):
            fragment.write(anchor)

    @torch.no_grad()
    def finish(self) -> None:
        """Leaves the identical global model, with every step in it, on every island; all islands call it.

        What is in flight is applied, and a closing round adds what was learned since each fragment was last sent.
        Floating-point buffers that differ (BatchNorm statistics) become the mean over islands, others island 0's.
        """
        if self._showing_global:
            raise RuntimeError("finish() inside global_model(): leave it first")
        self._check_resumed()
        reshard(self.model)
        self._replica.check_trainable()
        self._all_or_nothing(self._finish)
        self._finished = True

    def _finish(self) -> None:
        self._membership.finish(self.step_count)
        self._rounds.close(catch_up=lambda: self._advance(self._membership.reach(self.clock)))
        if self.method.update == "eager":
            self._membership.average_anchors(self._rounds.anchors())
        self._show_anchors()
        self._membership.same_model(self._replica)

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
            if error is not None and (self.world.size > 1 or is_elastic(self.world)) and not self._finished:
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
        if self._owns_world or is_elastic(self.world):
            self._leave(reason)
        self._replica.island.close()

    def _leave(self, reason: str) -> None:
        close = getattr(self.world, "close", None)
        if close is not None:
            close(reason)

    # ---- checkpoints

    def state_dict(self, *, replica: bool | Literal["weights"] = True, sharded: bool = False) -> dict[str, Any]:
        """Everything, so that a resumed run is the same run: outer state, rounds in flight, and the replica.

        Rounds in flight are waited for. The replica is the island's own parameters, buffers and inner optimizer;
        `replica="weights"` leaves the optimizer out for those who save it themselves, `replica=False` all of it.
        Tensors are copies on the CPU. It loads with torch.load(weights_only=True). In an island of several ranks each
        has its own; `sharded=True` gives all of them together one state for torch.distributed.checkpoint, which fits
        any number of ranks.
        """
        if replica and self._showing_global:
            raise RuntimeError(
                "state_dict() inside global_model(): the model holds the global weights there, save outside"
            )
        self._check_not_interrupted()
        if is_elastic(self.world):
            with self._pause():
                return self._membership.state_dict(self.step_count)  # type: ignore[union-attr]
        states = self._rounds.offload.settle()
        about = {
            "version": VERSION,
            "island": self.world.rank,
            "method": self.method.as_dict(),
            "overlap": self._overlap,
            "step": self.step_count,
            "clock": self.clock,
            "total_weight": self._rounds.total_weight,
            "outer_optimizer": self._outer_name(),
        }
        if sharded:
            state = save_sharded(
                about, self.fragments, states, self.stats, self._replica.island, self._rounds.torch_outer
            )
        else:
            fragments = [save_state(f, s) for f, s in zip(self.fragments, states, strict=True)]
            state = {**about, "stats": dataclasses.asdict(self.stats), "fragments": fragments}
            if self._rounds.torch_outer:
                state["outer_state"] = host_copy(self._rounds.torch_outer.optimizer.state_dict())
        if replica:
            with self._pause():
                state["replica"] = self._replica.state_dict(sharded, with_optimizer=replica != "weights")
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict()` was taken. Every island loads its own, of the same step.

        Where islands come and go the run is in the store: what is loaded are moments of the optimizer and buffers.
        """
        if is_elastic(self.world):
            with self._pause():
                self._membership.load_state_dict(state)  # type: ignore[union-attr]
            return
        states = self._rounds.offload.settle()
        sharded = isinstance(state, dict) and "notes" in state
        about = read_notes(state) if sharded else state
        check_saved(about, self.method, self._overlap, self.fragments, self.world.rank, self._outer_name())
        if "replica" in state:
            reshard(self.model)
            with self._pause():
                self._replica.load_state_dict(state["replica"], sharded)
        if sharded:
            self.stats = load_sharded(state, self.fragments, states, self._replica.island, self._rounds.torch_outer)
        else:
            self.stats = Stats(**state["stats"])
            for own, saved in zip(states, state["fragments"], strict=True):
                load_state(own, saved)
            if self._rounds.torch_outer:
                self._rounds.torch_outer.optimizer.load_state_dict(state["outer_state"])
        self._membership.stats = self._rounds.stats = self.stats
        self.step_count, self.clock = about["step"], about["clock"]
        self._rounds.step = self.step_count
        self._rounds.total_weight = about["total_weight"]
        self._resumed, self._interrupted_by, self._finished = True, "", False

    def _outer_name(self) -> str | None:
        return type(self._rounds.torch_outer.optimizer).__name__ if self._rounds.torch_outer else None

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """An optimizer that has no state yet is given one by a step that changes nothing, and does not count."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
