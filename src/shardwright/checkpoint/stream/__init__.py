"""Whole weights of a model, sent to another process in buckets of bounded memory."""
