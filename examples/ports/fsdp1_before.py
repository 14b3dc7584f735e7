"""A loop with torch's FSDP1, with clipping.

torchrun --standalone --nproc-per-node 2 examples/ports/fsdp1_before.py
"""

import torch
import torch.distributed as dist
from tiny import Block, Model, batch, loss_of, report
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group()
torch.manual_seed(0)
model = FullyShardedDataParallel(
    Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(8):
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)

dist.destroy_process_group()
