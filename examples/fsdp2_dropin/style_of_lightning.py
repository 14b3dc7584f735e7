"""As Lightning Fabric's ModelParallelStrategy does it: a function of the user's shards a model that has no memory yet.

Then it gets memory and values module by module, and ``no_backward_sync`` switches communication off in every sharded
module that it finds. Clipping and checkpoints go by torch's functions for DTensors.
"""

import atexit
from contextlib import contextmanager

import torch
import torch.distributed as dist
from task import Block, Transformer, batch, device_type, loss_of, report
from torch.distributed._composable.fsdp import FSDPModule
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def parallelize(model, device_mesh):
    mesh = device_mesh["data_parallel"]
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def materialize(model, device):
    """Every module with memory of its own on the meta device gets some, and resets its parameters."""
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()


@contextmanager
def no_backward_sync(model, enabled):
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert sharded
    for module in sharded:
        module.set_requires_gradient_sync(not enabled, recurse=False)
    yield
    for module in sharded:
        module.set_requires_gradient_sync(enabled, recurse=False)


dist.init_process_group()
atexit.register(dist.destroy_process_group)
mesh = init_device_mesh(
    device_type(), (dist.get_world_size(), 1), mesh_dim_names=("data_parallel", "tensor_parallel")
)
torch.manual_seed(0)
whole = Transformer().state_dict()
with torch.device("meta"):
    model = Transformer()
model = parallelize(model, mesh)
materialize(model, device_type())
set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(8):
    for micro in range(2):
        accumulating = micro == 0
        with no_backward_sync(model, enabled=accumulating):
            inputs, targets = batch(2 * step + micro)
            loss = loss_of(model(inputs), targets)
            (loss / 2).backward()
        assert all((p.grad is None) == accumulating for p in model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"norm {norm.item():.7f}")
    report(step, loss)

values = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
for name, value in values.items():
    print(f"{name} {value.double().sum().item():.9f}")
