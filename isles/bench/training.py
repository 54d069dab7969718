"""What is trained: a stack of residual layers of equal size with AdamW, in a plain loop.

The optimizer is the fused one, which is the fastest and takes no memory for intermediate values: the bare loop is as
good as PyTorch makes it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """x + tanh(W x): any number of them can be stacked, and values stay of the same size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + torch.tanh(self.linear(x))
        return total


def stack(parameters: int, layers: int) -> nn.Sequential:
    """A model of about so many parameters.

    >>> sum(parameter.numel() for parameter in stack(10_000, 4).parameters())
    9216
    """
    width = max(8, int((parameters / layers) ** 0.5) // 8 * 8)
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


class Training:
    """A model, its optimizer, and one batch, the same in every step."""

    def __init__(self, parameters: int, layers: int, rows: int) -> None:
        self.model = stack(parameters, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        width = next(self.model.parameters()).shape[1]
        self.batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> None:
        """One inner step, the optimizer's hooks included."""
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
