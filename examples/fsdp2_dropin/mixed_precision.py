"""bfloat16 in forward and backward, float32 where gradients are summed, clipping, a learning-rate schedule."""

import atexit

import torch
import torch.distributed as dist
from task import Transformer, batch, device_type, loss_of, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

dist.init_process_group()
atexit.register(dist.destroy_process_group)
mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
torch.manual_seed(0)
model = Transformer().to(device_type())
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
# One unit of its own for what comes last: it stays gathered between forward and backward.
fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))

for step in range(8):
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    report(step, loss)
    if dist.get_rank() == 0:
        print(
            f"         norm {norm.full_tensor().item() if hasattr(norm, 'full_tensor') else norm.item():.5f}"
        )
