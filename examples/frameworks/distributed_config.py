"""transformers shards a model while it loads it, by its ``DistributedConfig``.

torchrun --standalone --nproc-per-node 2 examples/frameworks/distributed_config.py
"""

import atexit
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import batch, choose_engine, model, report, say_engine

choose_engine()

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

dist.init_process_group()
atexit.register(dist.destroy_process_group)
box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(box)
folder = Path(box[0])
if dist.get_rank() == 0:
    model().save_pretrained(folder / "first")
dist.barrier()

sharded = AutoModelForCausalLM.from_pretrained(
    folder / "first",
    distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
    dtype=torch.float32,
)
say_engine(sharded)
optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2, foreach=False)
for step in range(6):
    x = batch(step).to(sharded.device)
    loss = sharded(input_ids=x, labels=x).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
sharded.save_pretrained(folder / "second")
dist.barrier()
if dist.get_rank() == 0:
    plain = AutoModelForCausalLM.from_pretrained(folder / "second")
    print("saved", sum(p.numel() for p in plain.parameters()), "parameters", flush=True)
