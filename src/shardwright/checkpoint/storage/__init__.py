"""Places of checkpoints: folders here and URLs, and how a checkpoint gets its name at once.

Read `stores` first: `Store`, what a save and a load ask of a place. `publishing` is a save at a place by all ranks:
begun, written, committed. `places` has folders and chooses the store of a path or URL, `objects` has URLs, with the
`file_systems` behind them. `keeping` lists and removes checkpoints, for other rooms. Rule: nothing here knows what the
files contain. Other rooms ask `Store.path` whether it is a folder.
"""
