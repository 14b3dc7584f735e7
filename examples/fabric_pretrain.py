"""Pretrain a small Llama with Lightning Fabric, sharded by Shardwright, on text that every machine has.

    python examples/fabric_pretrain.py

Two processes on the CPU, or one for each GPU; under torchrun as many as it starts. The text is the source of Python's
standard library, byte by byte. Remove ``strategy=`` and it is Fabric code like any other.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardwright.integrations.lightning import ShardwrightStrategy

LENGTH = 128  #: bytes in a sample


class Text(Dataset[torch.Tensor]):
    """The text cut into samples of ``LENGTH + 1`` bytes, of which each but the first is a target."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: 1 << 20]
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.bytes[index * LENGTH : (index + 1) * LENGTH + 1].long()


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim, bias=False), nn.SiLU(), nn.Linear(4 * dim, dim, bias=False)
        )

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x_BLD)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class Model(nn.Module):
    def __init__(self, dim: int = 64, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.place = nn.Parameter(torch.randn(LENGTH, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embed(tokens_BL) + self.place
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/fabric_pretrain"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    arguments = parser.parse_args()

    ranks = os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or 2
    strategy = ShardwrightStrategy(auto_wrap_policy={Block})
    fabric = Fabric(devices=int(ranks), strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    with fabric.init_module(empty_init=True):  # takes no memory; setup fills this rank's part
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(Text(), batch_size=8, shuffle=True)
    )  # every rank its own samples

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if arguments.resume:
        fabric.load(arguments.checkpoint, state)
    for step, sample in enumerate(loader):
        if step < state["step"]:
            continue
        if step == arguments.steps:
            break
        logits = model(sample[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten())
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] = step + 1
        if step % 10 == 0 or step + 1 == arguments.steps:
            mean = fabric.all_reduce(loss.detach().clone())
            fabric.print(f"step {step + 1}: loss {mean.item():.4f}, gradient norm {norm.item():.3f}")
    fabric.save(arguments.checkpoint, state)
    fabric.print(f"saved to {arguments.checkpoint}")


if __name__ == "__main__":
    main()
