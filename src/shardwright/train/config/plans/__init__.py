"""Configurations as plans need them. `train/planning` makes the programs of plans. Nothing here imports torch.

`job_of_model` assumes the rest of a job of which only the model is known. `shorter_jobs` has jobs with fewer layers or
micro-batches, from whose programs a long one is composed. `cache_key` is the text under which the cache of plans keeps
a program. `config/conflicts/jobs.py` has the settings that no plan covers.
"""
