"""The Trainer of hf_trainer_before.py, with a model that transformers shards with Shardwright while it loads it.

torchrun --standalone --nproc-per-node 2 examples/ports/hf_trainer_after.py
"""

import os
import tempfile

from tiny import Rows, qwen_folder, report_history, say

import shardwright as sw

sw.replace_torch()  # before transformers is imported

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3,
    logging_steps=1, save_steps=3, report_to=[], disable_tqdm=True,
    save_only_model=True,  # a model that transformers has sharded cannot save its optimizer
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(
    qwen_folder(), distributed_config=DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
)
say(sw.describe(model))
trainer = Trainer(model, arguments, train_dataset=Rows())
trainer.train()
report_history(trainer)
