"""The loop of ddp_before.py, sharded by Shardwright.

torchrun --standalone --nproc-per-node 2 examples/ports/ddp_after.py
"""

import torch
import torch.distributed as dist
from tiny import Block, Model, batch, loss_of, report, say

import shardwright as sw

dist.init_process_group()
torch.manual_seed(0)
model = sw.wrap.auto_wrap(Model(), sw.wrap.by_class(Block))
say(sw.describe(model))
optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

for step in range(8):
    inputs, targets = batch(2 * step)
    (loss_of(model(inputs), targets) / 2).backward()
    inputs, targets = batch(2 * step + 1)
    loss = loss_of(model(inputs), targets)
    (loss / 2).backward()
    sw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)

dist.destroy_process_group()
