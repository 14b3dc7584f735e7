"""A loop of Accelerate with its FSDP2 plugin, accumulation and clipping. On the CPU Accelerate takes torch's DDP.

torchrun --standalone --nproc-per-node 2 examples/ports/accelerate_before.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tiny import qwen_folder, report, samples
from transformers import AutoModelForCausalLM

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
