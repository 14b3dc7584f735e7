"""Steps of training: the loop, forward and backward, losses, checkpoints of the run, and wrong numbers.

`loop` reads: evaluate, save, step, log. `numerics` finds wrong numbers and their causes.
"""
