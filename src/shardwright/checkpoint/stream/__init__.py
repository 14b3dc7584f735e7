"""Whole weights of a model, sent to another process in buckets of bounded memory.

`send` gathers tensors and fills buckets, `transport` brings them to their readers, `receive` is the reader's side.
Rule: never more in memory than a bucket and a tensor, whatever the size of the model.
"""
