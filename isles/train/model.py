"""The papers' decoder: a plain pre-norm transformer with QK-norm, a non-gated MLP four times as wide, tied embeddings.

Positions are rotary (RoPE). The papers do not say; rotary needs no parameters, so nothing depends on the
longest sequence, and it is relative, which is right for packed documents: a document reads the same wherever
in the sequence it starts. Queries and keys are normalised per head before the rotation, which keeps attention
logits bounded and the large learning rates of small models stable; the z-loss does the same for the output.

`LADDER` holds the papers' sizes from 35M to 4B and a few below them that a CPU can train.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_SIZE = 64
"""Of the papers' models. Smaller models here use smaller heads."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a decoder. `width` is d_model; the MLP is four times as wide."""

    layers: int
    heads: int
    width: int

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"width={self.width} must be an even multiple of heads={self.heads}: every head gets width / heads"
            )


LADDER = {
    "nano": Shape(layers=2, heads=2, width=32),
    "micro": Shape(layers=4, heads=4, width=64),
    "mini": Shape(layers=6, heads=4, width=128),
    "small": Shape(layers=6, heads=4, width=256),
    "35M": Shape(layers=6, heads=8, width=512),
    "100M": Shape(layers=9, heads=12, width=768),
    "200M": Shape(layers=12, heads=16, width=1024),
    "300M": Shape(layers=15, heads=20, width=1280),
    "500M": Shape(layers=18, heads=24, width=1536),
    "1B": Shape(layers=24, heads=32, width=2048),
    "4B": Shape(layers=36, heads=48, width=3072),
}


class Decoder(nn.Module):
    """Tokens in, logits out.

    >>> Decoder(LADDER["nano"], vocabulary=257)(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 257])
    """

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.shape, self.vocabulary = shape, vocabulary
        self.embed = nn.Embedding(vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self._initialise()

    def _initialise(self) -> None:
        """Small normal weights; what is added to the residual stream is smaller the more layers add to it."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 if name.startswith("embed") else parameter.shape[1] ** -0.5
                if name.endswith(("out.weight", "down.weight")):
                    scale /= (2 * self.shape.layers) ** 0.5
                nn.init.normal_(parameter, std=scale)

    def forward(self, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
        """`segments` numbers the documents in each sequence; tokens do not look into other documents."""
        mask = None if segments is None else _mask(segments)
        rotation = _rotation(inputs.shape[1], self.shape.width // self.shape.heads, inputs.device)
        x = self.embed(inputs)
        for layer in self.layers:
            x = layer(x, rotation, mask)
        return F.linear(self.norm(x), self.embed.weight)


class Layer(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Attention(nn.Module):
    """Causal self-attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.query_norm = nn.RMSNorm(shape.width // shape.heads)
        self.key_norm = nn.RMSNorm(shape.width // shape.heads)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = _rotate(self.query_norm(q), rotation), _rotate(self.key_norm(k), rotation)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def language_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats over targets that are not -100, plus z_loss times the mean squared log-partition."""
    flat, wanted = logits.float().view(-1, logits.shape[-1]), targets.reshape(-1)
    loss = F.cross_entropy(flat, wanted, ignore_index=-100)
    if z_loss:
        loss = loss + z_loss * flat.logsumexp(-1)[wanted != -100].square().mean()
    return loss


def build_model(name: str, vocabulary: int) -> nn.Module:
    """A model of the ladder, or a Hugging Face one ("hf:...")."""
    if name.startswith("hf:"):
        from isles.train.huggingface import load

        return load(name.removeprefix("hf:"), vocabulary)
    if name not in LADDER:
        raise ValueError(f"--model {name} is not known: choose one of {', '.join(LADDER)}, or hf:NAME")
    return Decoder(LADDER[name], vocabulary)


def _mask(segments: Tensor) -> Tensor:
    """[batch, 1, length, length]: which token may look at which: earlier ones of its own document."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return (same & torch.ones(length, length, dtype=torch.bool, device=segments.device).tril())[:, None]


def _rotation(length: int, head_size: int, device: torch.device) -> Tensor:
    """[2, length, head_size / 2]: cosine and sine of position times frequency."""
    frequencies = 10000.0 ** -(torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns each pair (first half, second half) of a head by its angle."""
    cosine, sine = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
