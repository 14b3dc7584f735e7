"""Fine-tuning: low-rank adapters on a frozen base, their files, and the reference to the base.

`settings` has the keys of `[finetune]`, `adapters` changes a model and merges it, `peft_files` reads and writes
adapters, `base` states which base they belong to. Nothing is imported here, so that settings load without torch.
"""
