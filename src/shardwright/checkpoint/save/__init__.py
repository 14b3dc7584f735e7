"""Writing of a checkpoint by all ranks: planned, written by each, committed by the first.

`saving` has these steps, `writing` the files of a rank and their descriptions. `torch_file` writes a file as
``torch.save`` does. Rule: before the commit nothing under the checkpoint's name changes, and after it all is on disk.
"""
