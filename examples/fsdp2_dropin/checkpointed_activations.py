"""Activation checkpointing of every block, inside its unit, and an evaluation after each step."""

import atexit

import torch
import torch.distributed as dist
from task import Transformer, batch, device_type, loss_of, report
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
atexit.register(dist.destroy_process_group)
torch.manual_seed(0)
model = Transformer().to(device_type())
for i, layer in enumerate(model.layers):
    model.layers[i] = checkpoint_wrapper(layer)
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(6):
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
    model.eval()
    with torch.no_grad():
        inputs, targets = batch(1000 + step)
        report(step, loss_of(model(inputs), targets))
    model.train()
