"""Places of checkpoints: folders here and URLs, and how a checkpoint gets its name at once.

Read `stores` first: `Store`, what a save and a load ask of a place, and `publish`, a save by one process. `places` has
folders and chooses the store of a path or URL, `objects` has URLs. `keeping` lists and removes checkpoints, for other
rooms. Rule: nothing here knows what the files contain. Other rooms ask `Store.path` whether it is a folder.
"""
