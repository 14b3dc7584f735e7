"""Folders of torch's distributed checkpoint, read as data. No code of theirs runs."""
