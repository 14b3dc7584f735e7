"""Fine-tuning: low-rank adapters on a frozen base, their files, and the reference to the base.

`finetuning` starts a run with adapters. `selection` finds the layers by their names, `layers` has the adapters of each
class of layers, `adapters` changes a model and merges it, `peft_files` reads and writes adapters, `base` states which
base they belong to. The keys of `[finetune]` are in `config/sections/finetune.py`. Nothing is imported here.
"""
