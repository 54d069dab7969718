"""Muon, the inner optimizer for matrices: directions, lengths, AdamW for the rest, and what it refuses."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import isles
from isles.cli import main
from isles.train.model import LADDER, Decoder
from isles.train.muon import MOMENTUM, Muon, groups_of, orthogonal
from tests import ranks


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def decoder(seed=0):
    torch.manual_seed(seed)
    return Decoder(LADDER["nano"], vocabulary=19)


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (16, 64), (1, 8)])
def test_a_step_goes_in_all_directions_alike(shape):
    matrix = torch.randn(3, *shape, generator=torch.manual_seed(1)) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None]
    found = orthogonal(matrix)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3
    assert values.max() < 1.3
    alignment = (found * (u @ vt)).sum((1, 2)) / min(shape)
    assert torch.all(alignment > 0.6), "another direction than the nearest orthogonal matrix"


def test_zero_gradients_are_no_step():
    assert torch.equal(orthogonal(torch.zeros(1, 4, 4)), torch.zeros(1, 4, 4))


def test_the_first_step_is_nesterovs_orthogonal_and_of_the_length_of_adamw():
    weight = nn.Parameter(torch.zeros(32, 8))
    optimizer = Muon([{"params": [weight], "orthogonal": True}], lr=0.01)
    weight.grad = torch.randn(32, 8, generator=torch.manual_seed(2))
    optimizer.step()
    expected = -0.01 * 0.2 * 32**0.5 * orthogonal((1 + MOMENTUM) * weight.grad[None])[0]
    torch.testing.assert_close(weight.detach(), expected)
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.01 * 0.2, rel=0.2)


def test_what_is_no_matrix_in_a_layer_takes_adamws_steps():
    ours, theirs = decoder(), decoder()
    others = [name for name, p in theirs.named_parameters() if not (p.dim() == 2 and name.startswith("layers"))]
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    muon = Muon(groups_of(ours), **settings)
    adamw = torch.optim.AdamW([dict(theirs.named_parameters())[name] for name in others], **settings)
    for step in range(5):
        for model, optimizer in ((ours, muon), (theirs, adamw)):
            gradients(model, step)
            optimizer.step()
    for name in others:
        torch.testing.assert_close(dict(ours.named_parameters())[name], dict(theirs.named_parameters())[name])
    assert len(muon.param_groups[0]["params"]) == 4 * len(ours.layers)


def test_a_wrapped_model_has_the_groups_of_a_plain_one(one_process_group):
    model = decoder()
    plain = [group["params"] for group in groups_of(model)]
    for wrapped in (nn.parallel.DistributedDataParallel(model), torch.compile(model)):
        for one, other in zip(plain, (group["params"] for group in groups_of(wrapped)), strict=True):
            assert [id(parameter) for parameter in one] == [id(parameter) for parameter in other]


def test_a_saved_state_goes_on_exactly():
    first, second = decoder(), decoder(1)
    before, after = (Muon(groups_of(model), lr=1e-3) for model in (first, second))
    for step in range(3):
        gradients(first, step)
        before.step()
    second.load_state_dict(first.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for model, optimizer in ((first, before), (second, after)):
        gradients(model, 9)
        optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_vectors_shards_and_models_without_layers_are_refused(one_process_group):
    with pytest.raises(ValueError, match="whole matrices, not vectors"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "orthogonal": True}], lr=0.1)
    mesh = init_device_mesh("cpu", (1,))
    shard = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"not shards.*--inside ddp"):
        Muon([{"params": [shard], "orthogonal": True}], lr=0.1)
    with pytest.raises(ValueError, match="use AdamW"):
        groups_of(nn.Linear(3, 3))


def test_the_trainer_has_it(tmp_path, capsys, monkeypatch):
    ranks.be_the_only_one(monkeypatch)
    flags = "train --optimizer muon --model nano --data synthetic:0.05 --tokenizer bytes --batch-size 2 --threads 1"
    flags = f"{flags} --sequence-length 16 --sync-every 4 --warmup-steps 2 --steps 8 --sample-tokens 0 --json"

    def train(name, *more):
        assert main([*flags.split(), "--run-dir", str(tmp_path / name), *more]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["val_loss"]

    loss = train("one")
    assert loss == train("another")
    assert loss != train("adamw", "--optimizer", "adamw")


def test_islands_with_muon_agree():
    def island(world):
        model = decoder()
        optimizer = Muon(groups_of(model), lr=1e-2)
        with isles.DiLoCo(model, optimizer, isles.Method.streaming(sync_every=2), world=world):
            for step in range(6):
                gradients(model, 10 * step + world.rank)
                optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = isles.run_local(island, 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
