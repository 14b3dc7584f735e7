"""Folders of torch's distributed checkpoint, read as data.

`metadata` reads `.metadata`, after `opcodes` has counted what its pickle would do. `folders` has the files,
`containers` the zip file of each tensor, and `foreign` reads tensors and values with these. Rule: no code that a file
names runs.
"""
