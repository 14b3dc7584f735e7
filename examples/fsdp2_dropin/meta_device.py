"""A model that is built without memory, sharded, given memory, and then initialised module by module."""

import atexit

import torch
import torch.distributed as dist
from task import Transformer, batch, device_type, loss_of, report
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

dist.init_process_group()
atexit.register(dist.destroy_process_group)
with torch.device("meta"):
    model = Transformer()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
assert isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters())
model.to_empty(device=device_type())


def initialise(parameter: DTensor) -> None:
    """Every rank draws the whole parameter from the same seed and keeps its part."""
    whole = torch.empty(parameter.shape, device=device_type())
    if parameter.ndim > 1:
        nn.init.normal_(whole, std=0.05)
    else:
        nn.init.ones_(whole)
    parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


torch.manual_seed(0)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        initialise(parameter)
        if name.endswith("bias"):
            parameter.zero_()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)

for step in range(8):
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    report(step, loss)
