"""A training loop of Accelerate, sharded by its FSDP2 plugin, with gradient accumulation and clipping.

torchrun --standalone --nproc-per-node 2 examples/frameworks/accelerate_loop.py
"""

import torch
import torch.distributed as dist
from tiny import batch, choose_engine, model, report, say_engine

choose_engine()

from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    reshard_after_forward=True, cpu_ram_efficient_loading=False,
)  # fmt: skip
accelerator = Accelerator(
    fsdp_plugin=plugin, gradient_accumulation_steps=2, cpu=not torch.accelerator.is_available()
)
sharded = model()
optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
sharded, optimizer = accelerator.prepare(sharded, optimizer)
say_engine(sharded)
for step in range(8):
    with accelerator.accumulate(sharded):
        x = batch(step).to(accelerator.device)
        loss = sharded(input_ids=x, labels=x).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report(step, loss)
state = accelerator.get_state_dict(sharded)
if accelerator.is_main_process:
    print(
        "saved",
        sum(t.numel() for name, t in state.items() if name != "lm_head.weight"),
        "parameters",
        flush=True,
    )
dist.destroy_process_group()
