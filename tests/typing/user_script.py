"""A user's script over the public names, never run: type checkers read it as strictly as they can.

``test_typing.py`` runs them. Each ``assert_type`` says what a user's editor should know.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import shardwright as sw
from shardwright.checkpoint import Loaded


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BD: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x_BD)))
        return out


class Model(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 10)

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        logits: Tensor = self.head(x_BD)
        return logits

    def generate(self, x_BD: Tensor) -> Tensor:
        return self.forward(x_BD).argmax(-1)


def place(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() > 1 else None


def shard(mesh: DeviceMesh) -> Model:
    with sw.deferred_init():
        model = Model(256, 4)
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh, mp_policy=policy, shard_placement_fn=place)
    assert_type(sw.fully_shard([model.head], mesh=mesh, layout=sw.Ragged(16)), list[nn.Linear])
    sharded = sw.fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=sw.PrecisionPolicy(param_dtype=torch.bfloat16, full_precision_in_eval=True),
        offload_policy=sw.Offload(parameters=False, gradients=False),
        ignored_params=set(model.head.parameters()),
        strategy="zero2",
        layout="ragged",
        memory="arena",
        prefetch="512 MiB",
        strict=True,
    )
    assert_type(sharded, Model)  # still the user's class: its own methods and attributes are known
    sw.materialize(model)
    sw.register_fsdp_forward_method(model, "generate")
    return model


def auto_wrap(model: Model, mesh: DeviceMesh) -> None:
    policy = sw.wrap.by_class(Block) | sw.wrap.by_size("512 MiB")
    sw.wrap.auto_wrap(model, policy, mesh=mesh)


def methods_of_fsdp_module(model: Model) -> None:
    assert isinstance(model, sw.FSDPModule)
    model.set_requires_gradient_sync(False, recurse=True)
    model.set_reshard_after_forward(True)
    model.set_gradient_comm_hook(sw.comm_hooks.Compressed(sw.comm_hooks.Int8Blocks()))
    handle = model.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    model.reshard()
    assert_type(model.generate(torch.zeros(2, 256)), Tensor)


def train(model: Model, batches: list[tuple[Tensor, Tensor]]) -> float:
    muon = sw.Muon(model.named_parameters(), lr=0.02, adamw={"lr": 3e-4, "betas": (0.9, 0.95)})
    optimizer = sw.fully_shard_optimizer(muon)
    assert_type(optimizer, sw.Muon)
    adamw = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()), needs=1)
    assert_type(adamw, torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    norm = torch.zeros(())
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        torch.autograd.backward(loss)  # loss.backward() has no annotations in torch
        norm = sw.clip_grad_norm_(model.parameters(), 1.0)
        assert_type(norm, Tensor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return norm.item()


def train_in_backward(model: Model) -> None:
    sw.optim.in_backward(sw.fully_shard_optimizer(sw.AdamW8bit(model.parameters(), lr=1e-3)))


def look(model: Model, optimizer: torch.optim.Optimizer) -> str:
    with sw.unsharded(model, writeback=False, rank0_only=True) as full:
        assert_type(full, Model)
        largest = full.head.weight.abs().max()
    report = sw.memory_report(model, optimizer)
    assert_type(report, sw.MemoryReport)
    assert_type(report.shards, int)
    return f"{largest.item()}\n{report}"


def pretrained(model: Model, folder: Path) -> list[str]:
    loaded = sw.load_pretrained(
        model, folder, key_map={"head.weight": "lm_head.weight"}, allow_missing=["blocks.*"]
    )
    assert_type(loaded, Loaded)
    sw.save_pretrained(model, folder / "tuned", dtype=torch.bfloat16, max_shard_size="5 GiB")
    for bucket in sw.stream_weights(model, dtype=torch.bfloat16, bucket_bytes="256 MiB", to="first"):
        assert_type(bucket, dict[str, torch.Tensor])
    return loaded.missing


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(mesh)
    strategy = sw.Strategy("shard", "shard", "shard")
    sw.fully_shard(Model(8, 1), mesh=mesh, strategy=strategy, offload_policy=sw.CPUOffloadPolicy())
    train(model, [(torch.zeros(2, 256), torch.zeros(2, dtype=torch.int64))])
    print(
        sw.__version__, look(model, torch.optim.SGD(model.parameters())), pretrained(model, Path("weights"))
    )


if __name__ == "__main__":
    main()
