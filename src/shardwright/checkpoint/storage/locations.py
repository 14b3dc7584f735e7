"""From the path or URL that a user passes to the store of a checkpoint. Nothing is read here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardwright.checkpoint.storage.local_store import LocalStore
from shardwright.checkpoint.storage.object_store import ObjectStore
from shardwright.checkpoint.storage.stores import Store

_LOCAL_URLS = ("file://", "local://")

Location = (
    str | os.PathLike[str] | Store
)  #: a folder, a URL such as ``s3://bucket/run-7/step-100``, or a store


def store_of(location: Location) -> Store:
    """The store of a checkpoint. No package is imported for a URL.

    Raises:
        TypeError: it is of another type.
        ValueError: a URL that names no place.
    """
    if isinstance(location, Store):
        return location
    if not isinstance(location, (str, os.PathLike)) or isinstance(os.fspath(location), bytes):
        raise TypeError(
            f"path: expected a string or a pathlib.Path, got {type(location).__name__} {location!r:.100}"
        )
    text = os.fspath(location)
    if "\0" in text:
        raise ValueError(f"path: {text!r} has a zero byte, which no file system takes")
    if not isinstance(location, str) and (found := re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", text)):
        raise ValueError(
            f"{text} is a URL that pathlib has changed: it makes {found[0]} of {found[0]}/. Pass the URL as a string"
        )
    if "://" not in text:
        return LocalStore(Path(text))
    for prefix in _LOCAL_URLS:
        if text.startswith(prefix):
            return LocalStore(Path(text.removeprefix(prefix)))
    return ObjectStore(text)


def folder_or_url(location: Location) -> Path | str:
    """The folder of a location as a path, or its URL. A URL of a folder here, such as ``file:///runs``, is a folder.

    Raises:
        ValueError: a URL that names no place.
    """
    store = store_of(location)
    return store.path or str(store)
