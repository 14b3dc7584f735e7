"""The loop of deepspeed_before.py, sharded by Shardwright. Model and optimizer are objects of your own again.

torchrun --standalone --nproc-per-node 2 examples/ports/deepspeed_after.py
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

for number in range(16):
    inputs, targets = batch(number)
    loss = loss_of(model(inputs), targets)
    (loss / 2).backward()
    if number % 2:
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(number // 2, loss)

dist.destroy_process_group()
