"""Text as tokens, and the order in which a run sees them: see `documents`, `tokenizers`, `cache`, `dataset`, `loader`.

Nothing is imported here, so that the processes that make tokens start without torch.
"""
