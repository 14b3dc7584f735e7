"""Fine-tuning on completions with TRL's collator; transformers shards the model while it loads it.

pip install trl
torchrun --standalone --nproc-per-node 2 examples/frameworks/trl_sft.py
"""

import atexit
import tempfile

import torch
import torch.distributed as dist
from tiny import choose_engine, model, report, say_engine

choose_engine()

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: E402

dist.init_process_group()
atexit.register(dist.destroy_process_group)
rank, world = dist.get_rank(), dist.get_world_size()
box = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(box)
if rank == 0:
    model().save_pretrained(box[0])
dist.barrier()
sharded = AutoModelForCausalLM.from_pretrained(
    box[0], distributed_config=DistributedConfig(fsdp_size=world), dtype=torch.float32
)
say_engine(sharded)


def example(number: int) -> dict[str, list[int]]:
    """Count up: the prompt gives the first numbers, the completion the next ones. Only those are trained."""
    start, prompt, completion = number % 40, 3 + number % 4, 6
    ids = [start + i for i in range(prompt + completion)]
    return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


collate = DataCollatorForLanguageModeling(pad_token_id=63)
optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2, foreach=False)
for step in range(6):
    rows = [example(11 * (4 * (step * world + rank) + i)) for i in range(4)]
    loss = sharded(**{key: value.to(sharded.device) for key, value in collate(rows).items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)
