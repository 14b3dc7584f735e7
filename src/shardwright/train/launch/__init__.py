"""Processes of a job: how they start, learn of signals, and start again, and how the job ends.

`launcher` starts the ranks of one machine; `environment`, `slurm` and `attempts` read what other launchers have set.
Nothing here builds a model.
"""
