"""The state of a training run as a checkpoint: ``save_checkpoint`` and ``load_checkpoint``.

Read `save_checkpoint` and `load_checkpoint` first. `arguments` checks what users pass. A load restores sections, each a
`section_to_load`: `model`, `optimizers` (by names of parameters), `extra_objects`, `gradient_hooks` and random
`generators`. `open_checkpoint` shows a checkpoint before it is loaded.
Rule: each argument that is wrong is one error on all ranks.
"""
