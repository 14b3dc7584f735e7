"""Tokens of documents: tokenizers, chat templates, and the cache of tokens that workers fill."""
