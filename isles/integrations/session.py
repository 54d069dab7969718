"""What the callbacks for trainers share: one DiLoCo from the start of a training to its end.

A trainer evaluates and saves whenever it wants. What it then should see are the global weights, and the island's own
again afterwards, whatever happens in between. Its checkpoints hold these global weights, the inner optimizer and its
own counters; to resume exactly, an island also needs its own weights and the outer state, which `state` gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from isles.core.diloco import DiLoCo
from isles.core.method import Method
from isles.wire.round import RoundWorld
from isles.wire.world import World

SCALARS = ("bytes_sent", "bytes_received", "sends", "applies", "wait_seconds", "islands")
"""What is logged of the statistics, as `isles/NAME`."""
RARE_SCALARS = ("nonfinite_rounds", "excluded_rounds", "catch_up_rounds")
"""What is logged too once it is not zero."""


class Session:
    """A DiLoCo in a trainer; `saved` is what `state` gave, to resume from."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        method: Method,
        world: World | None,
        options: Mapping[str, Any],
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        if saved is not None and method.update == "eager":
            options = {**options, "sync_initial": True}  # checkpoints hold each island's own view of the global weights
        self.diloco = DiLoCo(model, optimizer, method, world=world, **options)
        self._shown, self._showing, self.is_finished, self._is_over = ExitStack(), False, False, False
        self._wrapped: list[tuple[Any, str, Any]] = []
        if saved is not None:
            try:
                self._load(saved)
            except BaseException as error:
                self.leave(error)
                raise
        self.first_step = self.diloco.step_count

    # ---- while it trains

    def follow(self, steps: int) -> None:
        """Counts optimizer steps that a GradScaler skipped: the trainer has come to so many since the session began."""
        while self.diloco.step_count - self.first_step < steps:
            self.diloco.skip_step()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """The global weights in the model; may be used inside itself."""
        if self._showing or self._is_over:
            yield
            return
        self._showing = True
        try:
            with self._shown:
                self._shown.enter_context(self.diloco.global_model())
                yield
        finally:
            self._showing = False

    def scalars(self) -> dict[str, float]:
        stats = self.diloco.stats
        names = (*SCALARS, *(name for name in RARE_SCALARS if stats[name]))
        return {f"isles/{name}": stats[name] for name in names}

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Until the session ends, `owner.name(...)` is `around(the method, ...)`."""
        method = getattr(owner, name)
        self._wrapped.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, functools.wraps(method)(functools.partial(around, method)))

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint of the trainer lacks. For the island's own weights, the global ones step aside."""
        self._shown.close()
        try:
            return self.diloco.state_dict(replica="weights")
        finally:
            if self._showing:
                self._shown.enter_context(self.diloco.global_model())

    def _load(self, saved: Mapping[str, Any]) -> None:
        island, fixed = saved.get("island"), isinstance(self.diloco.world, RoundWorld)
        if fixed and island != self.diloco.world.rank:
            raise ValueError(
                f"the checkpoint is of island {island}, this is island {self.diloco.world.rank}: give each island a "
                "folder of its own for checkpoints, and resume each from its own"
            )
        self.diloco.load_state_dict(dict(saved))

    # ---- the end

    def finish(self) -> None:
        """Leaves the identical global model, with every step in it, on every island. Once is enough."""
        if not self.is_finished:
            self.diloco.finish()
            self.is_finished = True

    def close(self) -> None:
        """After a training that has come to its end."""
        self._unwrap()
        self.diloco.close()

    def leave(self, error: BaseException) -> None:
        """After one that has not: the other islands learn it at once."""
        self._unwrap()
        self.diloco.__exit__(type(error), error, None)

    def _unwrap(self) -> None:
        self._is_over = True
        for owner, name, before in reversed(self._wrapped):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._wrapped.clear()


def load_state(path: str) -> dict[str, Any]:
    """What `state` gave, from a file."""
    return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
