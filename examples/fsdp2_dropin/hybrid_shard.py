"""HSDP: shards inside a host, replicas across; the sum over the replicas waits for the last micro-batch."""

import atexit

import torch
import torch.distributed as dist
from task import Transformer, batch, device_type, loss_of, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
atexit.register(dist.destroy_process_group)
world = dist.get_world_size()
mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = Transformer().to(device_type())
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(6):
    for micro in range(2):
        model.set_requires_all_reduce(micro == 1)
        inputs, targets = batch(2 * step + micro)
        loss = loss_of(model(inputs), targets) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
