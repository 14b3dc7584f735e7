"""The checkpoints that a run writes.

`checkpoint` puts the state of a run into one; `loading`, beside this folder, reads it. The loop decides when one is
written; `saves` writes it, here or in the background, and decides which ones stay.
`best` keeps the one with the best value of a figure. `shardwright.checkpoint` writes and reads the files.
"""
