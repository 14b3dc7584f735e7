"""DeepSpeed's engine with ZeRO-3, gradient accumulation and clipping. It needs the package deepspeed.

torchrun --standalone --nproc-per-node 2 examples/ports/deepspeed_before.py
"""

import deepspeed
import torch
import torch.distributed as dist
from tiny import Model, batch, loss_of, report

deepspeed.init_distributed()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for number in range(16):
    inputs, targets = batch(number)
    loss = loss_of(engine(inputs), targets)
    engine.backward(loss)
    engine.step()  # steps at every second call
    if number % 2:
        report(number // 2, loss)

dist.destroy_process_group()
