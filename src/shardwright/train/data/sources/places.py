"""Places of data: paths, globs, URLs and folders of saved datasets become a list of files.

Nothing here reads what a file holds. fsspec is imported only for a URL.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.train.errors import UserError, did_you_mean

SUFFIXES = (".txt", ".jsonl", ".parquet", ".arrow", ".npy")
PYDOC = "pydoc"  #: the source that is part of every CPython
BUFFER = 1 << 20  #: bytes that one read of a remote file fetches
_NAMED = "a .txt, .jsonl, .parquet, .arrow or .npy file, or the folder of a saved Hugging Face dataset"


@dataclass(frozen=True)
class DataFile:
    """One file of data: its absolute path or its URL."""

    path: str
    key: str = "data.source"  #: the key of the configuration that asked for it

    @property
    def kind(self) -> str:
        """``pydoc`` or the suffix of the file."""
        return PYDOC if self.path == PYDOC else _suffix(self.path)

    @property
    def remote(self) -> bool:
        return "://" in self.path

    def __str__(self) -> str:
        return self.path


def locate(path: str, key: str = "data.source") -> list[DataFile]:
    """Return the files that a path, a glob or a URL stands for; those of a glob in the order of their names.

    Raises UserError if there are none, if one has an unknown suffix, or if a file system is not installed.
    """
    if path == PYDOC:
        return [DataFile(PYDOC, key)]
    names = _remote_names(path, key) if "://" in path else _local_names(path, key)
    for name in names:
        _check_suffix(name, key)
    return [DataFile(name, key) for name in names]


def open_place(place: DataFile) -> BinaryIO:
    """Return the file, for reading bytes. Raises UserError if it cannot be opened."""
    with readable(place):
        if place.remote:
            files, inner = _file_system(place.path, place.key)
            stream = files.open(inner, "rb")
            if isinstance(
                stream, io.BytesIO
            ):  # one object for all who read it: its position must not be shared
                return io.BytesIO(stream.getvalue())
            return io.BufferedReader(stream, BUFFER)
        return open(place.path, "rb")


def size_of(place: DataFile) -> int:
    """Return the bytes of the file. Raises UserError if it is missing or empty."""
    with readable(place):
        if place.remote:
            files, inner = _file_system(place.path, place.key)
            size = int(files.size(inner))
        else:
            size = os.stat(place.path).st_size
    if size == 0:
        raise UserError(
            f"{place.key}: expected data, found an empty file at {place}; remove it from {place.key}, or copy it again"
        )
    return size


def line_number(place: DataFile, offset: int) -> int:
    """Return the number, from 1, of the line that begins at an offset in bytes. Reads the file up to there."""
    lines, left = 1, offset
    with open_place(place) as stream:
        while left and (block := stream.read(min(left, BUFFER))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


def remote_version(place: DataFile) -> str | None:
    """Return a digest of what a remote file system says of a file's version. None if that does not change with the
    content."""
    files, inner = _file_system(place.path, place.key)
    with readable(place):
        facts: dict[str, Any] = files.info(inner)
    version = {"etag", "version_id", "generation", "mtime", "lastmodified", "created", "md5", "crc32c"}
    known = {
        name: str(value) for name, value in facts.items() if name.lower() in version and value is not None
    }
    if not known:
        return None
    known.update(path=place.path, size=str(facts.get("size")))
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


@contextmanager
def readable(place: DataFile, kind: type[Exception] = Exception) -> Iterator[None]:
    """Raise errors of reading a file as a UserError that names it. To open one, remote file systems have errors of
    their own; while one is read, `kind` is OSError."""
    try:
        yield
    except UserError:
        raise
    except kind as error:
        raise _unreadable(place, error) from None


def _unreadable(place: DataFile, error: BaseException) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{place.key}: expected a file, found nothing at {place}; correct the path")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else None
    reason = reason or " ".join(f"{type(error).__name__}: {error}".split())
    hint = "; allow this user to read it (chmod)" if isinstance(error, PermissionError) else ""
    if place.remote:
        hint = "; correct the URL, or check the connection and the permissions"
    return UserError(f"{place.key}: cannot read {place}: {reason[:300]}{hint}")


# -- local files -------------------------------------------------------------------------------------------------------


def _local_names(path: str, key: str) -> list[str]:
    full = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(full):
        return _dataset_names(Path(full), key)
    if os.path.exists(full):
        return [full]
    if not glob.has_magic(path):
        raise UserError(f"{key}: expected a file, found {_absent(path, full)}")
    names = sorted(name for name in glob.glob(full, recursive=True) if os.path.isfile(name))
    if not names:
        raise UserError(
            f"{key}: expected files, found none that match {full}; correct the folder or the pattern"
        )
    return names


def _absent(path: str, full: str) -> str:
    """Words about a path without a file: what is there, and what to do."""
    if os.path.islink(full):
        return f"a link to {os.readlink(full)}, which leads nowhere, at {full}; correct the link"
    folder, name = os.path.split(full)
    try:
        there = os.listdir(folder)
    except OSError:
        there = []
    stems = {os.path.splitext(each)[0]: each for each in sorted(there)}
    hint = did_you_mean(os.path.splitext(name)[0], stems, 2, 0.75)
    # The ending makes short names similar: my.txt and mi.txt.
    if hint := hint or did_you_mean(name, [each for each in stems.values() if "." in each], 2, 0.75):
        return f"nothing at {full}{hint}"
    if not os.path.splitext(path)[1]:
        return f"nothing at {full}; expected {PYDOC} or the path of {_NAMED}"
    return f"nothing at {full}; correct the path"


def _dataset_names(folder: Path, key: str) -> list[str]:
    """Return the .arrow files of a folder that ``Dataset.save_to_disk`` wrote."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(each.name for each in folder.iterdir() if (each / "state.json").is_file())
        raise UserError(
            f"{key}: expected one dataset, found the splits {', '.join(splits) or '(none)'} in {folder}; set "
            f"{folder / (splits[0] if splits else 'train')} for example"
        )
    state = folder / "state.json"
    if not state.is_file():
        suffixes = sorted({each.suffix for each in folder.iterdir() if each.suffix in SUFFIXES})
        hint = f"set {folder}/*{suffixes[0]}" if suffixes else f"set the path of {_NAMED}"
        raise UserError(f"{key}: expected a file, found a folder at {folder}; {hint}")
    try:
        content = json.loads(state.read_bytes())
        names = [str(folder / entry["filename"]) for entry in content["_data_files"]]
        indices = content.get("_indices_data_files") or content.get("_indices_files")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"{key}: expected the state of a saved dataset, found a damaged file at {state}; save the dataset again"
        ) from None
    if indices:
        raise UserError(
            f"{key}: expected rows in the order of the files, found a dataset with an index in {folder}; save "
            "dataset.flatten_indices()"
        )
    missing = [name for name in names if not os.path.isfile(name)]
    if missing or not names:
        lack = missing[0] if missing else "no file"
        raise UserError(
            f"{key}: expected all files that {state} names, found nothing at {lack}; copy the folder again"
        )
    return names


# -- URLs --------------------------------------------------------------------------------------------------------------


def _remote_names(url: str, key: str) -> list[str]:
    if url.startswith("file://"):
        return _local_names(url.removeprefix("file://"), key)
    files, inner = _file_system(url, key)
    with readable(DataFile(url, key)):  # no network, no permission, no such bucket
        if files.isfile(inner):
            return [url]
        if files.isdir(inner):
            raise UserError(
                f"{key}: expected a file, found a folder at {url}; set {url.rstrip('/')}/*.parquet"
            )
        found = files.glob(inner) if glob.has_magic(inner) else []
        names = sorted(files.unstrip_protocol(name) for name in found if files.isfile(name))
    if not names:
        what = "files, found none that match" if glob.has_magic(inner) else "a file, found nothing at"
        raise UserError(f"{key}: expected {what} {url}; correct the URL")
    return names


def _file_system(url: str, key: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    protocol = url.split("://", 1)[0]
    try:
        return _opened(protocol, url)
    except ImportError as error:
        reason = " ".join(str(error).split()) or "its package is missing"
        raise UserError(
            f"{key}: expected a file system for {protocol}:// that is installed, found none for {url} ({reason}); "
            "install that package, or copy the files to a local folder"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{key}: expected a path or a URL that fsspec knows, such as s3:// or https://, found {url} ({error})"
        ) from None
    except Exception as error:
        raise _unreadable(DataFile(url, key), error) from None


@lru_cache(maxsize=1024)
def _opened(protocol: str, url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    files, inner = url_to_fs(url)
    return files, str(inner)


def _suffix(name: str) -> str:
    """Return the suffix of a path, or of a URL without its query, in lower case."""
    return os.path.splitext(name.partition("?")[0] if "://" in name else name)[1].lower()


def _check_suffix(name: str, key: str) -> None:
    suffix = _suffix(name)
    if suffix in SUFFIXES:
        return
    hint = {
        ".json": "; write one JSON object per line to a .jsonl file",
        ".gz": "; unpack it first",
        ".zst": "; unpack it first",
        ".bz2": "; unpack it first",
        ".xz": "; unpack it first",
        ".csv": "; convert it to .parquet or .jsonl",
        ".bin": "; save its ids as a .npy file of one dimension",
    }.get(suffix, "")
    raise UserError(f"{key}: expected {PYDOC} or the path of {_NAMED}, found {name}{hint}")
