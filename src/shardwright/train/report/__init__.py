"""Places for the figures of a run: the terminal, metrics.jsonl, services, and pictures.

Each gets the records of `config.catalog.records`. Nothing here computes losses or communicates.
"""
