"""Steps of training: the loop, forward and backward, losses, checkpoints of the run, and wrong numbers.

`session` opens and ends one session of a run. `loop` reads: step, evaluate, log, save. `feed` has the data of a step,
`trainer` makes it, `evaluation` looks at the model between steps, `loading` reads checkpoints, `saving` writes them and
decides which ones stay, and `numerics` finds wrong numbers and their causes.
"""
