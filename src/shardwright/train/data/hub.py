"""Files of a model on the Hugging Face hub. huggingface_hub is imported only when a name is fetched."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from shardwright.train.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
_FILES = (".json", ".model", ".txt", ".jinja")


def is_hub_name(name: str) -> bool:
    """Whether a setting can be ``model``, ``owner/model`` or ``owner/model@revision``."""
    return _NAME.fullmatch(name) is not None and not name.endswith(_FILES)


def fetched(name: str, needed: str, optional: Sequence[str], key: str = "data.tokenizer") -> Path:
    """The local folder with these files of a model, which are fetched where the local cache lacks them.

    Raises:
        UserError: there is no such model or file, no connection, no permission, or huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise UserError(
            f"{key}: {name} is neither a file nor a folder here, and the hub needs huggingface_hub, which is not "
            "installed; install shardwright[hf], or set a path"
        ) from None
    repository, _, revision = name.partition("@")
    endpoint = os.environ.get("HF_ENDPOINT") or None

    def fetch(file: str) -> Path:
        return Path(hf_hub_download(repository, file, revision=revision or None, endpoint=endpoint))

    hub = endpoint or "https://huggingface.co"
    try:
        folder = fetch(needed).parent
        for file in optional:
            try:
                fetch(file)
            except LocalEntryNotFoundError:
                # No answer. Only a user who asked for no connection can mean that the local files are all there are.
                if not constants.HF_HUB_OFFLINE:
                    raise
            except EntryNotFoundError:
                pass  # not every model has it
    except GatedRepoError:
        problem = f"access to {repository} on {hub} is restricted; accept its licence there and set HF_TOKEN"
    except RevisionNotFoundError:
        problem = f"{repository} on {hub} has no revision {revision}; set another one after @"
    except RepositoryNotFoundError:
        problem = (
            f"found neither a file or folder {name} here nor a model {repository} on {hub}; correct the name, or set "
            "HF_TOKEN for a private one"
        )
    except LocalEntryNotFoundError:
        problem = (
            f"not all files of {repository} are in the local cache of the hub, and {hub} does not answer; connect, "
            "set HF_HUB_OFFLINE=1 if all that exist are there, or set a path"
        )
    except EntryNotFoundError:
        problem = f"{repository} on {hub} has no {needed}; set a model that has one"
    except Exception as error:  # the errors of several HTTP libraries, and of a disk
        problem = f"cannot fetch {needed} of {repository} from {hub}: {' '.join(str(error).split())[:200]}"
    else:
        return folder
    raise UserError(f"{key}: expected a tokenizer: {problem}")
