"""Conversion of checkpoints between forms, by one process.

`convert` has the function and the forms that it writes. `sources` opens a checkpoint in any form, as names of tensors
and values that are read one at a time. Rule: never more than the largest tensor in memory, and no code of a file runs.
"""
