"""The loop of fsdp1_before.py, sharded by Shardwright.

torchrun --standalone --nproc-per-node 2 examples/ports/fsdp1_after.py
"""

import torch
import torch.distributed as dist
from tiny import Block, Model, batch, loss_of, report, say
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardwright as sw

dist.init_process_group()
torch.manual_seed(0)
model = sw.wrap.auto_wrap(Model(), ModuleWrapPolicy({Block}))
say(sw.describe(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(8):
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    sw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)

dist.destroy_process_group()
