"""Processes of a job: how they start, learn of signals, and start again, and how the job ends.

`launcher` starts the ranks of one machine; `environment`, `slurm` and `torchrun` read the variables and processes of
other launchers. `opening` locks the run's folder. `job_end` records how the job ends, under every launcher.

A job stops in two ways, which differ. A rank that is asked to stop saves and ends: `signals.StopRequest` has who asks
and how long it may save, in the ranks and in the launcher. A rank that shall not go on is killed: `launcher.RankWatch`
alone does that, and `judgement` says what it means for the job.
Nothing here builds a model.
"""
