"""The parts of ``benchmarks/data.py``. ``corpus`` makes documents and a tokenizer. ``ours`` and ``peer`` are the
programs that are measured, one process each. ``measure`` starts them and reads their time, processor time and memory.

Only ``peer`` imports datasets, TRL and Accelerate. ``measure`` and ``corpus`` do not import torch.
"""
