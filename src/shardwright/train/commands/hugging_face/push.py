"""`shardwright export --push`: an exported folder as a model on the Hugging Face hub.

huggingface_hub does the work, with HF_ENDPOINT, HF_HOME and HF_TOKEN as usual. Nothing here writes a local file.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.train.config.shapes.hub import is_hub_name
from shardwright.train.errors import UserError

PUBLIC_HUB = "https://huggingface.co"


class Push:
    """A push to a model on the hub, checked before anything is exported.

    Raises:
        UserError: the name cannot be one of the hub, huggingface_hub is not installed, there is no token, or the hub
            does not accept it or does not answer.
    """

    def __init__(self, name: str) -> None:
        if not is_hub_name(name) or "@" in name:
            raise UserError(
                f"--push: expected the name of a model on the hub, such as owner/model, found {name!r}"
            )
        try:
            from huggingface_hub import HfApi, get_token
        except ImportError:
            raise UserError(
                "--push: needs huggingface_hub, which is not installed; install the extra hf"
            ) from None
        self.hub = os.environ.get("HF_ENDPOINT") or PUBLIC_HUB
        if get_token() is None:
            raise UserError(
                f"--push: expected a token for {self.hub}, found none; set HF_TOKEN, or call hf auth login"
            )
        self._api = HfApi(endpoint=self.hub)
        try:
            user = self._api.whoami()["name"]
        except Exception as error:  # of the hub, or of several HTTP libraries
            raise UserError(
                f"--push: {self.hub} does not accept the token: {_shortened(error)}; set HF_TOKEN to one that may write"
            ) from None
        self.name = name if "/" in name else f"{user}/{name}"

    def upload(self, folder: Path, message: str) -> str:
        """Upload all files of a folder in one commit, whose address is returned. A model that the hub does not have is
        made, private. Files of an existing model that the folder does not have stay."""
        try:
            self._api.create_repo(self.name, private=True, exist_ok=True)
            commit = self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except Exception as error:
            raise UserError(
                f"--push: cannot write {self.name} on {self.hub}: {_shortened(error)}; {folder} is complete: correct "
                f"this, then call hf upload {self.name} {folder}"
            ) from None
        return str(commit.commit_url)


def _shortened(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:197]}..."
