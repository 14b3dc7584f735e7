"""As torchtitan does it: a recipe of parallelisms, gradients that are summed and not averaged, a norm, DCP.

Losses are divided by the number of tokens of all ranks, so the gradient divide factor is 1. The class of sharded
modules comes from the other of torch's two modules that export it.
"""

import atexit
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import LENGTH, Transformer, batch, device_type, report
from torch import nn
from torch.distributed._composable.fsdp import FSDPModule
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def apply_fsdp(model, mesh, reshard_after_forward, cpu_offload=False):
    config = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32)}
    if cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    fully_shard(model.tokens, **config, reshard_after_forward=reshard_after_forward)
    for layer in model.layers:
        fully_shard(layer, **config, reshard_after_forward=reshard_after_forward)
    fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    fully_shard(model, **config)
    for layer, later in zip(model.layers[:-1], model.layers[1:], strict=True):
        layer.set_modules_to_forward_prefetch([later])


def disable_gradient_division(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other way


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm):
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients, 2.0, False, None)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


class Job(Stateful):
    def __init__(self, seed):
        torch.manual_seed(seed)
        with torch.device("meta"):
            self.model = Transformer()
        apply_fsdp(self.model, init_device_mesh(device_type(), (dist.get_world_size(),)), True)
        self.model.to_empty(device=device_type())
        torch.manual_seed(seed)
        whole = Transformer().to(device_type()).state_dict()
        set_model_state_dict(self.model, whole, options=StateDictOptions(full_state_dict=True))
        disable_gradient_division(self.model)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LambdaLR
        self.schedule = warmup(self.optimizer, lambda step: min(1.0, (step + 1) / 3))
        self.step = 0

    def state_dict(self):
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(
                self.model, self.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
            ),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state):
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(
            self.model,
            self.optimizer,
            state["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]

    def train(self, until):
        while self.step < until:
            inputs, targets = batch(self.step)
            tokens = torch.tensor(inputs.shape[0] * LENGTH, device=device_type())
            dist.all_reduce(tokens)
            logits = self.model(inputs)
            loss = nn.functional.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
            )
            (loss / tokens).backward()
            norm = clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"norm {norm.item():.7f}")
            report(self.step, loss / targets.numel())
            self.step += 1


dist.init_process_group()
atexit.register(dist.destroy_process_group)
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
job = Job(seed=0)
job.train(until=6)
dcp.save({"app": job}, checkpoint_id=folder[0])
job = Job(seed=1)
dcp.load({"app": job}, checkpoint_id=folder[0])
job.train(until=12)
dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder[0])
