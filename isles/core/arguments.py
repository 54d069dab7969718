"""What `DiLoCo` accepts, and what it says to anything else."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from isles.core.fragments import some_of, trainable_parameters
from isles.core.method import Method
from isles.core.outer import MAKE_OPTIMIZER
from isles.wire.message import check_byte_order

optimizers_in_use: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have an open DiLoCo: with two of them every step would count twice."""


def unwrap_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer whose `step` can be hooked: the one inside a wrapper, such as accelerate's."""
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_post_hooks") and hasattr(inner, "param_groups"):
        inner = getattr(inner, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "_optimizer_step_post_hooks"):
        wanted = "a torch.optim.Optimizer, or a wrapper that has one as .optimizer"
        raise ValueError(f"optimizer must be {wanted}, not {type(optimizer).__name__}")
    return inner


def check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, weight: float) -> None:
    """Raises ValueError, with what to do about it, unless these go together."""
    check_byte_order()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(method, Method):
        raise ValueError(f"method must be an isles.Method, such as isles.Method.streaming(), not {method!r}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < 1e300:
        raise ValueError(f"weight={weight!r} must be a number greater than 0: this island's share in the mean")
    if optimizer in optimizers_in_use:
        raise ValueError("this optimizer already has a DiLoCo: close() that, or leave its with block, to make another")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = trainable_parameters(model)
    if unreal := [name for name, parameter in trained.items() if parameter.is_meta]:
        raise ValueError(
            f"{unreal[0]} is on the meta device and has no values: move the model, model.to_empty(device=...)"
        )
    if missing := [name for name, parameter in trained.items() if id(parameter) not in held]:
        what = f"the optimizer does not hold these trainable parameters of the model: {some_of(missing)}"
        raise ValueError(f"{what}; make it from this model's parameters, or freeze them")


def check_options(world: object, sync_initial: object, on_event: object, outer_optimizer: object) -> None:
    """The same for what may be left out."""
    parts = ("rank", "size", "start", "gather")
    if world is not None and (isinstance(world, type) or not all(hasattr(world, part) for part in parts)):
        raise ValueError(f"world={world!r} must be a world, such as isles.TorchWorld(), or None for the default one")
    if not isinstance(sync_initial, bool):
        raise ValueError(f"sync_initial={sync_initial!r} must be True or False")
    if on_event is not None and not callable(on_event):
        raise ValueError(f"on_event={on_event!r} must be a function that takes an isles.Event, or None")
    if outer_optimizer is not None and not callable(outer_optimizer):
        raise ValueError(f"outer_optimizer={outer_optimizer!r} must be {MAKE_OPTIMIZER}, or None for the method's own")


def check_overlap(overlap: int | None, method: Method) -> int:
    """The overlap of this island: its own, or the method's."""
    if overlap is None:
        return method.overlap
    whole = isinstance(overlap, int) and not isinstance(overlap, bool)
    if method.update != "fresh" or not whole or not 0 <= overlap < method.sync_every:
        wanted = f"a whole number from 0 to sync_every - 1 = {method.sync_every - 1}, with update='fresh'"
        raise ValueError(f"overlap={overlap!r} of this island must be {wanted}; leave it out to take the method's")
    return overlap


def check_device(device: str | torch.device | None) -> torch.device | None:
    """The device that outer state is kept on; None: the model's."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"outer_device={device!r} must be a device, such as 'cpu', or None") from None
