"""A loop with torch's DistributedDataParallel, gradient accumulation and clipping.

torchrun --standalone --nproc-per-node 2 examples/ports/ddp_before.py
"""

import torch
import torch.distributed as dist
from tiny import Model, batch, loss_of, report
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(8):
    inputs, targets = batch(2 * step)
    with model.no_sync():
        (loss_of(model(inputs), targets) / 2).backward()
    inputs, targets = batch(2 * step + 1)
    loss = loss_of(model(inputs), targets)
    (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)

dist.destroy_process_group()
