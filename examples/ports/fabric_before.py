"""A loop of Lightning Fabric with its DDP strategy.

torchrun --standalone --nproc-per-node 2 examples/ports/fabric_before.py
"""

import torch
from lightning.fabric import Fabric
from tiny import Model, batch, loss_of, report

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = fabric.setup(model, optimizer)

for step in range(8):
    inputs, targets = batch(step)
    loss = loss_of(model(inputs), targets)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
