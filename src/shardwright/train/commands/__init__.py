"""The commands of the trainer, one in each file, as functions without a command line.

`train` starts or resumes a run; `compare`, `inspect`, `generate`, `export`, `convert`, `layouts`, `calibrate` and
`extensions` have the names of their commands. `plans` has `plan` and `init`. `pages` has `report`, and files for pages
of `plan`. `hugging_face` has `evaluate`, and parts of `export`. Rule: `cli` parses arguments, and a command raises a
`UserError` for what the user can correct.
"""
