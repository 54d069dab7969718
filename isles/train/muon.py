"""Muon: every step of a matrix is made orthogonal, so that it moves in all directions equally (Jordan et al., 2024).

    momentum   m = 0.95 m + g, and the step is taken from g + 0.95 m (Nesterov)
    direction  U V' of the step U S V', by five Newton-Schulz iterations: only products of matrices
    length     0.2 sqrt(larger side): the root mean square of an AdamW step, so that AdamW's learning rate fits

Matrices inside layers take it. Embeddings, norms and everything outside layers keep AdamW, in groups of their own. One
optimizer for both, so that the engine has one to hook and a checkpoint one to keep.

Islands that average weights gain more from Muon than a single machine does (docs/log.md; `isles reproduce recipe`).
Matrices of one shape are stacked and multiplied together, in bf16 on a GPU and in fp32 elsewhere. A sharded
matrix cannot be made orthogonal from one shard, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isles.core.fragments import find_layers, trainable_parameters, unwrap

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5, which drives all singular values into 0.7 to 1.2 from as little as 0.001."""


class Muon(torch.optim.Optimizer):
    """Muon for the groups that have `orthogonal=True`, AdamW for the others.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
    >>> [(len(group["params"]), group["orthogonal"]) for group in Muon(groups_of(model), lr=1e-3).param_groups]
    [(2, True), (3, False)]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "orthogonal": False}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["orthogonal"] and (parameter.dim() != 2 or hasattr(parameter, "placements")):
                    raise ValueError(
                        f"Muon needs whole matrices, not {'shards' if parameter.dim() == 2 else 'vectors'}: "
                        "keep each rank's copy whole (--inside ddp), or use AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            (self._orthogonal_steps if group["orthogonal"] else self._adamw_steps)(group, trained)
        return loss

    def _orthogonal_steps(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        shapes: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
        for parameter in trained:
            shapes.setdefault((parameter.shape, parameter.device), []).append(parameter)
        for (shape, _), alike in shapes.items():
            steps = orthogonal(torch.stack([self._nesterov(parameter) for parameter in alike]))
            length = group["lr"] * 0.2 * max(shape) ** 0.5
            for parameter, step in zip(alike, steps, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(step, alpha=-length)

    def _nesterov(self, parameter: Tensor) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].mul_(MOMENTUM).add_(gradient)
        return gradient.add(momentum, alpha=MOMENTUM)

    def _adamw_steps(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        for parameter in trained:
            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            if not state:
                state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
            state["step"] += 1
            mean = state["mean"].lerp_(gradient, 1 - beta1)
            square = state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            spread = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.addcdiv_(mean, spread, value=-lr / (1 - beta1 ** state["step"]))


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrix of each in a stack, roughly: singular values end between 0.7 and 1.2.

    >>> values = torch.linalg.svdvals(orthogonal(torch.randn(3, 16, 32, generator=torch.manual_seed(0))))
    >>> bool(values.sub(1).abs().max() < 0.4)
    True
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The matrices inside the layers of a model, and the rest: what `Muon` takes."""
    named = list(trainable_parameters(model).items())
    layers = {name for layer in find_layers(unwrap(model)) for name in layer}
    inside = {name for name, parameter in named if parameter.dim() == 2 and name in layers}
    if not inside:
        raise ValueError("no layers with matrices were found in this model, which is what Muon is for: use AdamW")
    return [
        {"params": [parameter for name, parameter in named if (name in inside) == wanted], "orthogonal": wanted}
        for wanted in (True, False)
    ]
