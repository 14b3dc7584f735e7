"""Writing of a checkpoint by all ranks: planned, written by each, committed by the first.

`collective_save` has these steps, `plan` the first of them: who writes which box. `writing` has the files of a rank
and their descriptions, `torch_file` a file as ``torch.save`` writes it. Rule: before the commit nothing under the
checkpoint's name changes, and after it all is on disk.
"""
