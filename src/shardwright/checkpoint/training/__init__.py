"""The state of a training run as a checkpoint: ``save_checkpoint`` and ``load_checkpoint``.

Read `save_checkpoint` and `load_checkpoint` first. `arguments` checks what users pass, `optimizers` and
`optimizer_settings` have the state of optimizers by names of parameters, `generators` random generators,
`gradient_hooks` the state of hooks, `wanted_state` the tensors and values that a load reads. `opened` is a checkpoint
before it is loaded. Rule: each argument that is wrong is one error on all ranks.
"""
