"""Tokens of documents: tokenizers, chat templates, and the cache of tokens that workers fill.

Read `cache` first: a source becomes a folder of tokens once. `workers` are the processes that do it, by `encoding`,
with a tokenizer of `tokenizers` or `chat`; `assembly` puts their parts together. `tokens` maps the result into memory,
and `growth` compares its size with that at an earlier start. `byte_tokenizer` is the tokenizer of bytes as files. Rule:
the number of workers changes no token.
"""
