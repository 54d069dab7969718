"""Device kernels in Triton's interpreter against the CPU, bit for bit. `test_device_kernels.py` runs this file.

It is no test file by its name: Triton has to be imported with TRITON_INTERPRET=1 in the environment, and then all of it
is interpreted for the rest of the process. So it is run in a process of its own.
"""

import json
import math
from itertools import accumulate, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isles import codecs
from isles.bench import device as bench
from isles.cli import main
from isles.core.outer import OuterSGD
from isles.doctor import kernels
from isles.wire import device_kernels as device
from isles.wire import device_tables, fused, reduction
from isles.wire.reduction import Gathered
from tests import interpreter

torch.set_num_threads(1)
interpreter.prepare()
LARGEST = torch.finfo(torch.float32).max
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (0.0, -0.0, 2.0**-149, -(2.0**-149), 1e-40, 2.0**-126, 2.0**-120, 1.0, -1.0, 6e4, LARGEST, -LARGEST)
every_codec = pytest.mark.parametrize("name", device.LIMITS)
sizes = st.lists(st.one_of(st.integers(0, 3), st.integers(100, 150), st.integers(1, 2500)), min_size=1, max_size=6)
seeds = st.integers(0, 2**31)
scales = st.sampled_from([1e-43, 1e-36, 2.0**-119, 1e-3, 1.0, 1e30, 1e37])
examples = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def large_tiles(monkeypatch):
    """What takes time here is the number of programs: two at the most."""
    monkeypatch.setattr(device_tables, "ROWS", 64)


def values(numel, seed, scale=1.0):
    """Gaussian ones of this scale, a few of them far out, a few of them special, some rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=generator).mul_(scale)
    for factor in (1e3, 1e-6, 1.5):
        places = torch.randint(0, max(numel, 1), (numel // 50,), generator=generator)
        found[places] *= factor
    places = torch.randint(0, max(numel, 1), (numel // 100,), generator=generator)
    kinds = torch.randint(0, len(SPECIAL), (numel // 100,), generator=generator)
    found[places] = torch.tensor(SPECIAL)[kinds]
    if numel > 300:
        found[128:256] = -0.0
    return found.clamp_(-LARGEST, LARGEST)


def thetas_of(flat, lengths, dtypes):
    """Several tensors in a row, and what they hold as one fp32 vector."""
    parts = flat.split(lengths)
    tensors = [part.to(dtypes[i % len(dtypes)]).clone() for i, part in enumerate(parts)]
    return tensors, torch.cat([tensor.float() for tensor in tensors])


def same(first, second):
    """Bit for bit, signs of zeros included; which NaN it is does not matter."""
    kind = torch.int32 if first.dtype is torch.float32 else torch.int16
    here, there = first.isnan(), second.isnan()
    equal = first.view(kind) == second.view(kind)
    return first.shape == second.shape and torch.equal(here, there) and bool((equal | here).all())


def encoded(codec, anchor, thetas):
    payload, finite = torch.full((codec.num_bytes(anchor.numel()),), 77, dtype=torch.uint8), torch.tensor([5]).int()
    device.encode_difference(codec, anchor, thetas, payload, finite)
    return payload, finite.item()


def test_kernels_are_interpreted():
    assert device.interpreted()
    assert device.available(torch.device("cpu"))
    assert not device.available(torch.device("meta"))
    assert [name for name in codecs if device.decodes(codecs[name], torch.zeros(1))] == ["bf16", "int8", "int4", "e3m0"]


# ---- encode


@every_codec
@examples
@given(lengths=sizes, seed=seeds, scale=scales, dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
def test_an_outer_gradient_is_encoded_as_its_difference(large_tiles, name, lengths, seed, scale, dtypes):
    codec, numel = codecs[name], sum(lengths)
    thetas, flat = thetas_of(values(numel, seed, scale), lengths, dtypes)
    anchor = values(numel, seed + 1, scale)
    delta = anchor - flat
    before = [tensor.clone() for tensor in thetas]
    payload, finite = encoded(codec, anchor, thetas)
    assert finite == bool(torch.isfinite(delta).all())
    if finite:
        assert torch.equal(payload, codec.encode(delta))
    assert all(map(torch.equal, thetas, before)) or not torch.isfinite(flat).all()


@every_codec
def test_what_is_not_finite_is_noticed(name):
    lengths = (1, 199, 2000, 100)
    for place, value in zip((0, 127, 128, 2047, 2048, 2299), (math.nan, math.inf, -math.inf) * 2, strict=True):
        flat = torch.zeros(2300)
        flat[place] = value
        assert encoded(codecs[name], torch.zeros(2300), list(flat.split(lengths)))[1] == 0
        assert encoded(codecs[name], flat, list(torch.zeros(2300).split(lengths)))[1] == 0
    assert encoded(codecs[name], torch.zeros(2300), list(torch.zeros(2300).split(lengths)))[1] == 1


@every_codec
def test_ties_and_thresholds(name, large_tiles):
    """Halves of integers and of mantissa steps, and bf16 numbers of every size."""
    ties = [torch.cat([torch.tensor([x]), torch.arange(-254, 255).float() * x / 254]) for x in (1.0, 7.0, 127.0, 254.0)]
    steps = (torch.arange(1 << 13) << 18 | 1 << 15).int().view(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    every = torch.arange(-(2**15), 2**15, 4).to(torch.int16).view(torch.bfloat16).float().nan_to_num(0.0, 0.0, 0.0)
    edges = torch.tensor([1.0, *(x * 2.0**-k for k in range(9) for x in (0.75, 0.7499999, 0.75000006))] * 9)
    for given_values in (*ties, steps, every, edges, -edges):
        assert torch.equal(encoded(codecs[name], given_values, [])[0], codecs[name].encode(given_values))


def test_launches_do_not_depend_on_the_number_of_tensors():
    numel = 4000
    for parts in (1, 7, 200):
        anchor, theta = torch.randn(numel), torch.randn(numel)
        with device.counting() as traffic:
            payload, _ = encoded(codecs["e3m0"], anchor, list(theta.split(numel // parts)))
        assert torch.equal(payload, codecs["e3m0"].encode(anchor - theta))
        assert traffic.launches == 2


# ---- mean


@every_codec
@examples
@given(numel=st.integers(0, 5000), seed=seeds, scale=scales, data=st.data())
def test_the_mean_is_that_of_the_cpu(large_tiles, name, numel, seed, scale, data):
    codec, islands = codecs[name], data.draw(st.integers(1, 5))
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, 7.0, 1e30]), min_size=islands, max_size=islands))
    factors = data.draw(st.none() | st.lists(st.sampled_from([0.0, 1.0, 0.7]), min_size=islands, max_size=islands))
    bodies = [codec.encode(values(numel, seed + island, scale)) for island in range(islands)]
    expected = reduction.weighted_mean(bodies, weights, codec, numel, factors)
    out = torch.full((numel,), math.nan)
    device.weighted_mean(Gathered(bodies, weights, codec, numel, factors), out)
    assert same(out, expected)


@every_codec
def test_a_mean_is_finite_where_the_sum_is_not(name):
    codec, weights = codecs[name], [1.0, 1.0, 1.5]
    one = torch.full((3000,), 1.0)
    one[2900] = 3e38  # one tile has to know of the other
    bodies, out = [codec.encode(one) for _ in range(3)], torch.empty(3000)
    device.weighted_mean(Gathered(bodies, weights, codec, 3000), out)
    assert torch.isfinite(out).all()
    assert same(out, reduction.weighted_mean(bodies, weights, codec, 3000))


@every_codec
def test_any_bytes_are_added_up_to_the_same(name):
    """Also where no encoder would have written them."""
    codec = codecs[name]
    for numel in (1, 130, 5000):
        generator = torch.Generator().manual_seed(numel)
        body = torch.randint(0, 256, (codec.num_bytes(numel),), generator=generator, dtype=torch.uint8)
        out = torch.empty(numel)
        device.weighted_mean(Gathered([body], [1.0], codec, numel), out)
        assert same(out, reduction.weighted_mean([body], [1.0], codec, numel))


# ---- codecs on a device


@pytest.fixture
def on_device(monkeypatch):
    """Codecs take this memory for a device's."""
    monkeypatch.setattr(fused, "_on_device", lambda tensor: True)


@every_codec
def test_adding_up_without_waiting(name):
    codec, payload = codecs[name], codecs[name].encode(values(3000, 1, 1e-3))
    into, fresh = values(3000, 2), torch.full((3000,), math.nan)
    expected = into + codec.decode(payload, 3000) * -0.3, codec.decode(payload, 3000) * 0.7
    device.accumulate(codec, payload, into, -0.3)
    device.accumulate(codec, payload, fresh, 0.7, fresh=True)
    assert same(into, expected[0])
    assert same(fresh, expected[1])


@every_codec
def test_codecs_use_the_kernels_of_a_device(name, on_device, monkeypatch):
    codec = codecs[name]
    for numel, weight, divisor in ((1, 1.0, 1.0), (129, 0.3, 1.3), (3000, 1 / 3, 7.0)):
        given_values, into = values(numel, 1, 1e-3), values(numel, 2, 1e-3)
        with monkeypatch.context() as patch:
            patch.setattr(fused, "_on_device", lambda tensor: False)
            payload, decoded, sums = codec.encode(given_values), None, [into.clone(), into.clone()]
            decoded = codec.decode(payload, numel)
            codec.accumulate(payload, sums[0], weight, divisor=divisor)
            codec.accumulate(payload, sums[1], weight, fresh=True)
        with device.counting() as traffic:
            assert torch.equal(codec.encode(given_values), payload)
            assert same(codec.decode(payload, numel), decoded)
            found = [into.clone(), into.clone()]
            assert codec.accumulate(payload, found[0], weight, divisor=divisor)
            assert codec.accumulate(payload, found[1], weight, fresh=True)
        assert all(map(same, found, sums))
        assert traffic.launches == 8
        buffer = torch.zeros(payload.numel() + 1, dtype=torch.uint8)
        buffer[1:] = payload  # at an odd address
        assert same(codec.decode(buffer[1:], numel), decoded)
        assert torch.equal(codec.encode(given_values, out=buffer[1:]), payload)
    with pytest.raises(ValueError, match="1 are not"):
        codec.encode(torch.tensor([0.0, math.nan]))


# ---- outer step and mixing

steps = {
    "lr": st.sampled_from([1.0, 0.7, 0.4, 0.1]),
    "momentum": st.sampled_from([0.0, 0.9, 0.8]),
    "nesterov": st.booleans(),
    "alpha": st.sampled_from([0.0, 0.1, 0.5, 1 / 3, 0.9, 1.0]),
    "has_velocity": st.booleans(),
    "dtypes": st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
}


def stepped(anchor, mean, velocity, thetas, flat, lr, momentum, nesterov, alpha):
    """The same by `OuterSGD`, and by the formula of mixing as `Fragment.write` rounds it."""
    anchor, velocity = anchor.clone(), None if velocity is None else velocity.clone()
    OuterSGD(momentum=velocity is not None, nesterov=nesterov).update(anchor, mean, velocity, lr, momentum)
    new = anchor if alpha == 0 else flat.clone().mul_(alpha).add_(anchor * (1 - alpha)) if alpha < 1 else flat
    written = [torch.empty_like(tensor) for tensor in thetas]
    torch._foreach_copy_(written, list(new.split([tensor.numel() for tensor in thetas])))
    return anchor, velocity, written


@settings(examples, max_examples=50)
@given(lengths=sizes, seed=seeds, scale=scales, **steps)
def test_outer_step_and_mixing_are_those_of_the_cpu(
    large_tiles, lengths, seed, scale, lr, momentum, nesterov, alpha, has_velocity, dtypes
):
    numel = sum(lengths)
    thetas, flat = thetas_of(values(numel, seed, scale), lengths, dtypes)
    anchor, mean = values(numel, seed + 1, scale), values(numel, seed + 2, scale)
    velocity = values(numel, seed + 3, scale) if has_velocity else None
    how, before = (lr, momentum, nesterov, alpha), mean.clone()
    expected = stepped(anchor, mean, velocity, thetas, flat, *how)
    with device.counting() as traffic:
        device.outer_step_and_mix(anchor, mean, velocity, thetas, *how)
    assert traffic.launches == (numel > 0)
    assert same(mean, before)
    assert same(anchor, expected[0])
    assert velocity is None or same(velocity, expected[1])
    assert all(map(same, thetas, expected[2]))


@every_codec
@settings(examples, max_examples=10)
@given(
    lengths=sizes,
    seed=seeds,
    scale=st.sampled_from([1e-43, 1e-3, 1e37, 3e38]),
    factors=st.sampled_from([None, [1.0, 1.0, 0.3], [0.0, 1.0, 0.0]]),
    shares=st.sampled_from([(), (0.3, -0.3), (0.0, -0.5), (1.0,)]),
    **steps,
)
def test_a_step_from_payloads_is_a_step_with_their_mean(
    large_tiles, name, lengths, seed, scale, factors, shares, lr, momentum, nesterov, alpha, has_velocity, dtypes
):
    """Eager updates add shares of own payloads to the mean; a robust mean has factors, maybe all of them zero."""
    codec, numel, weights = codecs[name], sum(lengths), [1.0, 0.0, 0.7]
    thetas, flat = thetas_of(values(numel, seed, 1e-3), lengths, dtypes)
    anchor, velocity = values(numel, seed + 1), values(numel, seed + 3) if has_velocity else None
    bodies = [codec.encode(values(numel, seed + island, scale).abs()) for island in range(3)]
    more = [(codec.encode(values(numel, seed + 10 + n, 1e-3)), share) for n, share in enumerate(shares)]
    gathered, how = Gathered(bodies, weights, codec, numel, factors), (lr, momentum, nesterov, alpha)
    mean = gathered.mean()
    for payload, share in more:
        codec.accumulate(payload, mean, share)
    expected = stepped(anchor, mean, velocity, thetas, flat, *how)
    with device.counting() as traffic:
        device.outer_step_and_mix(anchor, gathered, velocity, thetas, *how, more)
    averaged = factors is None or any(weight * factor for weight, factor in zip(weights, factors, strict=True))
    assert traffic.launches == ((3 if averaged else 2) if numel else 0)
    assert same(anchor, expected[0])
    assert velocity is None or same(velocity, expected[1])
    assert all(map(same, thetas, expected[2]))


@every_codec
def test_a_step_without_a_mean_is_one_with_what_is_added(name):
    """The first rounds of eager updates: an island's own payload, with the signs of its zeros."""
    codec, numel = codecs[name], 3000
    payloads = [codec.encode(values(numel, seed, 1e-3)) for seed in (1, 2)]
    for shares in ((0.5,), (0.5, -0.3), (-0.0,)):
        anchor, velocity = values(numel, 3).clamp_(max=0.0), torch.zeros(numel)
        mean = codec.decode(payloads[0], numel).mul_(shares[0])
        if len(shares) > 1:
            codec.accumulate(payloads[1], mean, shares[1])
        for speed, how in ((velocity, (0.4, 0.9, True, 0.5)), (None, (1.0, 0.0, False, 0.0))):
            theta = values(numel, 4)
            expected = stepped(anchor, mean, speed, [theta], theta.clone(), *how)
            found = anchor.clone(), None if speed is None else speed.clone()
            more = list(zip(payloads, shares, strict=False))
            device.outer_step_and_mix(found[0], Gathered((), (), codec, numel), found[1], [theta], *how, more)
            assert same(found[0], expected[0])
            assert speed is None or same(found[1], expected[1])
            assert same(theta, expected[2][0])


def test_a_step_needs_a_payload_with_a_weight():
    anchor, codec = torch.zeros(10), codecs["e3m0"]
    gathered = Gathered([codec.encode(anchor)], [0.0], codec, 10)
    with pytest.raises(ValueError, match="weight zero"):
        device.outer_step_and_mix(anchor, gathered, None, [anchor.clone()], 1, 0, False, 0)


# ---- what it costs: bytes of device memory a value

NUMEL = 128 * 48
PAYLOAD = {"e3m0": 66 / 128, "int4": 66 / 128, "int8": 130 / 128, "bf16": 2.0}
TABLES = 0.15  # bytes a value at the most, for tables in which every tile looks addresses up


def bytes_a_value(action, *arguments):
    with device.counting() as traffic:
        action(*arguments)
    return traffic.num_bytes / NUMEL, traffic.launches


@pytest.mark.parametrize(("name", "dtype"), [*product(device.LIMITS, DTYPES[:1]), *product(["e3m0"], DTYPES[1:])])
def test_traffic_of_encoding(name, dtype):
    codec, anchor = codecs[name], torch.randn(NUMEL)
    thetas = [part.to(dtype) for part in torch.randn(NUMEL).split(NUMEL // 4 + 5)]
    found, launches = bytes_a_value(encoded, codec, anchor, thetas)
    least = 4 + dtype.itemsize + PAYLOAD[name]
    assert least <= found <= least + TABLES
    assert launches == 2
    assert found <= 9 or (dtype is torch.float32 and name in ("int8", "bf16")), "over a byte a value in the payload"


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_traffic_of_applying(dtype, alpha, momentum):
    codec, anchor, mean = codecs["e3m0"], torch.randn(NUMEL), torch.randn(NUMEL)
    velocity = torch.randn(NUMEL) if momentum else None
    thetas = [part.to(dtype) for part in torch.randn(NUMEL).split(NUMEL // 4 + 5)]
    bodies, how = [codec.encode(torch.randn(NUMEL)) for _ in range(2)], (0.4, momentum, True, alpha)
    state = 8 + (8 if momentum else 0) + dtype.itemsize * (2 if alpha else 1)
    found, launches = bytes_a_value(device.outer_step_and_mix, anchor, mean, velocity, thetas, *how)
    assert 4 + state <= found <= 4 + state + TABLES
    assert launches == 1
    gathered = Gathered(bodies, [1.0, 1.0], codec, NUMEL)
    for more in ([], [(bodies[0], 0.5), (bodies[1], -0.5)]):  # of eager updates
        found, launches = bytes_a_value(device.outer_step_and_mix, anchor, gathered, velocity, thetas, *how, more)
        least = state + (4 + len(more)) * PAYLOAD["e3m0"]
        assert least <= found <= least + TABLES
        assert launches == 3


def test_tables_are_made_once():
    thetas, anchor = list(torch.randn(600).split(100)), torch.randn(600)
    encoded(codecs["e3m0"], anchor, thetas)
    before = dict(device_tables._tables)
    encoded(codecs["int8"], anchor, thetas)
    assert dict(device_tables._tables) == before
    first = list(accumulate([tensor.numel() for tensor in thetas]))
    table, ranges = device_tables.table_of_tensors(thetas, anchor)
    assert table[:, 2].tolist() == first
    assert ranges.tolist() == [[0, 6]]


def test_what_kernels_can_work_on():
    anchor = torch.zeros(20)
    assert device.fits([torch.zeros(10), torch.nn.Parameter(torch.zeros(2, 5).half())], anchor)
    for bad in (torch.zeros(20).double(), torch.zeros(40)[::2], torch.zeros(20, device="meta")):
        assert not device.fits([bad], anchor)


# ---- isles doctor, isles bench device


def test_the_doctor_tests_these_kernels():
    assert kernels.check_device(torch.device("cpu")) == dict.fromkeys((*device.LIMITS, "outer"), kernels.SAME)


@pytest.mark.parametrize("broken", ["weighted_mean", "encode_difference", "outer_step_and_mix"])
def test_the_doctor_finds_other_bits(broken, monkeypatch):
    right, changed = getattr(device, broken), {"weighted_mean": 1, "encode_difference": 3, "outer_step_and_mix": 2}

    def wrong(*arguments):
        right(*arguments)
        arguments[changed[broken]].view(torch.uint8)[4] ^= 1

    monkeypatch.setattr(device, broken, wrong)
    found = kernels.check_device(torch.device("cpu"))
    bad = {name for name, result in found.items() if result != kernels.SAME}
    assert bad == {*device.LIMITS, *(["outer"] if broken == "outer_step_and_mix" else [])}


def test_kernels_are_measured(large_tiles, capsys, monkeypatch):
    monkeypatch.setattr(bench, "TENSORS", 3)
    assert main(["bench", "device", "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["device"]
    assert result["rows"]["e3m0: encode"]["bytes_a_value"] == 8 + codecs["e3m0"].num_bytes(5000) / 5000
    assert len(result["rows"]) == 4 * len(device.LIMITS)
    assert all(row["seconds"] > 0 and row["against_copy"] > 0 for row in result["rows"].values())
