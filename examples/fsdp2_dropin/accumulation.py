"""Four micro-batches a step, whose gradients are communicated once; weights stay gathered between them."""

import atexit

import torch
import torch.distributed as dist
from task import Transformer, batch, device_type, loss_of, report
from torch.distributed.fsdp import fully_shard

MICRO_BATCHES = 4

dist.init_process_group()
atexit.register(dist.destroy_process_group)
torch.manual_seed(0)
model = Transformer().to(device_type())
for layer in model.layers:
    fully_shard(layer, reshard_after_forward=True)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

for step in range(6):
    total = torch.zeros((), device=device_type())
    for micro in range(MICRO_BATCHES):
        last = micro == MICRO_BATCHES - 1
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        inputs, targets = batch(MICRO_BATCHES * step + micro, size=4)
        loss = loss_of(model(inputs), targets) / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    report(step, total)
