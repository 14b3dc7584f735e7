"""The program names the units that are gathered ahead, and gathers the first one before the step begins."""

import atexit

import torch
import torch.distributed as dist
from task import Transformer, batch, device_type, loss_of, report
from torch.distributed.fsdp import fully_shard

AHEAD = 2

dist.init_process_group()
atexit.register(dist.destroy_process_group)
torch.manual_seed(0)
model = Transformer().to(device_type())
layers = list(model.layers)
for layer in layers:
    fully_shard(layer)
fully_shard(model)
for i, layer in enumerate(layers):
    layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + AHEAD])
    layer.set_modules_to_backward_prefetch(layers[max(0, i - AHEAD) : i][::-1])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(8):
    model.unshard(async_op=True)
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
