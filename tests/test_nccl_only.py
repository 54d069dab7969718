"""A default process group that has no backend for tensors of the host, as one that was made with "nccl" has none.

What isles exchanges goes over groups of its own, from host memory. Nothing of it, in training, in checkpoints and at
the end, may use the default group: it would raise at the end of a long run.
"""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import isles
from tests import processes

METHODS = {
    "streaming": isles.Method.streaming(sync_every=4, fragments=2, overlap=1),
    "eager": isles.Method.eager(sync_every=3, fragments=2),
}


def train(rank, meeting, folder, name, inside):
    """One rank of two islands of two; the group of an island is the only one with a backend for the host."""
    seconds = datetime.timedelta(seconds=60)
    dist.init_process_group("cuda:gloo", init_method=meeting, rank=rank, world_size=4, timeout=seconds)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    islands = [dist.new_group(ranks, backend="cpu:gloo", timeout=seconds) for ranks in ([0, 1], [2, 3])]
    island, group = rank // 2, islands[rank // 2]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.BatchNorm1d(8))
    if inside == "fsdp":
        model = fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with isles.DiLoCo(model, optimizer, METHODS[name], outer_device="cpu") as diloco:
        for step in range(9):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step))
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with diloco.global_model():
            model(rows)
        saved = diloco.state_dict(sharded=inside == "fsdp")
        if inside == "fsdp":
            place = f"{folder}/island-{island}"
            dcp.save(saved, checkpoint_id=place, process_group=group)
            saved = diloco.state_dict(sharded=True)
            dcp.load(saved, checkpoint_id=place, process_group=group)
        diloco.load_state_dict(saved)
    return [p.full_tensor() if inside == "fsdp" else p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("inside", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", METHODS)
def test_nothing_uses_a_default_group_that_refuses_the_hosts_tensors(name, inside, tmp_path):
    meeting = f"file://{tmp_path}/meeting"
    results = processes.values(train, 4, tmp_path, meeting, str(tmp_path), name, inside, ranks=0)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
