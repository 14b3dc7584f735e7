"""Samples of tokens: packed, mixed, in the order of the run, and loaded in batches."""
