"""Files of models and tokenizers on the Hugging Face hub. huggingface_hub is imported when a file is fetched.

HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE have their usual meaning. Nothing that is fetched is executed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shardwright.train.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

TRIES, PAUSE = 2, 1.0
"""Number of requests to a hub for a file that is not in the cache, and the seconds between. huggingface_hub itself asks
seven times over 23 s, and prints each failure."""

T = TypeVar("T")


class MissingFile(UserError):
    """The model exists, and does not have the file."""


class Unreachable(UserError):
    """The file is not in the local cache, and the hub does not answer."""


def is_hub_name(name: str) -> bool:
    """Return whether a text can be ``model``, ``owner/model`` or ``owner/model@revision``."""
    return _NAME.fullmatch(name) is not None


def fetch_first(name: str, files: Sequence[str], key: str) -> Path | None:
    """Return the local path of the first of these files that a model has; None: it has none.

    Raises:
        UserError: as :func:`fetch_file`. Without a connection a file in the local cache is enough.
    """
    offline: Unreachable | None = None
    for file in files:
        try:
            return fetch_file(name, file, key)
        except MissingFile:
            pass
        except (
            Unreachable
        ) as error:  # whether the hub has this file is not known, and a later one may be here
            offline = error
    if offline is not None:
        raise offline
    return None


def fetch_file(name: str, file: str, key: str) -> Path:
    """Return the local path of one file of a model. It is fetched if the local cache does not have it.

    Raises:
        UserError: there is no such model or file, no connection or no permission, or huggingface_hub is not installed.
    """

    def fetch(repository: str, revision: str | None, endpoint: str | None) -> Path:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(repository, file, revision=revision)
        if revision is not None and _COMMIT.fullmatch(revision):
            # Knowledge of a commit stays true: no connection is needed, also for a file that it does not have.
            if isinstance(cached, str):
                return Path(cached)
            if cached is not None:
                raise MissingFile(f"{key}: {repository} has no {file} in revision {revision}")
        if not isinstance(cached, str):
            _check_answer(repository, file, revision, endpoint)
        return Path(hf_hub_download(repository, file, revision=revision, endpoint=endpoint))

    return _fetch(name, file, key, fetch)


def fetch_files(name: str, files: Sequence[str], key: str) -> Path:
    """Return the local folder with these files of a model.

    Raises:
        UserError: as :func:`fetch_file`. A file that the model does not have is no error.
    """

    def fetch(repository: str, revision: str | None, endpoint: str | None) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(repository, revision=revision, endpoint=endpoint, allow_patterns=list(files))
        )

    return _fetch(name, ", ".join(files[:3]), key, fetch)


def fetch_folder(name: str, needed: str, optional: Sequence[str], key: str) -> Path:
    """Return the local folder with one file of a model, and with those of the optional files that the model has.

    Raises:
        UserError: as :func:`fetch_file`. Without a connection an optional file may be missing in the local cache only
            if HF_HUB_OFFLINE is set: then the files in the cache are all that are used.
    """
    folder = fetch_file(name, needed, key).parent
    for file in optional:
        try:
            fetch_file(name, file, key)
        except MissingFile:
            pass
        except Unreachable as error:
            from huggingface_hub import constants

            if not constants.HF_HUB_OFFLINE:
                raise Unreachable(
                    f"{error}; or set HF_HUB_OFFLINE=1 to use the files in the cache alone"
                ) from None
    return folder


def pinned(name: str, file: Path) -> str:
    """Return the name with the commit of a fetched file as its revision: ``owner/model@commit``."""
    commit = file.parent.name
    return f"{name.partition('@')[0]}@{commit}" if _COMMIT.fullmatch(commit) else name


def _check_answer(repository: str, file: str, revision: str | None, endpoint: str | None) -> None:
    """Ask the hub for a file's metadata. An answer that refuses the file is an answer.

    Raises:
        LocalEntryNotFoundError: there was no answer in TRIES tries; its cause is the error of the connection.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    url = hf_hub_url(repository, file, revision=revision, endpoint=endpoint)
    for number in range(1, TRIES + 1):
        try:
            get_hf_file_metadata(url, endpoint=endpoint)
            return
        except (HfHubHTTPError, OfflineModeIsEnabled):  # hf_hub_download raises them again, with more detail
            return
        except Exception as error:  # of the HTTP library
            if number == TRIES:
                raise LocalEntryNotFoundError(f"no answer from {url}") from error
        time.sleep(PAUSE)


def _fetch(name: str, what: str, key: str, fetch: Callable[[str, str | None, str | None], T]) -> T:
    try:
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise UserError(
            f"{key}: found nothing at {name} here, and models of the hub need huggingface_hub, which is not installed; "
            "install the extra hf, or set a path on this machine"
        ) from None
    repository, _, revision = name.partition("@")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    hub = endpoint or "https://huggingface.co"
    try:
        return fetch(repository, revision or None, endpoint)
    except GatedRepoError:
        problem = f"access to {repository} on {hub} is restricted; accept its licence there and set HF_TOKEN"
    except RevisionNotFoundError:
        problem = f"{repository} on {hub} has no revision {revision}; set another one after @"
    except RepositoryNotFoundError:
        problem = (
            f"found nothing at {name} here, and no model {repository} on {hub}; correct the name, or set HF_TOKEN for "
            "a private model"
        )
    except LocalEntryNotFoundError as error:
        cause = error.__cause__
        known = cause is not None and not isinstance(cause, OfflineModeIsEnabled)
        reason = f" ({_shortened(cause)})" if known else ""
        raise Unreachable(
            f"{key}: found nothing at {name} here, {what} of {repository} is not in the local cache, and {hub} does "
            f"not answer{reason}; correct the path of a folder, or connect this machine for a model of the hub"
        ) from None
    except EntryNotFoundError:
        raise MissingFile(f"{key}: {repository} on {hub} has no {what}; set a model that has it") from None
    except UserError:
        raise
    except Exception as error:  # of several HTTP libraries, or of a disk
        problem = (
            f"cannot fetch {what} of {repository} from {hub}: {type(error).__name__}: {_shortened(error)}"
        )
    raise UserError(f"{key}: {problem}")


def _shortened(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:200]
