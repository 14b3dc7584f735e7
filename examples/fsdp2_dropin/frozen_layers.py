"""Fine-tuning: the lower layers are frozen, one is thawed later; an optimizer for what is trained."""

import atexit

import torch
import torch.distributed as dist
from task import Transformer, batch, device_type, loss_of, report
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
atexit.register(dist.destroy_process_group)
torch.manual_seed(0)
model = Transformer().to(device_type())
for part in (model.tokens, model.positions, *model.layers[:2]):
    part.requires_grad_(False)
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

for step in range(8):
    if step == 4:
        model.layers[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[1].parameters()), "lr": 1e-3})
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
