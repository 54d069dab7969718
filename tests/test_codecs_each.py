"""What is special about single codecs: e3m0's levels, what sparse codecs keep, and that stochastic rounding is fair.

e3m0 is compared with an encoder written from its description, one value at a time. Fairness is tested where unfair
rounding cannot hide: all values lie in the same part of one step of the format, so that rounding to the nearest moves
all of them the same way, and the bound on the mean error is five standard errors.
"""

import dataclasses
import struct

import pytest
import torch

from isles import codecs

torch.set_num_threads(1)
LEVELS = [0.0, *(2.0**-k for k in range(6, -1, -1))]
"""e3m0, in units of the scale: code 0 is zero, codes 1..7 are powers of two up to 1."""


def uniform(*shape, seed=0, low=0.0, high=1.0):
    return low + (high - low) * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nearest_bf16(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16))[0]


def blocks_of(values):
    values = values.tolist()
    for start in range(0, len(values), 128):
        block = values[start : start + 128]
        yield block, nearest_bf16(max(abs(value) for value in block))


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_e3m0_takes_the_nearest_level(spread):
    normal = torch.randn(128 * 40, generator=torch.Generator().manual_seed(1))
    values = normal * torch.exp(spread * torch.randn(128 * 40, generator=torch.Generator().manual_seed(2)))
    decoded = iter(codecs["e3m0"].decode(codecs["e3m0"].encode(values), values.numel()).tolist())
    for block, scale in blocks_of(values):
        for value in block:
            got = next(decoded)
            nearest = min(abs(abs(value) - level * scale) for level in LEVELS)
            assert abs(got) / scale in LEVELS
            assert got == 0 or (got > 0) == (value > 0)
            assert abs(got - value) <= nearest * (1 + 1e-6), f"{value / scale} of the scale became {got / scale}"


def test_e3m0_bytes_are_as_documented():
    """Scale as bf16; then the first half of the block in the low bits, the second half in the high ones."""
    values = torch.zeros(128)
    values[:8] = 3.0 * torch.tensor(LEVELS)
    values[64:72] = -3.0 * torch.tensor(LEVELS)
    values[100] = 3.0
    payload = codecs["e3m0"].encode(values).tolist()
    assert payload[:2] == list(struct.pack("<f", 3.0)[2:])
    assert payload[2:10] == [code | (code | 8 if code else 0) << 4 for code in range(8)] or payload[2:10] == [
        code | (code | 8) << 4 for code in range(8)
    ]  # the sign of a zero is nobody's business
    assert payload[2 + 36] == 7 << 4


def test_e3m0_covers_sixty_four_to_one():
    values = torch.zeros(128)
    values[0], values[1], values[2] = 1.0, 1 / 64, 1 / 300
    decoded = codecs["e3m0"].decode(codecs["e3m0"].encode(values), 128)
    assert decoded[:3].tolist() == [1.0, 1 / 64, 0.0]


def test_topk_keeps_the_largest_eighth():
    values = torch.randn(4 * 1024, generator=torch.Generator().manual_seed(3))
    decoded = codecs["topk"].decode(codecs["topk"].encode(values), values.numel())
    for block, kept in zip(values.view(4, 1024), decoded.view(4, 1024), strict=True):
        assert (kept != 0).sum() == 128
        assert torch.equal(kept[kept != 0], block[kept != 0].bfloat16().float())
        assert block[kept != 0].abs().min() >= block[kept == 0].abs().max()


@pytest.mark.parametrize(("name", "factor"), [("random-drop", 1.0), ("dare", 1024 / 254)])
def test_dropping_keeps_a_quarter_chosen_evenly(name, factor):
    values = torch.randn(600 * 1024, generator=torch.Generator().manual_seed(4)).abs() + 0.1
    decoded = codecs[name].decode(codecs[name].encode(values), values.numel())
    kept = (decoded != 0).view(600, 1024)
    assert (kept.sum(dim=1) == 254).all()
    assert torch.equal(decoded[decoded != 0], (values[decoded != 0] * factor).bfloat16().float())
    # Every place equally often: 600 draws with probability 0.248 have a deviation of 10.6.
    assert (kept.sum(dim=0) - 600 * 254 / 1024).abs().max() < 5 * 10.6
    # And not the same places again in the next block: 254 * 254 / 1024 = 63 in common by chance, deviation below 7.
    common = (kept[1:] & kept[:-1]).sum(dim=1).double()
    assert abs(common.mean() - 63.0) < 5 * 7 / 599**0.5


def test_dare_has_the_right_expectation_and_random_drop_has_not():
    values = torch.randn(1000 * 1024, generator=torch.Generator().manual_seed(5)).abs()
    mean = {
        name: codecs[name].decode(codecs[name].encode(values), values.numel()).double().mean().item()
        for name in ("dare", "random-drop")
    }
    # Of 1024 values with mean square 1, 254 are drawn and multiplied by 4.03.
    standard_error = (4.03 / values.numel()) ** 0.5
    assert abs(mean["dare"] - values.double().mean().item()) < 5 * standard_error
    assert mean["random-drop"] < 0.3 * values.mean().item()


def test_int2_bytes_are_as_documented():
    """Scale as bf16; then the four quarters of the block, from the low bits to the high ones."""
    values = torch.zeros(128)
    values[0], values[33], values[66], values[99] = 3.0, -3.0, 3.0, -3.0
    payload = codecs["int2"].encode(values).tolist()
    assert payload[:2] == list(struct.pack("<f", 3.0)[2:])
    assert payload[2:6] == [1, 3 << 2, 1 << 4, 3 << 6]
    assert not any(payload[6:])


def test_int2_takes_the_nearest_level_at_a_scale_that_suits_gaussians():
    """Three levels can have 0.190 of the square of a Gaussian as error (Max, 1960); the largest value as scale, 0.6."""
    values = torch.randn(4000 * 128, generator=torch.Generator().manual_seed(6))
    decoded = codecs["int2"].decode(codecs["int2"].encode(values), values.numel())
    for block, got in zip(values.view(-1, 128)[:200], decoded.view(-1, 128)[:200], strict=True):
        scale = got.abs().max()
        levels = torch.stack([-scale, scale * 0, scale])
        nearest = (block[:, None] - levels).abs().amin(dim=1)
        assert torch.allclose((block - got).abs(), nearest, rtol=1e-6)
    assert ((decoded - values).square().mean() / values.square().mean()).item() < 0.195


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_int2_contracts(rounding):
    """What error feedback needs of a codec, in every block: |x - decoded|^2 <= (1 - c) |x|^2 with c about 1/128."""
    codec = dataclasses.replace(codecs["int2"], stochastic=rounding == "stochastic").contracting()
    generator = torch.Generator().manual_seed(7)
    blocks = torch.cat(
        [
            torch.randn(500, 128, generator=generator) * torch.exp(s * torch.randn(500, 128, generator=generator))
            for s in (0.0, 1.0, 4.0)
        ]
        + [torch.eye(128), torch.ones(1, 128) * torch.linspace(1, 2, 300)[:, None], 0.49 + torch.eye(128) * 0.51]
    )
    decoded = codec.decode(codec.encode(blocks), blocks.numel()).view(blocks.shape)
    left = (blocks.double() - decoded).square().sum(dim=1) / blocks.double().square().sum(dim=1)
    assert left.max() <= 1 - 0.98 / 128


@dataclasses.dataclass(frozen=True)
class Step:
    """Two neighbouring values of a format, `low` and `low + size`, in blocks whose largest value is `largest`."""

    codec: str
    low: float
    size: float
    largest: float = 0.0
    filled: float = 1.0
    """How much of a block lies in the step; the rest is zero."""


STEPS = [
    Step("bf16", 1.0, 2**-7),
    Step("bf16", 2.0**-100, 2.0**-107),
    Step("bf16", 2.0**-130, 2.0**-133),
    Step("fp16", 1.0, 2**-10),
    Step("fp16", 2.0**-20, 2**-24),
    Step("fp16", 0.0, 2**-24),
    Step("fp8", 1.0, 2**-3, largest=448.0),
    Step("fp8", 2.0**-7, 2**-9, largest=448.0),
    Step("fp8", 0.0, 2**-9, largest=448.0),
    Step("int8", 3.0, 1.0, largest=127.0),
    Step("int8", 0.0, 1.0, largest=127.0),
    Step("int8", 126.0, 1.0, largest=127.0),
    Step("int4", 2.0, 1.0, largest=7.0),
    Step("int4", 0.0, 1.0, largest=7.0),
    Step("int2", 0.0, 1.0, largest=1.0),
    Step("e3m0", 2**-3, 2**-3, largest=1.0),
    Step("e3m0", 2**-6, 2**-6, largest=1.0),
    Step("e3m0", 0.5, 0.5, largest=1.0),
    Step("e3m0", 0.0, 2**-6, largest=1.0),
    Step("topk", 1.0, 2**-7, filled=1 / 8),
    Step("random-drop", 1.0, 2**-7),
    Step("dare", 254 / 1024, 254 / 1024 * 2**-7),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.codec}-{step.low:g}")
def test_stochastic_rounding_is_fair(step):
    codec = dataclasses.replace(codecs[step.codec], stochastic=True)
    columns = max(codec.block, 64)
    for part, sign in ((0.1, 1.0), (0.3, -1.0), (0.8, 1.0)):
        inside = uniform(int(40_000 / columns / step.filled), columns, low=part - 0.05, high=part + 0.05)
        values = (sign * (step.low + step.size * inside)).float()
        values[:, int(columns * step.filled) :] = 0.0
        if step.largest:
            values[:, 0] = step.largest
        decoded = codec.decode(codec.encode(values), values.numel()).view(values.shape)
        counted = values != 0
        if step.largest:
            counted[:, 0] = False
        if step.codec in ("random-drop", "dare"):
            counted &= decoded != 0  # which values are dropped is another matter
            decoded = decoded * 254 / 1024 if step.codec == "dare" else decoded
        relative = ((decoded.double() - values.double()) / step.size)[counted] * sign
        assert relative.abs().max() < 1.001, "went further than to a neighbour"
        # Up with probability `part`, else down: one rounding has a deviation of sqrt(part * (1 - part)) of a step.
        # With blocks of one value the same value is always rounded the same way, so only different values count.
        rounded = relative.numel() if codec.block > 1 else values[counted].unique().numel()
        assert rounded > 600
        standard_error = (part * (1 - part) / rounded) ** 0.5
        assert abs(relative.mean().item()) < 5 * standard_error, f"biased by {relative.mean():.3f} steps at {part}"


@pytest.mark.parametrize(
    "step",
    [step for step in STEPS if step.codec != "int2"],  # which has another scale, and so other steps, to the nearest
    ids=lambda step: f"{step.codec}-{step.low:g}",
)
def test_rounding_to_nearest_is_not_fair(step):
    """The test above can tell the difference: a third into a step, the nearest neighbour is always the lower one."""
    codec = codecs[step.codec]
    values = torch.full((4, max(codec.block, 64)), step.low + 0.3 * step.size)
    values[:, int(values.shape[1] * step.filled) :] = 0.0
    if step.largest:
        values[:, 0] = step.largest
    decoded = codec.decode(codec.encode(values), values.numel()).view(values.shape)
    last = int(values.shape[1] * step.filled) - 1
    kept = decoded[:, 1 : last + 1] if step.codec not in ("random-drop", "dare") else decoded[decoded != 0]
    factor = 254 / 1024 if step.codec == "dare" else 1.0
    assert torch.allclose(kept * factor, torch.tensor(float(step.low)), rtol=1e-4, atol=0.0)


def test_stochastic_rounding_of_different_blocks_is_independent():
    """Blocks that differ in a single value get their own noise: errors of many islands or rounds must average out."""
    codec = dataclasses.replace(codecs["int8"], stochastic=True)
    values = torch.full((2000, 128), 3.5)
    values[:, 0] = 127.0
    values[:, 1] = 3.5 + torch.arange(2000) * 2.0**-20
    up = (codec.decode(codec.encode(values), values.numel()).view(2000, 128)[:, 2:] > 3.5).double()
    assert abs(up.mean() - 0.5) < 5 * 0.5 / up.numel() ** 0.5
    assert (up.mean(dim=0) - 0.5).abs().max() < 5 * 0.5 / 2000**0.5
    # Neighbouring blocks, and neighbours in a block, agree half of the time.
    assert abs((up[1:] == up[:-1]).double().mean() - 0.5) < 5 * 0.5 / up.numel() ** 0.5
    assert abs((up[:, 1:] == up[:, :-1]).double().mean() - 0.5) < 5 * 0.5 / up.numel() ** 0.5
