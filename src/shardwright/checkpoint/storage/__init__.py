"""Stores of checkpoints: folders here and URLs, and how a checkpoint gets its name at once.

Read `stores` first: `Store`, a place that holds one checkpoint, and `UnfinishedSave`, a save to it that is under way.
`local_store` has both for folders, with the `local_files` in them; `object_store` has both for URLs, with the
`object_files` of `file_systems`. `save_names` has the names of what saves write. `locations` chooses the store of a
path or URL. `publishing` is a save by all ranks: begun, written, committed. `housekeeping` lists and removes
checkpoints, for other rooms. Rule: nothing here knows what the files contain; a caller passes the check of a checkpoint
that may be overwritten. Other rooms ask `Store.path` whether it is a folder, and `housekeeping` for the rest.
"""
