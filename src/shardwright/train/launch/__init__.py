"""Processes of a job: how they start, learn of signals, and start again, and how the job ends.

`launcher` starts the ranks of one machine; `environment`, `slurm` and `torchrun` read the variables and processes of
other launchers. `opening` locks the run's folder. `job_end` records how the job ends, under every launcher.
Nothing here builds a model.
"""
