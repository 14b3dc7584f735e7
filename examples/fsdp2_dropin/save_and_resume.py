"""torch.distributed.checkpoint: save half-way, begin again with another model and optimizer, and go on."""

import atexit
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import Transformer, batch, device_type, loss_of, report
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def build(seed):
    torch.manual_seed(seed)
    model = Transformer().to(device_type())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, steps):
    for step in steps:
        inputs, targets = batch(step)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)


dist.init_process_group()
atexit.register(dist.destroy_process_group)
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)

model, optimizer = build(seed=0)
train(model, optimizer, range(4))
values, moments = get_state_dict(model, optimizer)
dcp.save({"model": values, "optimizer": moments}, checkpoint_id=folder[0])

model, optimizer = build(seed=1)
values, moments = get_state_dict(model, optimizer)
state = {"model": values, "optimizer": moments}
dcp.load(state, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
train(model, optimizer, range(4, 8))

dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder[0])
