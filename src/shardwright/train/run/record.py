"""run.json: the sessions of a run, how each ended, and the results. The first rank writes it, and `JobEnd`.

Nothing here opens or locks the folder of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from shardwright.train.errors import UserError
from shardwright.train.run.exits import STOPPED, Outcome
from shardwright.train.run.folder import RunFolder, Session, now
from shardwright.train.run.metrics import recorded_step
from shardwright.train.run.writing import remove_unfinished, write_json, write_text


class RunRecord:
    """run.json, which rank 0 updates: the engine, devices and text of each session, and how it ended."""

    def __init__(
        self, folder: RunFolder, name: str, config: str, facts: Mapping[str, Any], session: Session
    ) -> None:
        """Begin a session in run.json, of a run with this name, and store the `config`, which is TOML."""
        self.folder = folder
        sessions = folder.record()["sessions"] if folder.exists() else []
        self.content: dict[str, Any] = {"name": name, "status": "", **facts}
        self.content["sessions"] = [
            *sessions,
            {**asdict(session), "end": None, "status": "running", "to_step": None},
        ]
        write_text(folder.config_file, config)
        _write(folder, self.content)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the run and of this session, without folders and times."""
        outside = ("name", "status", "sessions", "results")
        session = {
            key: value
            for key, value in self.content["sessions"][-1].items()
            if key not in ("start", "end", "status", "to_step", "attempt", "ended_by") and value != ""
        }
        return {**{key: value for key, value in self.content.items() if key not in outside}, **session}

    @property
    def reached_before(self) -> int:
        """The last step of the attempts of this job before the present one; 0 if this is the first."""
        *earlier, present = self.content["sessions"]
        attempt, reached = present["attempt"], 0
        for session in reversed(earlier):
            if session.get("attempt", 1) >= attempt:
                break  # of an earlier job in this folder
            attempt, reached = session.get("attempt", 1), max(reached, session.get("to_step") or 0)
        return reached

    def close(self, status: str, step: int, results: Mapping[str, Any], ended_by: str = "") -> None:
        """Write the results, and that the session is finished or was interrupted after its last save."""
        self.content["sessions"][-1].update(end=now(), status=status, to_step=step)
        if ended_by:
            self.content["sessions"][-1]["ended_by"] = ended_by
        self.content["results"] = dict(results)
        _write(self.folder, self.content)


def _write(folder: RunFolder, content: dict[str, Any]) -> None:
    """Write run.json. Its status is copied from the last session."""
    content["status"] = content["sessions"][-1]["status"]
    write_json(folder.record_file, content)


def sessions_of(folder: RunFolder) -> int:
    """Return the number of sessions in run.json."""
    try:
        return len(folder.record()["sessions"])
    except UserError:
        return 0


def session_after(folder: RunFolder, sessions_before: int) -> Mapping[str, Any]:
    """Return the last session in run.json, if there are more than `sessions_before`; else empty."""
    try:
        sessions = folder.record()["sessions"]
    except UserError:
        return {}
    return sessions[-1] if len(sessions) > sessions_before else {}


def is_finished(folder: RunFolder) -> bool:
    """Return whether run.json says that all steps are done and the results written."""
    try:
        return folder.record().get("status") == "finished"
    except UserError:
        return False


def close_session(folder: RunFolder, end: Outcome, sessions_before: int | None = None) -> None:
    """Write into run.json how the last session ended, if it is still "running" there: interrupted, if a signal ended
    it, else failed.

    With `sessions_before` the caller knows that a later session is its own. Its end then replaces a rank's.
    """
    try:
        record = folder.record()
        session = record["sessions"][-1]
        is_own = sessions_before is not None and len(record["sessions"]) > sessions_before
        status = session.get("status")
        if not is_own and status != "running":
            return
        session["ended_by"] = end.reason
        if status == "running":
            session.update(end=now(), to_step=recorded_step(folder.metrics_file))
        if status in ("running", "failed"):
            session["status"] = "interrupted" if end.status in STOPPED else "failed"
        _write(folder, record)
    except (UserError, LookupError, TypeError):
        pass  # No record exists yet, or the disk is full. The user needs the error that ended the job, not this one.


UNKNOWN_END = "its processes were killed, or the machine stopped"
"""The reason for a session that has no end in run.json although nothing uses the folder."""


def repair_record(folder: RunFolder) -> None:
    """Close the session of a job that left run.json at "running". The caller has the folder's lock.

    The session ended when its last step was recorded, as far as anybody can know.
    """
    remove_unfinished(folder.path)
    record = folder.record()
    session = record["sessions"][-1]
    if session.get("status") != "running":
        return
    step = recorded_step(folder.metrics_file)
    written = folder.metrics_file if step else folder.record_file
    end = datetime.fromtimestamp(written.stat().st_mtime).astimezone().isoformat(timespec="seconds")
    session.update(status="failed", end=end, to_step=step, ended_by=UNKNOWN_END)
    _write(folder, record)
