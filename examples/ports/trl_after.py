"""The SFTTrainer of trl_before.py, with a model that transformers shards with Shardwright while it loads it.

pip install trl
torchrun --standalone --nproc-per-node 2 examples/ports/trl_after.py
"""

import os
import tempfile

from tiny import byte_tokenizer, completions, qwen_folder, report_history, say

import shardwright as sw

sw.replace_torch()  # before transformers and trl are imported

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

arguments = SFTConfig(
    tempfile.mkdtemp(), max_steps=6, per_device_train_batch_size=4, learning_rate=3e-3, max_length=32, bf16=False,
    logging_steps=1, save_steps=3, report_to=[], disable_tqdm=True,
    save_only_model=True,  # a model that transformers has sharded cannot save its optimizer
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(
    qwen_folder(), distributed_config=DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
)
say(sw.describe(model))
trainer = SFTTrainer(model, arguments, train_dataset=completions(), processing_class=byte_tokenizer())
trainer.train()
report_history(trainer)
