"""The sink of Weights & Biases. WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and its other variables apply."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb

from shardwright.train.config.catalog.records import RunEnd
from shardwright.train.config.catalog.sinks import RunSite
from shardwright.train.errors import UserError
from shardwright.train.report import sink_thread
from shardwright.train.report.sinks.service import KnownRun, ServiceSink, numbers_in, project_of, settings_of


def open_sink(site: RunSite) -> ServiceSink:
    """Raises UserError if W&B is online here and has no key."""
    _check_key()
    return ServiceSink("wandb", site, project_of(site, "WANDB_PROJECT"), _Run)


def _check_key() -> None:
    """Raise if there is no key. W&B itself would ask for one on the terminal, in the middle of the run."""
    if os.environ.get("WANDB_MODE", "online") not in ("online", "run", "shared"):
        return
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    if any(path.exists() for path in (folder / "settings", Path("wandb") / "settings")):
        return  # W&B's own settings may have a mode and a key.
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for name in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        try:
            if netrc.netrc(os.path.expanduser(name)).authenticators(host):
                return
        except (OSError, netrc.NetrcParseError):
            pass  # The next file may have it.
    raise UserError(
        f"log.sinks: sink 'wandb' found no key for {host}; run `wandb login`, set WANDB_API_KEY, or set "
        "WANDB_MODE=offline to keep the metrics in the run's folder"
    )


class _Run:
    """A run in W&B. It sends metrics, the settings and use of the machine; no code, paths, commands or output."""

    def __init__(self, site: RunSite, project: str, stored: KnownRun | None) -> None:
        self.id = stored.id if stored else os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        given = {
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "disable_job_creation": True,
            "x_disable_meta": True,  # host, command, paths of the program and of Python
            "x_save_requirements": False,
            "host": "",
            "login_timeout": 1.0,
            # Before the sink's own limit: W&B then says that `wandb sync` sends the rest.
            "finish_timeout": sink_thread.CLOSE_SECONDS * 5 / 6,
            "finish_timeout_raises": True,
        }
        known: dict[str, Any] = {
            name: value for name, value in given.items() if name in wandb.Settings.model_fields
        }
        self._run = wandb.init(
            project=project,
            name=os.environ.get("WANDB_NAME") or site.config.run.name,
            id=self.id,
            resume="allow" if stored else None,
            dir=os.environ.get("WANDB_DIR") or str(site.folder),
            config=None if stored else settings_of(site),
            reinit="create_new",
            force=True,
            settings=wandb.Settings(**known),
        )
        self.url = "" if self._run.offline else self._run.url or ""
        self._first_step = stored.step + 1 if stored else 0  # of this session: offline W&B does not know it

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_tasks(self, step: int, values: Mapping[str, float]) -> None:
        """W&B takes no row before its last one. So these have a step of their own, which is their axis there."""
        self._run.define_metric("tasks/step", hidden=True)
        self._run.define_metric("tasks/*", step_metric="tasks/step")
        row = max(self._run.step, self._first_step)
        self._run.log({**values, "tasks/step": step}, step=row)

    def finish(self, end: RunEnd) -> None:
        self._run.summary.update({**numbers_in(end.results), "status": end.status})
        if end.picture is not None:
            self._run.log({"loss/curve": wandb.Image(str(end.picture))}, step=end.step)
        if end.status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if end.status == "finished" else 1)
