"""An island's own copy of the model: what is trained here, and what a checkpoint has to bring back.

Trainable parameters are seen through the fragments. Besides them there are frozen parameters, which all islands must
have alike, buffers such as BatchNorm statistics, and the inner optimizer, whose state never leaves the island.

What takes part is fixed when a DiLoCo is made. A parameter that is unfrozen, frozen, replaced or parametrised later
would be left out without anybody noticing, so the set is compared before every send.
"""

from __future__ import annotations

import copy
import itertools
import operator
from typing import Any

import torch
from torch import Tensor, nn

from isles.core.fragments import Fragment, clean_name, trainable_parameters, unwrap
from isles.core.island import Island, local
from isles.wire.packing import is_finite


class Replica:
    """The model and the inner optimizer of one island."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, fragments: list[Fragment], island: Island
    ) -> None:
        self.optimizer, self.fragments, self.island = optimizer, fragments, island
        self._model = unwrap(model)
        self._structure = _Structure(self._model)
        self._checked_step = -(1 << 30)
        self._good_buffers: dict[str, Tensor] = {}
        """The float buffers as they were when they were last seen to be finite."""
        self.remember_buffers()

    def check_trainable(self, step: int | None = None, sync_every: int = 1) -> None:
        """Raises ValueError if a parameter has been frozen, unfrozen, replaced or added since the DiLoCo was made.
        Given the step, it looks at most eight times in a period: with many small fragments it would show.
        """
        if step is not None and step - self._checked_step < sync_every / 8:
            return
        self._checked_step = self._checked_step if step is None else step
        if self._structure.is_as_it_was():
            return
        then = {name: parameter for fragment in self.fragments for name, parameter in fragment.named()}
        now = trainable_parameters(self._model)
        for name in [*then, *(name for name in now if name not in then)]:
            if then.get(name) is not now.get(name):
                what = "has been replaced" if name in then else "is new or newly trainable"
                what = what if name in now else "is no longer trainable"
                what = f"the parameter {name} {what} since this DiLoCo was made, and islands would not synchronise it"
                todo = "change the model first, then make the DiLoCo (to go on, close this one and make another)"
                raise ValueError(f"{what}: {todo}")
        self._structure = _Structure(self._model)  # what has changed is no affair of ours

    # ---- tensors that are not trained here

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that no island trains, as this rank holds them."""
        return {clean_name(name): local(p) for name, p in self._model.named_parameters() if not p.requires_grad}

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a checkpoint of the model holds, not those that it computes for itself (masks, tables)."""
        named = {clean_name(name): local(buffer) for name, buffer in self._model.named_buffers()}
        kept = {clean_name(name) for name in self._model.state_dict(keep_vars=True)}
        return {name: buffer for name, buffer in named.items() if name in kept}

    def trained(self) -> dict[str, Tensor]:
        """Trainable parameters, as this rank holds them."""
        return {n: t for part in self.fragments for n, t in zip(part.names, part.tensors(), strict=True)}

    # ---- recovery from what is not finite

    def remember_buffers(self) -> None:
        """Keeps a copy of the float buffers that are finite, to go back to. A device chooses for itself: the host does
        not wait.
        """
        if not any(map(torch.is_floating_point, self._model.buffers())):
            return  # the names of those that a checkpoint holds take a while to find
        for name, buffer in self.buffers().items():
            if not buffer.is_floating_point():
                continue
            if not buffer.is_cpu and name in self._good_buffers:
                good = self._good_buffers[name]
                torch.where(torch.isfinite(buffer).all(), buffer, good, out=good)
            elif not buffer.is_cpu or is_finite(buffer):
                self._good_buffers[name] = buffer.clone()

    def heal(self) -> None:
        """Resets what is not finite: buffers to when they were, moments of the optimizer to zero (a NaN stays NaN).

        All of a parameter's moments, not only the entries that are not finite: without its second moment, what is left
        of the first would make an enormous step.
        """
        for name, buffer in self.buffers().items():
            if name in self._good_buffers and not is_finite(buffer):
                buffer.copy_(self._good_buffers[name])
        # In the order of the groups, which is the same on all ranks of the island; which of them have a state is not.
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states = [self.optimizer.state.get(parameter, {}).values() for parameter in parameters]
        moments_of = [[local(v) for v in state if isinstance(v, Tensor) and v.is_floating_point()] for state in states]
        broken = self.island.any([not all(map(is_finite, moments)) for moments in moments_of])
        for moment in itertools.chain.from_iterable(itertools.compress(moments_of, broken)):
            if moment.dim() > 0:  # a count of steps stays
                moment.zero_()

    # ---- checkpoints

    def state_dict(self, sharded: bool = False, *, with_optimizer: bool = True) -> dict[str, Any]:
        """A copy of everything, on the CPU; `sharded` is the form that the ranks of an island save together."""
        if sharded:
            from torch.distributed.checkpoint.state_dict import get_state_dict

            model, optimizer = get_state_dict(self._model, self.optimizer if with_optimizer else ())
            return copy.deepcopy({"model": model, "optimizer": optimizer})
        moments = self.optimizer.state_dict() if with_optimizer else None
        return host_copy({"parameters": self.trained(), "buffers": self.buffers(), "optimizer": moments})

    def load_state_dict(self, state: dict[str, Any], sharded: bool = False) -> None:
        """All or nothing: what does not fit is found before anything is changed."""
        if sharded:
            from torch.distributed.checkpoint.state_dict import set_state_dict

            weights, moments = state["model"], state["optimizer"]
            optimizers = self.optimizer if moments else ()
            set_state_dict(self._model, optimizers, model_state_dict=weights, optim_state_dict=moments)
            return
        if not {"parameters", "buffers", "optimizer"} <= state.keys():
            raise ValueError("this is not a state of isles.DiLoCo: a part of the replica is missing")
        own, saved = {**self.trained(), **self.buffers()}, {**state["parameters"], **state["buffers"]}
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in saved.items()}:
            raise ValueError("the checkpoint is of another model: its parameters or buffers have other names or shapes")
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for name, tensor in own.items():
            tensor.copy_(saved[name])


class _Structure:
    """Which modules and parameters a model has, and which of them are trainable, to be compared in microseconds.
    FSDP2 puts gathered parameters in the place of its shards now and then, so of those only `requires_grad` counts.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._dicts = [each for module in modules for each in (module._parameters, module._modules)]
        self._sizes = list(map(len, self._dicts))
        places = [(each, name, value) for each in self._dicts for name, value in each.items()]
        plain = [place for place in places if isinstance(place[2], nn.Module) or type(place[2]) is nn.Parameter]
        self._places = tuple(zip(*plain, strict=True)) or ((), (), ())
        self._parameters = [value for _, _, value in places if isinstance(value, Tensor)]
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def is_as_it_was(self) -> bool:
        holders, names, values = self._places
        return (
            list(map(len, self._dicts)) == self._sizes
            and all(map(operator.is_, map(dict.get, holders, names), values))
            and [parameter.requires_grad for parameter in self._parameters] == self._trainable
        )


def host_copy(value: Any) -> Any:
    """The same with every tensor copied to the CPU, one at a time; containers are new."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: host_copy(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(host_copy(each) for each in value)
    return copy.deepcopy(value)
