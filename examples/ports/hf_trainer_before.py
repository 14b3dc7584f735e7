"""The Trainer of transformers, which wraps the model in torch's DDP.

torchrun --standalone --nproc-per-node 2 examples/ports/hf_trainer_before.py
"""

import tempfile

from tiny import Rows, qwen_folder, report_history
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3,
    logging_steps=1, save_steps=3, report_to=[], disable_tqdm=True,
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(qwen_folder())
trainer = Trainer(model, arguments, train_dataset=Rows())
trainer.train()
report_history(trainer)
