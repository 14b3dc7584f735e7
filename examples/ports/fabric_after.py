"""The loop of fabric_before.py, sharded by Shardwright: another strategy.

torchrun --standalone --nproc-per-node 2 examples/ports/fabric_after.py
"""

import torch
from lightning.fabric import Fabric
from tiny import Block, Model, batch, loss_of, report

import shardwright as sw
from shardwright.integrations.lightning import ShardwrightStrategy

fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardwrightStrategy(auto_wrap_policy={Block}))
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = fabric.setup(model, optimizer)
fabric.print(sw.describe(model))

for step in range(8):
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
