"""The loop of accelerate_before.py: its FSDP2 plugin shards with Shardwright. On the CPU Accelerate takes DDP.

torchrun --standalone --nproc-per-node 2 examples/ports/accelerate_after.py
"""

import torch
import torch.distributed as dist
from tiny import qwen_folder, report, samples, say

import shardwright as sw

sw.replace_torch()  # before accelerate is imported

from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    cpu_ram_efficient_loading=False,
)
accelerator = Accelerator(
    cpu=not torch.accelerator.is_available(), fsdp_plugin=plugin, gradient_accumulation_steps=2
)
model = AutoModelForCausalLM.from_pretrained(qwen_folder())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = accelerator.prepare(model, optimizer)
say(sw.describe(model))

for step in range(8):
    with accelerator.accumulate(model):
        x = samples(step).to(accelerator.device)
        loss = model(input_ids=x, labels=x).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report(step, loss)

dist.destroy_process_group()
