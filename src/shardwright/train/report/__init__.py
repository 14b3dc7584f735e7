"""Figures of a run: on the terminal, in metrics.jsonl, in services, and in pictures.

Each gets the records of `config.catalog.records`. Nothing here computes losses or communicates.
"""
