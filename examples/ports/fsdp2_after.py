"""The loop of fsdp2_before.py, sharded by Shardwright: one import differs.

torchrun --standalone --nproc-per-node 2 examples/ports/fsdp2_after.py
"""

import torch
import torch.distributed as dist
from tiny import Model, batch, loss_of, report, say

import shardwright as sw
from shardwright import fully_shard

dist.init_process_group()
torch.manual_seed(0)
model = Model()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
say(sw.describe(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(8):
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)

dist.destroy_process_group()
