"""What one round costs on a real link: bytes, hops, seconds.

An exchange of `TorchWorld` is headers first, so that nobody sends a body that the others do not expect, then bodies.
Background threads encode what is to be sent, average, and read what has come. While a round is held up by any of this,
or by latency, the next ones have the link.

    all-gather       header and body go to everybody: M - 1 payloads out of every island, and into it
    reduce-scatter   every island gets its piece of each payload, averages it, sends the mean: 2 (M - 1) / M payloads
    data-parallel    a ring all-reduce of gradients in fp32: 2 (M - 1) / M times the gradients

Bytes are those of `isles.wire.reduction.traffic`, asked with payloads that take no memory. TCP over Ethernet turns
1,448 bytes of them into 1,514 on the wire, and since as much comes in as goes out, 66 more go out for every second
frame that came in, to acknowledge it. Seconds are bytes over the slowest direction of the slowest link; a round is
held up by one latency for every hop that has to wait for the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isles.plan.coding import Coding
from isles.plan.simulate import Seconds

if TYPE_CHECKING:
    from isles.core.method import Update
    from isles.wire.reduction import Reduction
    from isles.wire.world import Payload

FRAMING = (1514 + 66 / 2) / 1448
"""Bytes on the wire per byte of payload: headers of Ethernet, IP and TCP (with time stamps), and acknowledgements."""
GRADIENT_BYTES = 4
"""Data-parallel training averages gradients in fp32."""


@dataclass(frozen=True)
class Round:
    """One exchange of one fragment, for one island with all its ranks."""

    num_bytes: int
    """Sent by one island, and received by it; without TCP's and Ethernet's headers."""
    hops: int
    """Messages that wait for each other, once all agree."""
    agree_hops: int = 0
    """Messages before that: the next round's cannot go meanwhile."""
    encode_seconds: float = 0.0
    """In the loop, when it is sent."""
    before_seconds: float = 0.0
    """In the background, before it is on the link."""
    agree_seconds: float = 0.0
    """In the background, for headers and checksums: the next round's come after it."""
    talk_seconds: float = 0.0
    """In the background, in the middle of it: the round is held up, the link is not."""
    after_seconds: float = 0.0
    """In the background, after it has been on the link."""
    apply_seconds: float = 0.0
    """In the loop, when it is applied."""

    def link_seconds(self, bits_per_second: Seconds) -> Seconds:
        """How long the link is busy with it.

        >>> Round(num_bytes=1448 * 125, hops=2).link_seconds(1547e3)
        1.0
        """
        return 8 * FRAMING * self.num_bytes / bits_per_second


def fragment_round(
    numel: int,
    codec: str,
    islands: int,
    *,
    ranks: int = 1,
    reduction: Reduction = "auto",
    update: Update = "fresh",
    coding: Coding,
) -> Round:
    """A round of a fragment of so many parameters, shared by the ranks of an island."""
    from isles.wire import reduction as forms
    from isles.wire.codecs import codecs

    chosen = codecs[codec]
    form = forms.choose(reduction, islands, chosen)
    shard = -(-numel // ranks)
    num_bytes = ranks * forms.traffic(form, islands, _weightless(shard, codec))
    if form == "all-gather":
        hops, hidden, talk = 1, 0.0, 0.0
        sealed, after = shard, islands * shard / coding.decode_per_second
    else:
        piece = forms.piece_numel(shard, islands, chosen)
        hops = 2
        # Parts of a piece are averaged while others are on the link; the last one cannot be.
        starts = forms.part_starts(piece, chosen)
        last = piece - starts[-1] * chosen.block if starts else 0
        averaging = islands / coding.decode_per_second + 1 / coding.encode_per_second + 1 / coding.seal_per_second
        hidden, talk = (piece - last) * averaging, last * averaging
        sealed, after = islands * piece, islands * piece / coding.decode_per_second
    gradient, encode = shard / coding.gradient_per_second, shard / coding.encode_per_second
    step, mix = shard / coding.outer_per_second, shard / coding.mix_per_second
    agree = sealed / coding.seal_per_second
    loop, before = (encode, 0.0) if chosen.kernels else (gradient, encode)
    if update == "fresh":
        after, apply = after + step, mix
    else:
        loop, before, apply = loop + before, 0.0, step + mix
        if update == "eager":  # a copy of the mean, the own fresh contribution in, the stale one out
            apply += gradient + 2 * shard / coding.decode_per_second
    if not coding.spare_cores:
        apply += before + agree + hidden + talk + after
    if islands == 1:
        hops = 0
    return Round(num_bytes, hops, min(hops, 1), loop, before, agree, talk, after, apply)


def gradient_round(numel: int, islands: int) -> Round:
    """The all-reduce of so many gradients in data-parallel training.

    >>> gradient_round(1000, 2).num_bytes
    4000
    """
    return Round(num_bytes=round(2 * (islands - 1) * numel * GRADIENT_BYTES / islands), hops=2 * (islands - 1))


def payload_bytes(numel: int, codec: str, ranks: int = 1) -> int:
    """Size of a fragment once encoded, all shards together."""
    from isles.wire.codecs import codecs

    return ranks * codecs[codec].num_bytes(-(-numel // ranks))


def _weightless(numel: int, codec: str) -> Payload:
    """A payload whose body has a size and no memory."""
    import torch

    from isles.wire.codecs import codecs
    from isles.wire.world import Payload

    chosen = codecs[codec]
    body = torch.empty(chosen.num_bytes(numel), dtype=torch.uint8, device="meta")
    return Payload(fragment=0, round=1, codec=chosen, numel=numel, weight=1.0, encoded=body)
