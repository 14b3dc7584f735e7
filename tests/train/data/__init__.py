"""Sources, tokenizers, chats and the cache of tokens."""
