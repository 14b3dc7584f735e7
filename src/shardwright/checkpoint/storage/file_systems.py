"""File systems of fsspec: the objects below a URL, and errors in one line. fsspec is imported at the first use."""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shardwright.common.errors import Damaged
from shardwright.engine.extend import stores

PATIENCE = 30.0  #: seconds for the first answer of a store; what follows is retried as its file system does
_CREDENTIALS = {
    "s3": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or log in with gcloud",
}
T = TypeVar("T")


class StoreError(OSError):
    """A store did not do what was asked for. The message is one line."""


class ObjectsBelow:
    """The file system of fsspec behind a URL, and its errors in one line."""

    def __init__(self, url: str) -> None:
        """Raises ValueError if the URL names no place for a checkpoint."""
        found = re.fullmatch(r"([A-Za-z][\w+.-]*(?::\w+)?)://([^?#]*)", url)
        if found is None or "::" in url:
            raise ValueError(f"expected a URL such as s3://bucket/run-7/step-100, found {url}")
        if not found[2].strip("/") or ".." in found[2].split("/"):
            raise ValueError(f"{url} names no place for a checkpoint; add the name of a folder")
        self.url, self.protocol = url.rstrip("/"), found[1]

    def at(self, name: str) -> tuple[Any, str]:
        """The file system, which fsspec keeps for each process, and the path of an object in it."""
        try:
            from fsspec.core import url_to_fs

            if ":" in self.protocol:  # the import path of its class
                system = stores.get(self.protocol).make()
                path = system._strip_protocol(self.url.partition("://")[2])
            else:
                system, path = url_to_fs(self.url)
        except ImportError as error:
            raise StoreError(
                f"{self.url}: a package for {self.protocol}:// is missing ({in_one_line(error)})"
            ) from None
        except ValueError as error:
            raise StoreError(
                f"{self.url}: no file system for {self.protocol}:// ({in_one_line(error)})"
            ) from None
        return system, f"{path}/{name}" if name else str(path)

    def sizes(self) -> dict[str, int]:
        """Bytes of each object below the URL, without the objects in folders. A folder counts as 0 bytes."""
        with self.reported("", "read"):
            system, path = self.at("")
            system.invalidate_cache()
            try:
                entries = system.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        own = path.strip("/")
        sizes = {}
        for entry in entries:
            name = str(entry["name"]).strip("/")
            if name != own:
                nbytes = 0 if entry.get("type") == "directory" else int(entry.get("size") or 0)
                sizes[name.removeprefix(f"{own}/")] = nbytes
            elif entry.get("size"):
                raise FileExistsError(f"{self.url} is an object, not a place for several. Choose another URL")
        return sizes

    @contextlib.contextmanager
    def reported(self, name: str, doing: str) -> Iterator[None]:
        """Turn what a file system raises into one line that names the object, the reason and what to check.

        An object that is missing when it is read raises Damaged, caused by what the file system has raised.
        """
        try:
            yield
        except (Damaged, FileExistsError, StoreError):
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and doing == "read":
                raise Damaged(f"no {name} file") from error
            url = f"{self.url}/{name}" if name else self.url
            raise StoreError(f"{url} cannot be {doing}: {in_one_line(error)}{self._advice(error)}") from None

    def _advice(self, error: Exception) -> str:
        text = f"{type(error).__name__} {error}".lower()
        if isinstance(error, PermissionError) or any(
            word in text for word in ("credential", "forbidden", "denied")
        ):
            kind = {"s3a": "s3", "gcs": "gs"}.get(self.protocol, self.protocol)
            return f". {_CREDENTIALS.get(kind, 'Check the credentials')}"
        if isinstance(error, (ConnectionError, TimeoutError)) or any(
            word in text for word in ("connect", "timeout")
        ):
            return ". Check the network and the address of the store"
        if isinstance(error, FileNotFoundError):
            return ". Check the URL"
        return ""


def write_new(system: Any, path: str, content: bytes) -> None:
    """Write an object where none is. Stores that cannot compare and write in one step do it in two.

    Raises:
        FileExistsError: an object is there.
    """
    system.invalidate_cache()
    if system.exists(path):  # first, since some stores ignore the condition
        raise FileExistsError(path)
    try:
        system.pipe_file(path, content, mode="create")
        return
    except (TypeError, NotImplementedError):
        pass
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    system.pipe_file(path, content)


def promptly(action: Callable[[], T], url: str) -> T:
    """Run ``action`` and return its result. Raises StoreError if it takes longer than :data:`PATIENCE`.

    File systems try for minutes to reach a store that does not answer.
    """
    outcomes: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcomes.append((action(), None))
        except BaseException as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="shardwright: first answer of a store")
    thread.start()
    thread.join(PATIENCE)
    if not outcomes:
        raise StoreError(
            f"{url}: no answer within {PATIENCE:.0f} s. Check the network and the address of the store"
        )
    value, error = outcomes[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def causes_of(error: BaseException) -> Iterator[BaseException]:
    while (cause := error.__cause__) is not None:
        yield cause
        error = cause


def in_one_line(error: BaseException) -> str:
    """An error in one line. Without a text, the name of its type."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:300] or type(error).__name__
