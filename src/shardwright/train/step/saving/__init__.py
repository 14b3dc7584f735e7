"""The checkpoints of a run.

`checkpoint` has the state of a run in one, and its way back. The loop decides when one is written;
`saves` writes it, here or in the background, and decides which ones stay.
`best` keeps the one with the best value of a figure. `shardwright.checkpoint` writes and reads the files.
"""
