"""The state of a training run as a checkpoint: ``save_checkpoint`` and ``load_checkpoint``.

Read `save_load` first. `arguments` checks what users pass, `optimizers` and `optimizer_settings` have the state of
optimizers by names of parameters, `generators` random generators, `gradient_hooks` what hooks keep, `wanted_state` what
a load reads. `opened` is a checkpoint before it is loaded. Rule: each argument that is wrong is one error on all ranks.
"""
