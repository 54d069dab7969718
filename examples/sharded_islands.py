"""Islands of several ranks: the model sharded inside an island (FSDP2), isles between the islands.

    torchrun --nproc-per-node 4 examples/sharded_islands.py        # 2 islands x 2 ranks on this machine

On real machines every node is an island: start it with `torchrun --nnodes 2 --nproc-per-node 8 ...` on each, and the
mesh below is 2 x 8. Each rank exchanges its own shard with its peer in the other island.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import isles

ISLANDS, STEPS, WIDTH = 2, 200, 64

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)  # the same weights everywhere
mesh = init_device_mesh("cpu", (ISLANDS, dist.get_world_size() // ISLANDS), mesh_dim_names=("island", "rank"))

layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
model = nn.Sequential(nn.Linear(1, WIDTH), *layers, nn.Linear(WIDTH, 1))
for layer in layers:
    fully_shard(layer, mesh=mesh["rank"])
fully_shard(model, mesh=mesh["rank"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

method = isles.Method.streaming(sync_every=20, overlap=2)
world = isles.TorchWorld(mesh["island"])
with isles.DiLoCo(model, optimizer, method, world=world, outer_device="cpu") as diloco:
    for step in range(1, STEPS + 1):
        rows = torch.rand(32, 1, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))
        loss = (model(rows) - torch.sin(6 * rows)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS // 2:  # every island saves its own, all its ranks together; any number of ranks can load it
            folder = os.path.join(tempfile.gettempdir(), f"isles-sharded-{os.environ.get('TORCHELASTIC_RUN_ID', '0')}")
            path = os.path.join(folder, f"island-{mesh.get_local_rank('island')}")
            dcp.save(diloco.state_dict(sharded=True), checkpoint_id=path, process_group=mesh["rank"].get_group())

sent = torch.tensor(float(diloco.stats.bytes_sent))
dist.all_reduce(sent)
if dist.get_rank() == 0:
    shard = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(
        f"loss {loss.item():.4f}; a rank holds {shard:,} of {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    print(f"all ranks together sent {int(sent):,} bytes")
dist.destroy_process_group()
