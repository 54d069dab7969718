"""Every codec, in both rounding modes: what comes out is as close to what went in as the format allows.

Proven here: error bounds; payload sizes; bad input; that a payload is complete in itself, can be cut at blocks, and
belongs to nobody else's memory. What is special about one codec (e3m0's levels, what sparse codecs keep, that
stochastic rounding is fair) is in `test_codecs_each.py`.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles import codecs

torch.set_num_threads(1)
SPARSE = ("topk", "random-drop", "dare")
DENSE = tuple(name for name in codecs if name not in SPARSE)
LIMITS = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "int2": 1.0, "e3m0": 1.0}
BF16_MAX = torch.finfo(torch.bfloat16).max

every_codec = pytest.mark.parametrize("name", codecs)
both_roundings = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])


def codec_of(name, stochastic=False):
    return dataclasses.replace(codecs[name], stochastic=stochastic)


def gaussian(numel, seed=0, scale=1.0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def round_trip(codec, values):
    return codec.decode(codec.encode(values), values.numel())


def tolerance(name, stochastic, values):
    """The largest error each value may have, from the definition of the format.

    Stochastic rounding may go to the farther neighbour, which is less than a whole step away instead of half a step.
    """
    steps = 2.0 if stochastic else 1.0
    size = values.abs().double()
    if name == "fp32":
        return size * 0
    if name == "bf16":
        return steps * (size * 2**-8 + 2.0**-134)
    if name == "fp16":
        saturated = (size - 65504).clamp(min=0)
        return steps * (size * 2**-11 + 2.0**-25) + saturated
    codec = codecs[name]
    rows = -(-size.numel() // codec.block)
    padded = torch.cat([size, size.new_zeros(rows * codec.block - size.numel())]).view(rows, codec.block)
    largest = padded.amax(dim=1, keepdim=True).expand_as(padded).reshape(-1)[: size.numel()]
    scale = largest / LIMITS[name] * (1 + 2**-7)  # a bf16 number, rounded up
    bound = {
        "fp8": steps * (size * 2**-4 + scale * 2**-10),
        "int8": steps * scale / 2,
        "int4": steps * scale / 2,
        "int2": scale if stochastic else size,  # the nearest of -s, 0 and s never overshoots
        "e3m0": torch.maximum(size if stochastic else size / 3, steps * scale * 2**-7),
    }[name]
    zeroed = torch.where(largest < LIMITS[name] * 2.0**-119, largest, 0.0)  # such blocks count as zero
    # The scale of the very largest fp32 numbers saturates at the largest bf16 number, half a per cent below.
    return bound * (1 + 1e-5) + zeroed + (largest - BF16_MAX).clamp(min=0)


AWKWARD = {
    "gaussian": gaussian(5000),
    "outer gradient": gaussian(5000, 1, 1e-5) * gaussian(5000, 2).exp(),
    "uniform": torch.linspace(-1, 1, 4096),
    "constant": torch.full((1500,), -0.7),
    "one outlier": torch.cat([gaussian(300, 3), torch.tensor([3e38]), gaussian(2000, 4)]),
    "negative outlier": torch.cat([gaussian(300, 3), torch.tensor([-3e38]), gaussian(2000, 4)]),
    "largest fp32": torch.cat(
        [torch.tensor([torch.finfo(torch.float32).max]), gaussian(200, 5, 1e38).clamp(-3e38, 3e38)]
    ),
    "denormals": gaussian(1000, 6, 1e-40),
    "smallest denormal": torch.full((200,), 2.0**-149),
    "about 2^-120": gaussian(3000, 7, 2.0**-117),
    "wide range": gaussian(3000, 8) * torch.logspace(-38, 38, 3000),
    "zeros": torch.zeros(777),
    "negative zeros": -torch.zeros(130),
    "one zero block": torch.cat([torch.zeros(1024), gaussian(1024, 9)]),
    "size 1": torch.tensor([0.3]),
    "size 127": gaussian(127, 10),
    "size 129": gaussian(129, 11),
    "size 1023": gaussian(1023, 12),
    "size 1025": gaussian(1025, 13),
    "empty": torch.zeros(0),
}


@both_roundings
@pytest.mark.parametrize("name", DENSE)
def test_error_is_within_the_format(name, stochastic):
    for kind, values in AWKWARD.items():
        decoded = round_trip(codec_of(name, stochastic), values)
        excess = (decoded.double() - values.double()).abs() - tolerance(name, stochastic, values)
        assert not (excess > 0).any(), f"{kind}: off by {excess.max():g} more than the format allows"


@both_roundings
@every_codec
def test_finite_in_finite_out_same_size_same_type(name, stochastic):
    codec = codec_of(name, stochastic)
    for kind, values in AWKWARD.items():
        before = values.clone()
        payload = codec.encode(values)
        decoded = codec.decode(payload, values.numel())
        assert payload.dtype == torch.uint8, kind
        assert payload.shape == (codec.num_bytes(values.numel()),), kind
        assert decoded.dtype == torch.float32, kind
        assert decoded.shape == values.shape, kind
        assert torch.isfinite(decoded).all(), kind
        assert torch.equal(values, before), f"{kind}: encode changed its input"
        assert torch.equal(payload, codec.encode(values.clone())), f"{kind}: the same values gave other bytes"
        assert (decoded[values == 0] == 0).all(), f"{kind}: zero did not stay zero"


@both_roundings
@every_codec
def test_payload_and_input_share_no_memory(name, stochastic):
    """A payload is sent while training goes on: whoever changes the vector afterwards must not change what is sent."""
    codec = codec_of(name, stochastic)
    values = gaussian(2048)
    payload = codec.encode(values)
    sent = payload.clone()
    values.zero_()
    assert torch.equal(payload, sent)
    decoded = codec.decode(payload, 2048)
    decoded.fill_(3.0)
    assert torch.equal(payload, sent)


@every_codec
def test_shape_memory_layout_and_precision_of_the_input_do_not_matter(name):
    codec = codecs[name]
    table = gaussian(60 * 50).view(60, 50)
    assert torch.equal(codec.encode(table), codec.encode(table.reshape(-1)))
    assert torch.equal(codec.encode(table.t()), codec.encode(table.t().contiguous()))
    assert torch.equal(codec.encode(table.reshape(-1)[::3]), codec.encode(table.reshape(-1)[::3].clone()))
    assert torch.equal(codec.encode(table.bfloat16()), codec.encode(table.bfloat16().float()))
    assert torch.equal(codec.encode(table.clone().requires_grad_()), codec.encode(table))


@every_codec
def test_size_of_a_payload_is_known_beforehand(name):
    per_block = {
        "fp32": (1, 4),
        "bf16": (1, 2),
        "fp16": (1, 2),
        "fp8": (128, 130),
        "int8": (128, 130),
        "int4": (128, 66),
        "int2": (128, 34),
        "e3m0": (128, 66),
        "topk": (1024, 512),
        "random-drop": (1024, 512),
        "dare": (1024, 512),
    }
    block, num_bytes = per_block[name]
    for numel in (0, 1, 127, 128, 129, 1024, 1025, 10_000):
        assert codecs[name].num_bytes(numel) == math.ceil(numel / block) * num_bytes


@pytest.mark.parametrize("name", [*SPARSE, "int4", "e3m0"])
def test_four_bits_are_four_bits(name):
    for numel in (100_000, 123_457, 1_000_000):
        payload = codecs[name].encode(gaussian(numel))
        assert 8 * payload.numel() <= 4.15 * numel
        assert payload.numel() < codecs["bf16"].num_bytes(numel) / 2 * 1.04


@every_codec
def test_zero_bytes_decode_to_zeros(name):
    """The reduce-scatter form fills pieces up with zero bytes."""
    codec = codecs[name]
    for numel in (1, codec.block, 3 * codec.block):
        decoded = codec.decode(torch.zeros(codec.num_bytes(numel), dtype=torch.uint8), numel)
        assert torch.equal(decoded, torch.zeros(numel))


@both_roundings
@every_codec
def test_a_payload_can_be_cut_at_any_block(name, stochastic):
    codec = codec_of(name, stochastic)
    values = gaussian(5 * codec.block + codec.block // 2 + 1)
    whole = codec.encode(values)
    for blocks in range(6):
        cut = blocks * codec.block
        front, back = codec.encode(values[:cut]), codec.encode(values[cut:])
        if not stochastic:  # where a value stands decides how it is rounded at random
            assert torch.equal(torch.cat([front, back]), whole)
        at = codec.num_bytes(cut)
        assert torch.equal(codec.decode(whole[at:], values.numel() - cut), codec.decode(whole, values.numel())[cut:])


@pytest.mark.parametrize("name", [*DENSE, "topk"])
def test_what_was_decoded_is_encoded_without_loss(name):
    """Otherwise the second pass of the reduce-scatter form would add errors even where all islands agree."""
    for kind in ("gaussian", "outer gradient", "wide range", "one outlier", "size 129"):
        once = round_trip(codecs[name], AWKWARD[kind])
        assert torch.equal(round_trip(codecs[name], once), once), kind


@every_codec
def test_truncated_or_too_long_payload(name):
    codec = codecs[name]
    for numel in (1, 1000, 1024, 3000):
        payload = codec.encode(gaussian(numel))
        for wrong in (payload[:-1], payload[1:], payload[:0], torch.cat([payload, payload[:1]]), payload.repeat(2)):
            expected = rf"{wrong.numel()} bytes.*{numel} values in {name}.*{payload.numel()}"
            with pytest.raises(ValueError, match=expected):
                codec.decode(wrong, numel)


@every_codec
def test_wrong_types(name):
    codec = codecs[name]
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=str(dtype)):
            codec.encode(torch.ones(10, dtype=dtype))
    payload = codec.encode(torch.ones(10))
    for wrong in (payload.to(torch.int8), payload.float(), payload.int()):
        with pytest.raises(ValueError, match="uint8"):
            codec.decode(wrong, 10)


@both_roundings
@every_codec
def test_what_is_not_finite_is_refused(name, stochastic):
    """Not only by the codecs that would stumble over it: an infinity that becomes 3e38 on its way is no better."""
    for bad in (math.nan, math.inf, -math.inf):
        values = gaussian(3000)
        values[1234] = bad
        with pytest.raises(ValueError, match="finite"):
            codec_of(name, stochastic).encode(values)


@every_codec
def test_any_bytes_decode_to_something(name):
    """A damaged payload must not be able to crash an island or to write outside a block."""
    codec = codecs[name]
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        payload = torch.randint(0, 256, (codec.num_bytes(2048),), generator=generator, dtype=torch.uint8)
        assert codec.decode(payload, 2048).shape == (2048,)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(DENSE),
    stochastic=st.booleans(),
    shape=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    exponent=st.floats(-44, 38),
    spread=st.floats(0, 20),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_scale(name, stochastic, shape, exponent, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape, generator=generator).double() * 10.0**exponent
    values = (
        (wide * torch.exp(spread * torch.randn(shape, generator=generator).double())).clamp(-3.4e38, 3.4e38).float()
    )
    codec = codec_of(name, stochastic)
    decoded = codec.decode(codec.encode(values), values.numel())
    flat = values.reshape(-1)
    assert torch.isfinite(decoded).all()
    assert ((decoded.double() - flat.double()).abs() <= tolerance(name, stochastic, flat)).all()
