"""The program of distributed_config_before.py: transformers shards the model with Shardwright.

torchrun --standalone --nproc-per-node 2 examples/ports/distributed_config_after.py
"""

import torch
import torch.distributed as dist
from tiny import qwen_folder, report, samples, say

import shardwright as sw

sw.replace_torch()  # before transformers is imported

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

dist.init_process_group()
model = AutoModelForCausalLM.from_pretrained(
    qwen_folder(),
    distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
    dtype=torch.float32,
)
say(sw.describe(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)

for step in range(6):
    x = samples(step).to(model.device)
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
model.save_pretrained(qwen_folder())

dist.destroy_process_group()
