"""Places for the figures of a run: the terminal, metrics.jsonl, services, and pictures.

Each place gets the records of `config.catalog.records`. `progress` prints what a job that is busy does. Nothing here
computes losses or communicates.
"""
