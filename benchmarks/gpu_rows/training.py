"""One training step of each engine over the same model, with the same roundings.

Weights are float32 in the optimizer. Forward and backward compute with their bfloat16 roundings, and gradients are cast
to float32 before anything is added up over ranks. FSDP2 and shardwright do that by
``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)``. Plain torch does it as Apex O2 and Megatron do:
the model is in bfloat16, the optimizer has float32 copies, and after its step the model gets their roundings. So all
engines launch the same matrix products. Autocast would not: it keeps the residual stream in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn

import shardwright as sw
from benchmarks.gpu_rows.rows import FSDP2, PLAIN, SHARDWRIGHT, Row, Variant
from shardwright.activations.checkpointing import checkpoint_blocks, compile_blocks
from shardwright.engine.tensors import ranks
from shardwright.train.models.native.llama import Llama

CLIP = 1.0
RATE = 1e-4


class Masters:
    """Plain torch: float32 copies of a model that is cast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        model.to(torch.bfloat16)
        self.working = list(model.parameters())

    def take_gradients(self) -> None:
        gradients = [p.grad for p in self.working]
        for master in self.parameters:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_([master.grad for master in self.parameters], gradients)
        for working in self.working:
            working.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        torch._foreach_copy_(self.working, self.parameters)


class Training:
    """A model of one row in training by one variant on this rank.

    Every rank has the same tokens, and every step has them again. So the losses of all engines are those of one
    device, whatever the number of ranks, and they fall from step to step if the gradients are right.
    """

    def __init__(self, row: Row, variant: Variant, device: torch.device, backend: str) -> None:
        torch.manual_seed(0)
        with device:
            model = Llama(row.shape())
        self.flops_per_step = model.flops_per_token(row.seq) * row.batch * row.seq
        checkpoint_blocks(model.blocks(), row.checkpoint)
        if row.compile:
            compile_blocks(model.blocks(), backend)
        self.model, self.device = model, device
        self.masters: Masters | None = None
        self.clip: Any = nn.utils.clip_grad_norm_
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        if variant.engine == PLAIN:
            self.masters = Masters(model)
        else:
            library: Any = {FSDP2: fsdp2, SHARDWRIGHT: sw}[variant.engine]
            policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options = {"memory": variant.memory} if library is sw else {}
            ranks.LEAST_RANKS = 1 if variant.communicating else 2
            for block in model.blocks():
                library.fully_shard(block, mp_policy=policy)
            library.fully_shard(model, mp_policy=policy, **options)
            if variant.communicating and not model._fsdp_units(recurse=False)[0].ranks.gathers:
                raise RuntimeError("no unit communicates")
        self.parameters = list(self.masters.parameters if self.masters else model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=RATE, fused=True)
        if variant.engine == SHARDWRIGHT:
            self.optimizer, self.clip = sw.fully_shard_optimizer(self.optimizer), sw.clip_grad_norm_
        if variant.waiting:
            self._wait_after_each_block()
        generator = torch.Generator().manual_seed(1)
        size = (row.batch, row.seq + 1)
        self.tokens = torch.randint(0, row.shape().vocab_size, size, generator=generator).to(device)
        self.graphed: Any = None
        if variant.graph:
            self.graphed = sw.GraphedStep(self.model, self._forward_and_backward)

    def _forward_and_backward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Forward, backward, clipping, AdamW, and the end of the gradients. Nothing waits for the device."""
        run = self.graphed or self._forward_and_backward
        self.losses.append(run(self.tokens).clone())
        if self.masters is not None:
            self.masters.take_gradients()
        self.norms.append(self.clip(self.parameters, CLIP).detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not None:
            self.masters.give_weights()

    def numbers(self) -> tuple[list[float], list[float]]:
        """Loss and norm of the gradients of every step so far. All ranks call it: a norm may have to be reduced."""
        norms = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in self.norms]
        return [float(loss) for loss in self.losses], [float(norm) for norm in norms]

    def _wait_after_each_block(self) -> None:
        def wait(*_: Any) -> None:
            wait_for(self.device)

        for block in self.model.blocks():
            block.register_forward_pre_hook(wait)
            block.register_forward_hook(wait)
            block.register_full_backward_pre_hook(wait)
            block.register_full_backward_hook(wait)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
