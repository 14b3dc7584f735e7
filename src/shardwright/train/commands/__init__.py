"""The commands of the trainer, one in each file, as functions without a command line.

`train` starts or resumes a run; `plan`, `compare`, `inspect`, `generate`, `export`, `convert`, `layouts` and
`extensions` have the names of their commands. `hugging_face` has `evaluate`, and parts of `export`. Rule: `cli` parses
arguments, and a command raises a `UserError` for what the user can correct.
"""
