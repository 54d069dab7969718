"""Kernels and PyTorch give the same bits: bytes, decoded values, sums, outer steps.

The PyTorch code is the definition. It is reached here by taking the compiled kernels away, and every comparison first
makes sure that the kernels did run on the other side. When they are compiled is in `test_wire_warm_up.py`.
"""

import dataclasses
import json
import math

import pytest
import torch

from isles import codecs
from isles.core import outer as outer_module
from isles.core.outer import OuterSGD, mix_in_place
from isles.wire import fused, reduction
from tests.golden import CODECS, METHODS, file_of, trajectory

pytest.importorskip("numba")
torch.set_num_threads(1)
LENGTHS = (0, 1, 127, 128, 129, 256, 100_003)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    assert fused.warm_up()


@pytest.fixture
def without_kernels(monkeypatch):
    """A function that calls another one in PyTorch alone."""

    def call(action, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(fused, "_ready", {})
            return action(*arguments, **options)

    return call


def gaussian(numel, seed=0, scale=1.0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def bits(tensor):
    return tensor.view(torch.int32)


def same(first, second):
    """Bit for bit, signs of zeros included."""
    return first.shape == second.shape and torch.equal(bits(first), bits(second))


LARGEST = torch.finfo(torch.float32).max
VALUES = {
    **{f"gaussian of {numel}": gaussian(numel, numel) for numel in LENGTHS},
    **{f"scale 1e{power}": gaussian(3000, 50 + power, 10.0**power) for power in range(-42, 38, 5)},
    "wide range": gaussian(5000, 1) * torch.logspace(-44, 38, 5000),
    "wide in a block": gaussian(1280, 2) * torch.logspace(-9, 0, 128).repeat(10),
    "zeros": torch.zeros(300),
    "negative zeros": -torch.zeros(300),
    "zero blocks among others": torch.cat([torch.zeros(128), gaussian(128, 3), -torch.zeros(128), gaussian(77, 4)]),
    "denormals": gaussian(1000, 5, 1e-40),
    "smallest denormal": torch.full((200,), 2.0**-149),
    "about 2^-120": gaussian(3000, 6, 2.0**-118),
    "huge": gaussian(2000, 7, 1e38).clamp(-LARGEST, LARGEST),
    "largest": torch.tensor([LARGEST, -LARGEST, 1.0, 0.0] * 40),
    "every bf16": torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float().nan_to_num(0.0, 0.0, 0.0),
    "every fp16": torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float().nan_to_num(0.0, 0.0, 0.0),
    # Ties of every format: halves of integers and of mantissa steps, with a block's largest value at the limit.
    **{
        f"ties of {limit}": torch.cat([torch.tensor([float(limit)]), torch.arange(-254, 255).float() * limit / 254])
        for limit in (1, 7, 127, 254, 448)
    },
    "ties of floats": (torch.arange(1 << 16) << 15 | 1 << 12).int().view(torch.float32).nan_to_num(0.0, 0.0, 0.0),
    "neighbours of ties": (torch.arange(1 << 16) << 15 | 0xFFF).int().view(torch.float32).nan_to_num(0.0, 0.0, 0.0),
    "e3m0 thresholds": torch.tensor([1.0, *(x * 2.0**-k for k in range(9) for x in (0.75, 0.7499999, 0.75000006))] * 9),
}
VALUES["a piece of a longer one"] = gaussian(5000, 8)[3:4000]
every_kernel = pytest.mark.parametrize("name", fused.GROUPS)


@pytest.fixture
def ran(monkeypatch):
    """Counts the calls of kernels that a test has made."""
    calls = []

    def counted(function):
        return lambda *arguments: calls.append(1) or function(*arguments)

    wrapped = {g: {n: counted(f) for n, f in kernels.items()} for g, kernels in fused._ready.items()}
    monkeypatch.setattr(fused, "_ready", wrapped)
    return calls


@every_kernel
def test_same_bytes_and_same_values(name, without_kernels, ran):
    codec = codecs[name]
    for kind, values in VALUES.items():
        payload, expected = codec.encode(values), without_kernels(codec.encode, values)
        assert torch.equal(payload, expected), f"{kind}: other bytes"
        decoded = codec.decode(payload, values.numel())
        assert same(decoded, without_kernels(codec.decode, payload, values.numel())), f"{kind}: other values"
    assert len(ran) == 2 * len(VALUES) - 1, "each is one pass; of no values at all there is nothing to decode"


@every_kernel
def test_any_bytes_decode_to_the_same(name, without_kernels):
    """Also where no encoder would have written them; which NaN it is does not matter."""
    codec = codecs[name]
    for numel in (1, 130, 65536):
        generator = torch.Generator().manual_seed(numel)
        payload = torch.randint(0, 256, (codec.num_bytes(numel),), generator=generator, dtype=torch.uint8)
        decoded, expected = codec.decode(payload, numel), without_kernels(codec.decode, payload, numel)
        assert torch.equal(decoded.isnan(), expected.isnan())
        assert same(decoded.nan_to_num(1.5), expected.nan_to_num(1.5))


@every_kernel
def test_decoding_does_not_depend_on_how_it_was_rounded(name, without_kernels, ran):
    codec = dataclasses.replace(codecs[name], stochastic=True)
    for numel in LENGTHS:
        values = gaussian(numel)
        payload = codec.encode(values)
        assert torch.equal(payload, without_kernels(codec.encode, values))
        assert not ran or numel, "stochastic rounding has no kernels"
        assert same(codec.decode(payload, numel), without_kernels(codec.decode, payload, numel))
    assert ran


@pytest.mark.parametrize("weight", [1.0, 0.3, 1 / 3, 1e-30, 1.5, 1e30])
@every_kernel
def test_accumulate_is_decode_multiply_add_divide(name, weight, without_kernels, ran):
    codec = codecs[name]
    for kind, values in VALUES.items():
        payload = codec.encode(values)
        decoded = without_kernels(codec.decode, payload, values.numel())
        product = decoded if weight == 1 else decoded * weight
        into, fresh, mean = gaussian(values.numel(), 9), gaussian(values.numel(), 10), gaussian(values.numel(), 11)
        expected = into + product, torch.zeros_like(into) + product, (mean + product) / 1.3
        finite = (
            codec.accumulate(payload, into, weight),
            codec.accumulate(payload, fresh, weight, fresh=True),
            codec.accumulate(payload, mean, weight, divisor=1.3),
        )
        for found, wanted, all_finite in zip((into, fresh, mean), expected, finite, strict=True):
            assert same(found, wanted), kind
            assert all_finite == bool(torch.isfinite(wanted).all()), kind
    assert len(ran) >= 3 * (len(VALUES) - 1)


@pytest.mark.parametrize("name", codecs)
def test_accumulate_without_kernels(name, without_kernels):
    codec = codecs[name]
    for numel in (1, 129, 3000):
        payload, into = codec.encode(gaussian(numel)), gaussian(numel, 1)
        expected = (into + codec.decode(payload, numel) * 0.7) / 3
        assert without_kernels(codec.accumulate, payload, into, 0.7, divisor=3.0) is True
        assert same(into, expected)
        assert without_kernels(codec.accumulate, payload, into.fill_(math.nan), fresh=True) is True
        assert same(into, codec.decode(payload, numel) + 0.0)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", codecs)
def test_accumulate_refuses_what_does_not_fit(name, kernels, without_kernels):
    codec, payload = codecs[name], codecs[name].encode(gaussian(200))
    accumulate = codec.accumulate if kernels else lambda *given: without_kernels(codec.accumulate, *given)
    for into in (torch.zeros(200, dtype=torch.float64), torch.zeros(200, dtype=torch.int32), torch.zeros(10, 20)):
        with pytest.raises(ValueError, match="flat fp32"):
            accumulate(payload, into)
    with pytest.raises(ValueError, match="truncated"):
        accumulate(payload[:-1], torch.zeros(200))
    with pytest.raises(ValueError, match="uint8"):
        accumulate(payload.float(), torch.zeros(200))


@every_kernel
def test_layout_and_precision_of_the_input_do_not_matter(name, without_kernels, ran):
    codec, table = codecs[name], gaussian(60 * 50).view(60, 50)
    for values in (table, table.t(), table.reshape(-1)[::3], table.bfloat16(), table.double(), table.requires_grad_()):
        assert torch.equal(codec.encode(values), without_kernels(codec.encode, values))
    assert len(ran) == 6


@every_kernel
def test_memory_that_begins_anywhere(name, without_kernels):
    """A payload may be a piece of a longer message, and so begin at an odd address; so may the memory for one."""
    codec, values = codecs[name], gaussian(1000)
    payload = codec.encode(values)
    for offset in (1, 2, 3, 8):
        buffer = torch.zeros(payload.numel() + offset, dtype=torch.uint8)
        into, out = gaussian(1000, 1), buffer[offset:]
        assert codec.encode(values, out=out) is out
        assert torch.equal(out, payload)
        assert not buffer[:offset].any()
        assert same(codec.decode(out, 1000), codec.decode(payload, 1000))
        expected = into + codec.decode(payload, 1000) * 0.3
        codec.accumulate(out, into, 0.3)
        assert same(into, expected)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", codecs)
def test_encode_into_memory_that_is_there(name, kernels, without_kernels):
    codec, values = codecs[name], gaussian(1000)
    encode = codec.encode if kernels else lambda *given: without_kernels(codec.encode, *given)
    out = torch.full((codec.num_bytes(1000),), 77, dtype=torch.uint8)
    assert encode(values, out) is out
    assert torch.equal(out, codec.encode(values))
    with pytest.raises(ValueError, match="bytes"):
        encode(values[:-200], out) if codec.block < 800 else encode(gaussian(3000), out)
    with pytest.raises(ValueError, match="uint8"):
        encode(values, out.int())


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 3000])
@every_kernel
def test_what_is_not_finite_is_refused_by_both(name, numel, without_kernels):
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        for place in {0, numel // 2, numel - 1}:
            values = gaussian(numel)
            values[place] = bad
            with pytest.raises(ValueError, match="finite values can be encoded: 1 are not"):
                codecs[name].encode(values)
            with pytest.raises(ValueError, match="finite values can be encoded: 1 are not"):
                without_kernels(codecs[name].encode, values)


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 3.0], [0.0, 2.5, 0.0], [1.0, 0.0, 0.3, 7.0], [0.0, 0.0], [1e300, 3e300]]
)
@pytest.mark.parametrize("name", codecs)
def test_weighted_mean_is_the_same(name, weights, without_kernels):
    codec = codecs[name]
    for numel in (0, 1, 128, 1000):
        bodies = [codec.encode(gaussian(numel, seed)) for seed in range(len(weights))]
        found = reduction.weighted_mean(bodies, weights, codec, numel)
        assert same(found, without_kernels(reduction.weighted_mean, bodies, weights, codec, numel))
        scaled = reduction._scaled(weights)
        total = torch.zeros(numel)
        for body, weight in zip(bodies, scaled, strict=True):
            if weight > 0:
                total.add_(codec.decode(body, numel) * weight)
        assert same(found, total / sum(scaled) if sum(scaled) else total)


@every_kernel
def test_a_mean_is_finite_where_the_sum_is_not(name, without_kernels):
    codec = codecs[name]
    bodies = [codec.encode(torch.full((300,), 3e38)) for _ in range(3)]
    mean = reduction.weighted_mean(bodies, [1.0, 1.0, 1.5], codec, 300)
    assert torch.isfinite(mean).all()
    assert same(mean, without_kernels(reduction.weighted_mean, bodies, [1.0, 1.0, 1.5], codec, 300))
    assert torch.allclose(mean, codec.decode(bodies[0], 300), rtol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("preset", METHODS)
def test_golden_trajectories_with_kernels(preset, codec, ran):
    assert trajectory(preset, codec) == json.loads(file_of(preset).read_text())[codec]
    assert ran


# ---- the outer step


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("lr", [1.0, 0.7, 0.4])
def test_outer_step_is_the_same(momentum, nesterov, lr, without_kernels, monkeypatch):
    ran, run_kernel = [], outer_module._run_kernel
    noted = lambda *arguments: run_kernel(*arguments) and (ran.append(arguments[0]) or True)
    monkeypatch.setattr(outer_module, "_run_kernel", noted)
    outer, settings = OuterSGD(momentum=momentum > 0, nesterov=nesterov), (lr, momentum)
    for scale in (1e-42, 1e-5, 1.0, 1e37):
        anchor = gaussian(10_007, 1, scale)
        velocity = gaussian(10_007, 2, scale) if momentum else None
        other, speed = anchor.clone(), None if velocity is None else velocity.clone()
        for step in range(3):
            mean = gaussian(10_007, 3 + step, scale)
            before = mean.clone()
            aside = outer.update_aside(anchor, mean, velocity, *settings)
            expected = without_kernels(outer.update_aside, anchor, mean, velocity, *settings)
            assert all(one is two is None or same(one, two) for one, two in zip(aside, expected, strict=True))
            without_kernels(outer.update, anchor, mean, velocity, *settings)
            outer.update(other, mean, speed, *settings)
            assert same(other, anchor)
            assert same(aside[0], anchor), "a step in other memory is the same step"
            assert same(mean, before)
            assert speed is None or velocity is None or same(speed, velocity)
    assert bool(ran) == (nesterov and momentum > 0)


@pytest.mark.parametrize("alpha", [0.5, 0.1, 0.9, 1 / 3])
def test_mixing_is_the_same(alpha):
    for scale in (1e-42, 1.0, 1e38):
        theta, anchor = gaussian(10_007, 1, scale), gaussian(10_007, 2, scale)
        expected, before = theta * alpha + anchor * (1 - alpha), anchor.clone()
        assert mix_in_place([theta[:3], theta[3:3], theta[3:]], anchor, alpha)
        assert same(theta.nan_to_num(), expected.nan_to_num())
        assert same(anchor, before)


def test_outer_kernels_apply_to_plain_fp32_memory_only(monkeypatch):
    good, run_kernel = torch.zeros(10), outer_module._run_kernel
    assert mix_in_place([good], good.clone(), 0.5)
    assert run_kernel("nesterov", [good, good.clone(), good.clone()], 1.0, 0.9)
    for bad in (good.double(), good.bfloat16(), torch.zeros(20)[::2], torch.zeros(10, requires_grad=True)):
        assert not mix_in_place([good, bad], torch.zeros(20), 0.5)
        assert not mix_in_place([good], bad, 0.5)
        assert not run_kernel("nesterov", [good, bad, good.clone()], 1.0, 0.9)
        assert not run_kernel("nesterov_into", [good, good, good, bad, good.clone()], 1.0, 0.9)
    monkeypatch.setattr(fused, "_ready", {})
    assert not mix_in_place([good], good.clone(), 0.5)


# ---- outer gradients


@every_kernel
@pytest.mark.parametrize("lengths", [(1,), (128,), (300,), (100, 28, 7), (1, 1, 0, 126, 1), (64,) * 5, (5, 1000, 0)])
def test_an_outer_gradient_is_encoded_as_its_difference(name, lengths):
    """Whatever tensors it is made of, whatever rows they share."""
    codec, numel = codecs[name], sum(lengths)
    for scale in (1e-40, 1e-3, 1.0, 1e37):
        anchor, theta = gaussian(numel, 1, scale), gaussian(numel, 2, scale)
        payload, finite = fused.encode_difference(codec, anchor, theta.split(lengths))
        assert finite
        assert torch.equal(payload, codec.encode(anchor - theta))


@every_kernel
def test_an_outer_gradient_that_is_not_finite_is_noticed(name):
    codec, anchor = codecs[name], torch.zeros(300)
    for place in (0, 127, 128, 299):
        for value in (math.nan, math.inf, -math.inf):
            theta = torch.zeros(300)
            theta[place] = value
            assert not fused.encode_difference(codec, anchor, theta.split([1, 199, 100]))[1]


def test_outer_gradients_of_other_precisions_are_not_for_kernels():
    codec, anchor = codecs["e3m0"], torch.zeros(200)
    for bad in (torch.zeros(100).bfloat16(), torch.zeros(200)[::2], torch.zeros(100, requires_grad=True)):
        assert fused.encode_difference(codec, anchor, [torch.zeros(100), bad]) is None
    rounded = dataclasses.replace(codec, stochastic=True)
    assert fused.encode_difference(rounded, anchor, [torch.zeros(200)]) is None
