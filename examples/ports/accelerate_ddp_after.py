"""The loop of accelerate_ddp_before.py: Shardwright shards the model, and Accelerate gets the rest.

torchrun --standalone --nproc-per-node 2 examples/ports/accelerate_ddp_after.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny import qwen_folder, report, samples, say
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

import shardwright as sw

accelerator = Accelerator(cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=2)
model = AutoModelForCausalLM.from_pretrained(qwen_folder()).to(accelerator.device)
sw.wrap.auto_wrap(model, sw.wrap.by_class(Qwen3DecoderLayer))
say(sw.describe(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = accelerator.prepare(optimizer)  # the model is sharded, so Accelerate must not wrap it

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
