"""TRL's SFTTrainer on prompts and completions, which wraps the model in torch's DDP.

pip install trl
torchrun --standalone --nproc-per-node 2 examples/ports/trl_before.py
"""

import tempfile

from tiny import byte_tokenizer, completions, qwen_folder, report_history
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

arguments = SFTConfig(
    tempfile.mkdtemp(), max_steps=6, per_device_train_batch_size=4, learning_rate=3e-3, max_length=32, bf16=False,
    logging_steps=1, save_steps=3, report_to=[], disable_tqdm=True,
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(qwen_folder())
trainer = SFTTrainer(model, arguments, train_dataset=completions(), processing_class=byte_tokenizer())
trainer.train()
report_history(trainer)
