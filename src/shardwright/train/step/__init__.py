"""Steps of training: the loop, forward and backward, losses, checkpoints of the run, and wrong numbers.

`session` opens and ends a part of a run, `loop` reads: evaluate, save, step, log. `numerics` finds wrong numbers and their causes.
"""
