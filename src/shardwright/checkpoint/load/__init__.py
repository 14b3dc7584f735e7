"""Reading of a checkpoint by all ranks: examined, compared with digests, then read.

`checkpoints` opens one, ours or torch's, with one interface. `collective_load` has the steps of all ranks after that,
`reading` the bytes of files. `fit` compares names and shapes with those of the state. `replacement` finds that another
program has replaced the checkpoint meanwhile. Rule: no value of a model changes before every rank has found the
checkpoint whole.
"""
