"""What islands copy is copied bit for bit, what is equal on all of them stays as it is, and a mean is a good one.

`sync_initial` gives every island the bytes of island 0, whatever their type. `finish()` leaves the same model
everywhere: frozen parameters and buffers too. Buffers that are equal do not change by a bit, those that differ are
averaged in their own precision, and one buffer that cannot be averaged (an attention mask of -inf) is no obstacle to
the others. Statistics that went NaN with an island's weights recover with them. What shows the global model puts
everything back, also where it fails half-way.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import isles
from tests.reference import Tower, toy_backward, weights_of

torch.set_num_threads(1)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def bits_of(model):
    """Every parameter and buffer that a checkpoint of the model would hold, byte by byte."""
    return {name: (tensor.dtype, bits(tensor)) for name, tensor in model.state_dict().items()}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


METHODS = {
    "diloco": isles.Method.diloco(sync_every=2),
    "streaming": isles.Method.streaming(sync_every=3, fragments=2),
    "eager": isles.Method.eager(sync_every=2, fragments=2),
}


# ---- at the start


def random_of(dtype, generator, numel=50):
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(numel, dtype=wide, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (numel,), dtype=dtype, generator=generator)


FROZEN = [torch.complex64, torch.complex128, torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8]
TRAINED = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Zoo(nn.Module):
    """Parameters and buffers of many types, with values that fp32 cannot hold."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        name = lambda kind, dtype: f"{kind}_{dtype}".replace("torch.", "")
        for dtype in TRAINED:
            self.register_parameter(name("trained", dtype), nn.Parameter(random_of(dtype, generator)))
        for dtype in FROZEN:
            frozen = nn.Parameter(random_of(dtype, generator), requires_grad=False)
            self.register_parameter(name("frozen", dtype), frozen)
        for dtype in (*FROZEN, torch.bool):
            self.register_buffer(name("buffer", dtype), random_of(dtype, generator))
        self.register_buffer("buffer_scalar", torch.tensor(2**40 + 1 + seed))
        self.register_buffer("buffer_transposed", torch.randn(3, 4, generator=generator, dtype=torch.float64).t())
        self.register_buffer("special", torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, seed]))


@pytest.mark.parametrize("kind", ["trained", "frozen", "buffer", "special"])
def test_sync_initial_copies_the_bytes_of_island_0(kind):
    def island(world):
        model = Zoo(seed=world.rank)
        for name in model.state_dict():
            if not name.startswith(kind):
                delattr(model, name)
        model.anything = nn.Parameter(torch.full((3,), float(world.rank)))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        isles.DiLoCo(model, optimizer, isles.Method.diloco(), world=world, sync_initial=True).close()
        return bits_of(model)

    expected = bits_of(Zoo(seed=0))
    for rank, arrived in enumerate(isles.run_local(island, 3)):
        del arrived["anything"]
        assert arrived
        assert not differing(arrived, {name: expected[name] for name in arrived}), f"island {rank}"


def test_a_mask_of_minus_infinity_does_not_keep_sync_initial_from_the_other_buffers():
    def island(world):
        model = Masked(seed=world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        isles.DiLoCo(model, optimizer, isles.Method.diloco(), world=world, sync_initial=True).close()
        return bits_of(model)

    for arrived in isles.run_local(island, 2):
        assert not differing(arrived, bits_of(Masked(seed=0)))


# ---- at the end


class Masked(nn.Module):
    """An attention mask among the buffers, as many language models have one."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.fill_(1.0 + seed)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x):
        return self.norm(self.linear(x))


class Changing(Masked):
    """What a training changes besides its parameters: statistics and counters in several precisions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("wide", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("waves", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def follow(self, rank):
        for buffer in (self.wide, self.narrow, self.waves):
            buffer += 0.1 * (1 + rank)
        self.count += 1 + rank


class Distilled(Masked):
    """Besides the student there is a teacher, its exponential moving average: frozen for autograd, and yet changing."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    @torch.no_grad()
    def follow(self, rank):
        for mean, weight in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            mean.lerp_(weight, 0.1)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("make", "own"),
    [(Changing, ["wide", "norm.running_mean"]), (Distilled, ["teacher.weight"])],
    ids=["buffers", "frozen parameters"],
)
def test_after_finish_all_islands_have_the_same_model(make, own, name):
    def island(world):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(world.rank)
        with isles.DiLoCo(model, optimizer, METHODS[name], world=world, weight=1.0 + world.rank):
            for _ in range(7):
                model(torch.randn(8, 4) + world.rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                model.follow(world.rank)
            before = bits_of(model)
        return before, bits_of(model)

    results = isles.run_local(island, 3)
    assert set(own) <= set(differing(results[0][0], results[1][0])), "before the end they have models of their own"
    for rank, (_, final) in enumerate(results):
        assert not differing(final, results[0][1]), f"islands 0 and {rank}"


def finish_with(make_buffers, islands=3):
    """For each island, with weights 1, 2, 3: its own buffers, and what finish() makes of them."""

    def island(world):
        model = nn.Linear(2, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        for name, buffer in make_buffers(world.rank).items():
            model.register_buffer(name, buffer.clone())
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with isles.DiLoCo(model, optimizer, isles.Method.diloco(), world=world, weight=1.0 + world.rank):
            pass
        return before, dict(model.named_buffers())

    return isles.run_local(island, islands)


TABLE = torch.cat([torch.tensor([0.1]), torch.rand(1000, generator=torch.Generator().manual_seed(0))])
CONSTANT = {"table": TABLE, "wide": TABLE.double() / 3}


@pytest.mark.parametrize("name", CONSTANT)
def test_buffers_that_are_equal_do_not_change_by_a_bit(name):
    """A mean of equal values, computed, is not always the value: with weights 1, 2, 3 some lose their last bit."""
    for before, after in finish_with(lambda rank: {name: CONSTANT[name]}):
        assert bits(before[name]) == bits(after[name])


def test_buffers_in_double_precision_are_averaged_in_double_precision():
    buffer = lambda rank: torch.tensor([1.0 + rank * 1e-10, 0.1 * (1 + rank), 1e300 * rank], dtype=torch.float64)
    expected = sum((1 + rank) * buffer(rank) / 6 for rank in range(3))
    results = finish_with(lambda rank: {"wide": buffer(rank)})
    for _, after in results:
        assert bits(after["wide"]) == bits(results[0][1]["wide"])
        torch.testing.assert_close(after["wide"], expected, rtol=1e-14, atol=0.0)


def test_a_mask_of_minus_infinity_does_not_keep_other_buffers_from_being_averaged():
    mask = torch.full((3, 3), -math.inf).triu(1)
    results = finish_with(lambda rank: {"mask": mask, "mean": torch.full((4,), float(rank))}, islands=2)
    for _, after in results:
        torch.testing.assert_close(after["mean"], torch.full((4,), 2 / 3))
        assert bits(after["mask"]) == bits(mask)


# ---- in between


def test_statistics_that_went_nan_recover_with_the_weights():
    """One NaN in a batch spoils the weights and, for ever, the running statistics: they are no parameters, and the
    round that heals the weights has to heal them.
    """
    astray, every = 1, 3

    def island(world):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(world.rank)
        method = isles.Method(sync_every=every, fragments=2, overlap=1)
        spoiled, finite = [], []
        with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
            for step in range(1, 5 * every):
                rows = torch.randn(8, 4)
                if (world.rank, step) == (astray, 4):
                    rows[0, 0] = math.nan
                model(rows).square().mean().backward()
                if not torch.isfinite(model[1].running_mean).all():
                    spoiled.append(step)
                optimizer.step()
                optimizer.zero_grad()
                finite.append(all(bool(torch.isfinite(value).all()) for value in model.state_dict().values()))
            variance = float(model[1].running_var.min())
        return spoiled, finite, variance, diloco.stats.nonfinite_rounds, bits_of(model)

    results = isles.run_local(island, 3)
    for rank, (spoiled, finite, variance, sat_out, final) in enumerate(results):
        assert spoiled[:1] == ([4] if rank == astray else []), "the batch of step 4 has spoiled one island's statistics"
        assert all(finite[4 + 2 * every :]), f"island {rank}, after the next rounds: {finite}"
        assert variance > 0
        assert (sat_out > 0) == (rank == astray)
        assert not differing(final, results[0][4])


def test_global_model_that_fails_half_way_leaves_the_model_as_it_was(monkeypatch):
    """The second write into the model fails: the first one is taken back, and the next time it works."""
    model = Tower(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with isles.DiLoCo(model, optimizer, isles.Method(sync_every=4, fragments=3)) as diloco:
        with diloco.global_model():
            start = weights_of(model)
        for step in (1, 2, 3):
            toy_backward(model, 0, step)
            optimizer.step()
        own = bits_of(model)
        with monkeypatch.context() as broken:
            writes = []

            def failing(write):
                def second_fails(*arguments, **more):
                    writes.append(write)
                    if len(writes) == 2:
                        raise MemoryError("no more memory")
                    return write(*arguments, **more)

                return second_fails

            broken.setattr(torch, "_foreach_copy_", failing(torch._foreach_copy_))
            broken.setattr(torch.Tensor, "copy_", failing(torch.Tensor.copy_))
            with pytest.raises(MemoryError), diloco.global_model():
                pytest.fail("it should not have been entered")
        assert not differing(bits_of(model), own)
        toy_backward(model, 0, 4)
        optimizer.step()  # a training loop that catches the error can go on
        own = bits_of(model)
        with diloco.global_model():
            assert differing(bits_of(model), own)
            assert any(not torch.equal(value, start[name]) for name, value in weights_of(model).items())
        assert not differing(bits_of(model), own)
