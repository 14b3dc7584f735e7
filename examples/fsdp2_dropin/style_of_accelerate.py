"""As Accelerate's ``prepare`` does it: the optimizer is there before the model is sharded, and gets the new parameters.

Which is which is found by the addresses of the old ones. The values go from rank 0 to a model on the meta device,
parameter by parameter. Gradients are accumulated under a context that switches communication off.
"""

import atexit
from contextlib import nullcontext

import torch
import torch.distributed as dist
from task import Block, Transformer, batch, device_type, loss_of, report
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor


def load_from_rank_0(model, whole):
    """``fsdp2_load_full_state_dict``: broadcast each whole tensor, keep this rank's part, assign all parts at once."""
    parts = {}
    for name, sharded in model.state_dict().items():
        value = (
            whole[name].detach().clone()
            if dist.get_rank() == 0
            else torch.empty(sharded.size(), dtype=sharded.dtype)
        )
        value = value.to(sharded.device_mesh.device_type)
        dist.broadcast(value, src=0)
        parts[name] = distribute_tensor(value, sharded.device_mesh, sharded.placements)
    model.load_state_dict(parts, assign=True)


def prepare(model, optimizer):
    by_address = {p.data_ptr(): name for name, p in model.named_parameters()}
    groups = [[by_address[p.data_ptr()] for p in group["params"]] for group in optimizer.param_groups]
    whole = model.state_dict()
    model = model.to(torch.device("meta"))
    options = {
        "reshard_after_forward": True,
        "offload_policy": OffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(),
        "mesh": None,
        "ignored_params": set(),
    }
    for module in list(model.modules())[::-1]:
        if isinstance(module, Block) and not isinstance(module, FSDPModule):
            fully_shard(module, **options)
    if not isinstance(model, FSDPModule):
        fully_shard(model, **options)
    load_from_rank_0(model, whole)
    sharded = dict(model.named_parameters())
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [sharded[name] for name in names]
    return model, optimizer


class no_sync:
    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.model.set_requires_gradient_sync(False)

    def __exit__(self, *_):
        self.model.set_requires_gradient_sync(True)


dist.init_process_group()
atexit.register(dist.destroy_process_group)
torch.manual_seed(dist.get_rank())  # rank 0's values count
model = Transformer().to(device_type())
matrices = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3
)
model, optimizer = prepare(model, optimizer)

for step in range(16):
    syncs = step % 2 == 1
    with nullcontext() if syncs else no_sync(model):
        inputs, targets = batch(step)
        loss = loss_of(model(inputs), targets)
        (loss / 2).backward()
    if syncs:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report(step, loss)

values = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
for name, value in values.items():
    print(f"{name} {value.double().sum().item():.9f}")
