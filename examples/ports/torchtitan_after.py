"""The loop of torchtitan_before.py, sharded by Shardwright: the recipe's names come from another package.

torchrun --standalone --nproc-per-node 2 examples/ports/torchtitan_after.py
"""

import torch
import torch.distributed as dist
from tiny import Model, batch, report, say
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright import FSDPModule, MixedPrecisionPolicy, fully_shard


def apply_fsdp(model, mesh):
    config = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    fully_shard(model.tokens, **config)
    for layer in model.layers:
        fully_shard(layer, **config)
    fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    fully_shard(model, **config)


def disable_gradient_division(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other way


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm):
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


dist.init_process_group()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
with torch.device("meta"):
    model = Model()
apply_fsdp(model, mesh)
say(sw.describe(model))
model.to_empty(device="cpu")
torch.manual_seed(0)
set_model_state_dict(model, Model().state_dict(), options=StateDictOptions(full_state_dict=True))
disable_gradient_division(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

for step in range(8):
    inputs, targets = batch(step)
    tokens = torch.tensor(targets.numel())
    dist.all_reduce(tokens)
    logits = model(inputs).float().flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    (loss / tokens).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    report(step, loss / targets.numel())

dist.destroy_process_group()
