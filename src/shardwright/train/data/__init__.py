"""Text as tokens, and the order in which a run sees them.

`sources` reads documents from files, `tokens` makes tokens of them and keeps these in a cache, `samples` packs tokens
into samples and loads batches. `dataset` puts the three together. `run_documents` keeps the documents that a run has.

Nothing is imported here, so that the processes that make tokens start without torch.
"""
