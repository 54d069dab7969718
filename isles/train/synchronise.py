"""One interface for two ways to train together: isles' methods, and plain data-parallel training, the baseline.

The loop needs little of either: a model to run, what a step has cost, the global model for evaluation, the
state for a checkpoint.

    Islands        isles.DiLoCo on an isles.TorchWorld; inside an island of several ranks the model is sharded or
                   copied, and each rank exchanges its part with its peers in the other islands
    DataParallel   torch's DistributedDataParallel over all ranks; it sends what a ring all-reduce of the gradients
                   sends, and waits as long as a pass takes longer than one without synchronisation, which is
                   measured at the start
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isles
from isles.core.fragments import Fragment, find_layers
from isles.core.island import is_sharded
from isles.train.place import Place
from isles.view.events import EventLog


@dataclass
class Cost:
    """What synchronisation took out of one step."""

    wait_seconds: float = 0.0
    """Waiting for the network."""
    engine_seconds: float = 0.0
    """Everything: waiting, encoding, applying."""
    bytes_sent: int = 0
    bytes_received: int = 0

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class Synchroniser(Protocol):
    """What the loop needs."""

    model: nn.Module
    """Call this one for training."""
    closing_bytes: int
    """Sent after the last step, so that all islands end with the same model; known after `__exit__`."""

    def __enter__(self) -> Synchroniser: ...
    def __exit__(self, *exception: Any) -> None: ...
    def cost_of_step(self, pass_seconds: float) -> Cost:
        """What the step that just ended has cost, of which the forward and backward pass took so long."""
        ...

    def global_model(self) -> AbstractContextManager[nn.Module]: ...
    def state_dict(self, sharded: bool = False) -> dict[str, Any]:
        """Everything; `sharded` is the form that the ranks of an island save together."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def describe(self) -> dict[str, Any]:
        """What of it belongs into the event log: parameters, layers, fragments."""
        ...


class Islands:
    """isles in a training loop, as a user would put it there; a step costs what its counters have grown by."""

    closing_bytes = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: isles.Method,
        place: Place,
        world: Any,
        log: EventLog,
    ) -> None:
        self._plain = self.model = model
        if place.ranks_per_island > 1 and not is_sharded(model):
            self.model = DistributedDataParallel(model, process_group=place.mesh["rank"].get_group())
        self._log, self._place = log, place
        self.diloco = isles.DiLoCo(self.model, optimizer, method, world=world, on_event=self._record)
        self._before = self._spent()

    def __enter__(self) -> Islands:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.diloco.__exit__(*exception)
        self.closing_bytes = self._spent().bytes_sent - self._before.bytes_sent

    def _record(self, event: isles.Event) -> None:
        what: dict[str, Any] = {"step": event.step, "fragment": event.fragment, "round": event.round}
        if event.kind == "send":
            what["num_bytes"] = event.num_bytes
        if event.kind == "apply":
            what.update(seconds=event.seconds, slack_seconds=event.slack_seconds)
        if self._place.is_first_of_island:
            self._log.write(event.kind, island=self._place.island, **what)

    def _spent(self) -> Cost:
        """By all steps so far."""
        stats = self.diloco.stats
        return Cost(stats.wait_seconds, self.diloco.engine_seconds, stats.bytes_sent, stats.bytes_received)

    def cost_of_step(self, pass_seconds: float) -> Cost:
        before, self._before = self._before, self._spent()
        return self._before - before

    def global_model(self) -> AbstractContextManager[nn.Module]:
        return self.diloco.global_model()

    def state_dict(self, sharded: bool = False) -> dict[str, Any]:
        return self.diloco.state_dict(sharded=sharded)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.diloco.load_state_dict(state)
        self._before = self._spent()  # the steps before the checkpoint are part of it

    def describe(self) -> dict[str, Any]:
        return describe(self._plain, self.diloco.fragments)


class DataParallel:
    """torch's DistributedDataParallel, every gradient over the link at every step."""

    closing_bytes = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        place: Place,
        one_pass: Callable[[nn.Module], object],
    ) -> None:
        self._plain, self._optimizer, self._place = model, optimizer, place
        self.model = DistributedDataParallel(model, init_sync=False) if place.world_size > 1 else model
        gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self._bytes_per_step = round(2 * (place.world_size - 1) / place.world_size * gradient_bytes)
        self._pass_seconds_alone = self._measure_alone(one_pass)

    def _measure_alone(self, one_pass: Callable[[nn.Module], object]) -> float:
        """Seconds of a forward and backward pass without synchronisation; gradients are discarded."""
        seconds = []
        for _ in range(4):
            with self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext():
                begin = time.perf_counter()
                one_pass(self.model)
                seconds.append(time.perf_counter() - begin)
            self._optimizer.zero_grad()
        return statistics.median(seconds[1:])

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: Any) -> None:
        if isinstance(error, RuntimeError) and "gloo" in str(error):
            raise isles.LostPeerError(
                f"rank {self._place.rank} lost another one; restart all of them from their last checkpoint"
            ) from error

    def cost_of_step(self, pass_seconds: float) -> Cost:
        together = self._place.world_size > 1
        waited = max(0.0, pass_seconds - self._pass_seconds_alone) if together else 0.0
        return Cost(waited, waited, self._bytes_per_step, self._bytes_per_step)

    def global_model(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._plain)

    def state_dict(self, sharded: bool = False) -> dict[str, Any]:
        return copy.deepcopy({"model": self._plain.state_dict(), "optimizer": self._optimizer.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._plain.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def describe(self) -> dict[str, Any]:
        return {**_size_of(self._plain), "fragments": []}


def describe(model: nn.Module, cut: Sequence[Fragment]) -> dict[str, Any]:
    """A model and its fragments, for the event log."""
    layers, fragments = find_layers(model), []
    for fragment in cut:
        inside = [str(number) for number, layer in enumerate(layers) if set(layer) & set(fragment.names)]
        numel = sum(parameter.numel() for parameter in fragment.parameters)
        fragments.append({"numel": numel, "layers": ",".join(inside) or "outside the layers"})
    return {**_size_of(model), "fragments": fragments}


def _size_of(model: nn.Module) -> dict[str, int]:
    layers, total = find_layers(model), sum(parameter.numel() for parameter in model.parameters())
    named = dict(model.named_parameters())
    inside = sum(named[name].numel() for layer in layers for name in layer if name in named)
    return {"parameters": total, "layers": len(layers), "outside_parameters": total - inside}
