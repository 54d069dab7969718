"""An island's own copy of the model: what is trained here, and what a checkpoint has to bring back.

Parameters are seen through the fragments; besides them there are frozen parameters, which all islands must
have alike, buffers such as BatchNorm statistics, and the inner optimizer, whose state never leaves the
island."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from isles.core.fragments import Fragment, clean_name, unwrap


class Replica:
    """The model and the inner optimizer of one island."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, fragments: list[Fragment]) -> None:
        self.optimizer = optimizer
        self.fragments = fragments
        self.frozen = Fragment((clean_name(n), p) for n, p in unwrap(model).named_parameters() if not p.requires_grad)
        self._model = unwrap(model)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a checkpoint of the model holds; those that a model computes for itself (masks,
        tables) are left out.
        """
        named = {clean_name(name): buffer for name, buffer in self._model.named_buffers()}
        kept = {clean_name(name) for name in self._model.state_dict(keep_vars=True)}
        return {name: buffer for name, buffer in named.items() if name in kept}

    def heal_optimizer(self) -> None:
        """Zeroes what is not finite in the optimizer's state: a moment that is NaN stays NaN for ever."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    torch.nan_to_num_(value, nan=0.0, posinf=0.0, neginf=0.0)

    def state_dict(self) -> dict[str, Any]:
        parameters = {
            name: tensor.clone()
            for fragment in self.fragments
            for name, tensor in zip(fragment.names, fragment.tensors(), strict=True)
        }
        buffers = {name: buffer.clone() for name, buffer in self.buffers().items()}
        return {"parameters": parameters, "buffers": buffers, "optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for fragment in self.fragments:
            for name, tensor in zip(fragment.names, fragment.tensors(), strict=True):
                tensor.copy_(state["parameters"][name])
        for name, buffer in self.buffers().items():
            buffer.copy_(state["buffers"][name])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
