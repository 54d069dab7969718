"""A model whose passes take a given time and next to no computation: what `isles.lab.timed` trains.

    model        an embedding and L layers, each one flat vector; N parameters together
    forward      T/3, spread evenly over the layers
    backward     2T/3, layer by layer from the last: torch's DistributedDataParallel sees gradients arrive one after the
                 other and overlaps their all-reduce with the rest of the pass, as on an accelerator
    optimizer    SGD on one slice of every vector, the next slice at every step

Sleeping is until a deadline, not for a duration: what Python does between two sleeps counts as compute, up to T, and
so does what it does after the passes (`Pace.has_worked`). A pass that ends late, because the cores are busy with other
islands just then, makes the next step shorter by that, up to T: an accelerator of one's own would have been done in
time, with the next step in its queue. What isles does in the loop, or waits for, comes on top.

The gradient of a slice is random, another on every island, so outer gradients are real numbers; after `SLICES` steps
every parameter has moved. Touching all parameters at every step instead, as a real optimizer does, would keep a core
busy: that is an accelerator's work, and it is in T.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SLICES = 100
"""Into how many slices a vector is cut, of which one is trained at each step."""


class Pace:
    """How far a step has come, and how far it should be."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.step = 0
        self.late_seconds = 0.0
        """How late passes have ended so far, all together: what later steps have made up for."""
        self._clock, self._sleep = clock, sleep
        self._deadline = self._passed = self._asked_seconds = self._ahead_seconds = 0.0

    def begin(self, step: int, at: float) -> None:
        """Step `step` (from 1) has begun at a time of the clock."""
        late = min(max(0.0, self._passed - self._deadline), self._asked_seconds)
        self.late_seconds += late
        self.step, self._deadline = step, at - self._ahead_seconds - late
        self._passed, self._asked_seconds, self._ahead_seconds = at, 0.0, 0.0

    def has_worked(self, seconds: float) -> None:
        """So much was done outside the passes: the next step sleeps less."""
        self._ahead_seconds += seconds

    def work(self, seconds: float) -> None:
        """Returns when the step has lasted so much longer; at once if it has already."""
        self._deadline += seconds
        self._asked_seconds += seconds
        left = self._deadline - self._clock()
        if left > 0:
            self._sleep(left)
        self._passed = self._clock()

    def slice_of(self, numel: int) -> slice:
        """The part of a vector that is trained at this step."""
        size = -(-numel // SLICES)
        first = (self.step - 1) % SLICES * size
        return slice(min(first, numel), min(first + size, numel))


class TimedLayer(nn.Module):
    """One flat vector whose forward and backward pass take a given time."""

    def __init__(self, numel: int, seconds: float, pace: Pace, pattern: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.pace, self.forward_seconds, self.backward_seconds = pace, seconds / 3, seconds * 2 / 3
        self._gradient, self._pattern = torch.zeros(numel), pattern

    def forward(self, x: Tensor) -> Tensor:
        return _Timed.apply(x, self.weight, self)  # type: ignore[no-any-return]

    def gradient(self) -> Tensor:
        """The gradient of the weights at this step: random in the slice that is trained, of no account elsewhere.

        Always the same memory behind a new tensor, which autograd takes as it is: nothing is copied.
        """
        part = self._gradient[self.pace.slice_of(self._gradient.numel())]
        part.copy_(self._pattern[: part.numel()])
        return self._gradient.detach()


class _Timed(torch.autograd.Function):
    """Passes its input on, and takes its time."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, layer: TimedLayer) -> Tensor:  # type: ignore[override]
        context.layer = layer
        layer.pace.work(layer.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        context.layer.pace.work(context.layer.backward_seconds)
        return upstream, context.layer.gradient(), None


class TimedModel(nn.Module):
    """An embedding, which takes no time, and a stack of layers; all of the same size, as nearly as can be."""

    def __init__(self, *, parameters: int, layers: int, step_seconds: float, seed: int, island: int) -> None:
        super().__init__()
        self.pace = Pace()
        numel = parameters // (layers + 1)
        outside = parameters - layers * numel
        generator = torch.Generator().manual_seed(seed * 1_000_003 + island)
        pattern = torch.randn(-(-outside // SLICES), generator=generator)
        self.embed = TimedLayer(outside, 0.0, self.pace, pattern)
        self.layers = nn.ModuleList(TimedLayer(numel, step_seconds / layers, self.pace, pattern) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class SliceSGD(torch.optim.Optimizer):
    """SGD that reads and writes only the slice whose turn it is."""

    def __init__(self, model: TimedModel, learning_rate: float = 1e-3) -> None:
        super().__init__(model.parameters(), {"lr": learning_rate})
        self._pace = model.pace

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                part = self._pace.slice_of(parameter.numel())
                parameter[part].add_(parameter.grad[part], alpha=-group["lr"])
