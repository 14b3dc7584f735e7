"""Stores of checkpoints: folders here and URLs, and how a checkpoint gets its name at once.

Read `stores` first: `Store`, a place that holds one checkpoint, and `UnfinishedSave`, a save to it that is under way.
`local_store` has both for folders, with the `local_files` in them; `object_store` has both for URLs, with their
`object_files`. `save_names` has the names of what saves write. `locations` chooses the store of a path or URL, and
lists and removes checkpoints there. `publishing` is a save by all ranks: begun, written, committed. Rule: nothing here
knows what the files contain; a caller passes the check of a checkpoint that may be overwritten. Other rooms ask
`Store.path` whether it is a folder, and `locations` for the rest.
"""
