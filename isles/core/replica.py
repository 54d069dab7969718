"""An island's own copy of the model: what is trained here, and what a checkpoint has to bring back.

Parameters are seen through the fragments; besides them there are frozen parameters, which all islands must
have alike, buffers such as BatchNorm statistics, and the inner optimizer, whose state never leaves the
island.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from isles.core.fragments import Fragment, clean_name, unwrap
from isles.wire.island import Island, local
from isles.wire.packing import is_finite


class Replica:
    """The model and the inner optimizer of one island."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, fragments: list[Fragment], island: Island
    ) -> None:
        self.optimizer = optimizer
        self.fragments = fragments
        self.frozen = Fragment(
            ((clean_name(n), p) for n, p in unwrap(model).named_parameters() if not p.requires_grad), island
        )
        self._model = unwrap(model)
        self._island = island

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a checkpoint of the model holds; those that a model computes for itself (masks,
        tables) are left out.
        """
        named = {clean_name(name): buffer for name, buffer in self._model.named_buffers()}
        kept = {clean_name(name) for name in self._model.state_dict(keep_vars=True)}
        return {name: buffer for name, buffer in named.items() if name in kept}

    def heal_optimizer(self) -> None:
        """Forgets the optimizer's state of a parameter where it is not finite: a moment that is NaN stays NaN.

        All of a parameter's state, not only the entries that are not finite: without its second moment, what is left of
        the first would make an enormous step.
        """
        moments_of = [
            [local(value) for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
            for state in self.optimizer.state.values()
        ]
        astray = self._island.any([not all(map(is_finite, moments)) for moments in moments_of])
        for moment in itertools.chain.from_iterable(itertools.compress(moments_of, astray)):
            if moment.dim() > 0:  # a count of steps stays
                moment.zero_()

    def state_dict(self, sharded: bool = False) -> dict[str, Any]:
        """A copy of everything; `sharded` is the form that the ranks of an island save together."""
        if sharded:
            from torch.distributed.checkpoint.state_dict import get_state_dict

            model, optimizer = get_state_dict(self._model, self.optimizer)
            return copy.deepcopy({"model": model, "optimizer": optimizer})
        parameters = {
            name: tensor.clone()
            for fragment in self.fragments
            for name, tensor in zip(fragment.names, fragment.tensors(), strict=True)
        }
        buffers = {name: buffer.clone() for name, buffer in self.buffers().items()}
        return {"parameters": parameters, "buffers": buffers, "optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any], sharded: bool = False) -> None:
        """All or nothing: what does not fit is found before anything is changed."""
        if sharded:
            from torch.distributed.checkpoint.state_dict import set_state_dict

            weights, moments = state["model"], state["optimizer"]
            set_state_dict(self._model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
            return
        if not {"parameters", "buffers", "optimizer"} <= state.keys():
            raise ValueError("this is not a state of isles.DiLoCo (version 1): a part of the replica is missing")
        own, saved = self._tensors(), {**state["parameters"], **state["buffers"]}
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in saved.items()}:
            raise ValueError("the checkpoint is of another model: its parameters or buffers have other names or shapes")
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for name, tensor in own.items():
            tensor.copy_(saved[name])

    def _tensors(self) -> dict[str, Tensor]:
        parameters = {n: t for part in self.fragments for n, t in zip(part.names, part.tensors(), strict=True)}
        return {**parameters, **self.buffers()}
