"""Writing of a checkpoint by all ranks: planned, written by each, committed by the first.

`saving` has these steps, `writing` the files of a rank and their descriptions. `written_in_order` is for a process that
has one tensor at a time. Rule: before the commit nothing under the checkpoint's name changes, and after it all is on
disk.
"""
