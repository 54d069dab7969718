"""The engine leaves the user's loop alone: gradient accumulation, schedulers, clipping, any optimizer, any precision.

Each loop is compared with DiLoCo written by hand around the same loop (`by_hand`), bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isles
from tests.reference import same, toy_backward, weights_of

torch.set_num_threads(1)
EVERY, STEPS = 3, 9


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 2)).to(dtype)


def loss_of(model: nn.Module, island: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * island + step)
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype))


class Loop:
    """A user's training loop: an optimizer, and what is done in one step. The variants are below."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Called once, after the engine has been made."""

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, island: int, step: int) -> None:
        loss_of(model, island, step).backward()
        optimizer.step()
        optimizer.zero_grad()


class Accumulation(Loop):
    def step(self, model, optimizer, island, step):
        for part in range(4):
            (loss_of(model, island, 4 * step + part) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


class Clipping(Loop):
    def step(self, model, optimizer, island, step):
        loss_of(model, island, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


class SchedulerMadeAfter(Loop):
    def prepare(self, model, optimizer):
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(self, model, optimizer, island, step):
        super().step(model, optimizer, island, step)
        self.scheduler.step()


class SchedulerMadeBefore(SchedulerMadeAfter):
    def optimizer(self, model):
        optimizer = super().optimizer(model)
        SchedulerMadeAfter.prepare(self, model, optimizer)
        return optimizer

    def prepare(self, model, optimizer):
        pass


class Closure(Loop):
    def step(self, model, optimizer, island, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, island, step)
            loss.backward()
            return loss

        optimizer.step(closure)


class Groups(Loop):
    def optimizer(self, model):
        *body, head = model
        inner = [p for layer in body for p in layer.parameters()]
        return torch.optim.AdamW([{"params": inner, "weight_decay": 0.0}, {"params": head.parameters(), "lr": 0.05}])


class Made(Loop):
    """Any optimizer of torch."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.kind, self.options = kind, options

    def optimizer(self, model):
        return self.kind(model.parameters(), **self.options)


LOOPS: dict[str, Callable[[], Loop]] = {
    "accumulation": Accumulation,
    "clipping": Clipping,
    "scheduler made after": SchedulerMadeAfter,
    "scheduler made before": SchedulerMadeBefore,
    "closure": Closure,
    "groups": Groups,
    "fused AdamW": lambda: Made(torch.optim.AdamW, fused=True),
    "foreach AdamW": lambda: Made(torch.optim.AdamW, foreach=True),
    "fused SGD": lambda: Made(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "foreach SGD": lambda: Made(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "L-BFGS": lambda: type("", (Closure,), {"optimizer": lambda _, model: torch.optim.LBFGS(model.parameters())})(),
}


def with_isles(make_loop: Callable[[], Loop], method: isles.Method, dtype: torch.dtype = torch.float32) -> list[Any]:
    """For each of two islands: the weights after every step, and the outer state at the end."""

    def island(world):
        model, loop, trajectory = net(dtype), make_loop(), []
        optimizer = loop.optimizer(model)
        with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
            loop.prepare(model, optimizer)
            for step in range(STEPS):
                loop.step(model, optimizer, world.rank, step)
                trajectory.append(weights_of(model))
            assert diloco.step_count == STEPS, "an outer step counts calls of optimizer.step(), nothing else"
        return trajectory, diloco.state_dict(replica=False)

    return isles.run_local(island, 2)


def by_hand(make_loop: Callable[[], Loop], lr: float, momentum: float, dtype: torch.dtype = torch.float32) -> Any:
    """DiLoCo around the same loop: the weights of both islands after every step, and the fp32 anchors at the end."""
    models, loops = [net(dtype), net(dtype)], [make_loop(), make_loop()]
    optimizers = [loop.optimizer(model) for loop, model in zip(loops, models, strict=True)]
    anchors = [parameter.detach().float() for parameter in net(dtype).parameters()]
    velocities = [torch.zeros_like(anchor) for anchor in anchors]
    trajectory: list[list[dict[str, torch.Tensor]]] = []
    for loop, model, optimizer in zip(loops, models, optimizers, strict=True):
        loop.prepare(model, optimizer)
    for step in range(STEPS):
        for rank in range(2):
            loops[rank].step(models[rank], optimizers[rank], rank, step)
        if (step + 1) % EVERY == 0:
            for anchor, velocity, one, two in zip(anchors, velocities, *(m.parameters() for m in models), strict=True):
                mean = ((anchor - one.detach().float()) + (anchor - two.detach().float())) / 2
                velocity.mul_(momentum).add_(mean)
                anchor.sub_((mean + momentum * velocity) * lr)
                one.data.copy_(anchor)
                two.data.copy_(anchor)
        trajectory.append([weights_of(model) for model in models])
    return trajectory, anchors


@pytest.mark.parametrize("name", LOOPS)
def test_any_loop_and_any_optimizer(name):
    method = isles.Method.diloco(sync_every=EVERY)
    expected, _ = by_hand(LOOPS[name], method.outer_lr, method.outer_momentum)
    for rank, (trajectory, _) in enumerate(with_isles(LOOPS[name], method)):
        for step in range(STEPS):
            assert same(trajectory[step], expected[step][rank]), f"island {rank}, step {step + 1}"


def test_outer_arithmetic_is_fp32_for_parameters_in_bf16():
    method = isles.Method.diloco(sync_every=EVERY)
    expected, anchors = by_hand(Loop, method.outer_lr, method.outer_momentum, torch.bfloat16)
    for rank, (trajectory, state) in enumerate(with_isles(Loop, method, torch.bfloat16)):
        for step in range(STEPS):
            assert same(trajectory[step], expected[step][rank]), f"island {rank}, step {step + 1}"
        anchor = state["fragments"][0]["anchor"]
        assert anchor.dtype == torch.float32
        assert torch.equal(anchor, torch.cat([anchor.reshape(-1) for anchor in anchors]))
        assert not torch.equal(anchor, anchor.bfloat16().float()), "it has digits that bf16 cannot hold"


def test_parameters_of_different_precision_live_in_one_fragment():
    def island(world):
        model = net()
        model[2].to(torch.bfloat16)
        model[4].to(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with isles.DiLoCo(model, optimizer, isles.Method.diloco(sync_every=2), world=world):
            for step in range(1, 5):
                toy_backward(model, world.rank, step)
                optimizer.step()
        return weights_of(model)

    one, two = isles.run_local(island, 2)
    assert same(one, two)
    assert [value.dtype for value in one.values()] == [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float64] * 2
