"""Writes checkpoints as the trainer of versions up to 0.2 wrote them, which must stay readable."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardwright.checkpoint.format.digests import as_json, digest_of, sealed
from shardwright.checkpoint.format.nested import nested
from shardwright.checkpoint.load.loading import open_checkpoint, read_state
from shardwright.checkpoint.ranks import Ranks
from shardwright.train.run.position import Position
from tests.train.damage import Job, on_first_rank


def save_as_before(job: Job, step: int) -> Path:
    """A checkpoint of a job of several ranks. Called by every rank."""
    job.at(step)
    folder = job.checkpoints / f"step-{step}"
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model, "optimizer": optimizer["state"]}, checkpoint_id=folder)
    on_first_rank(lambda: write_position(folder, Position(step, 4 * step)))
    return folder


def rewrite_as_before(folder: Path) -> None:
    """Replace a checkpoint of a run by one with the same tensors in the old form, in one process."""
    stored = open_checkpoint(folder)
    assert stored.index is not None and not dist.is_initialized()
    position = stored.index.values["extra"].value["position"]
    state: Any = nested(
        {each.path: torch.empty(each.shape, dtype=each.dtype) for each in stored.index.tensors.values()}
    )
    read_state(stored, state, Ranks(alone=True))
    for file in folder.iterdir():
        file.unlink()
    save_alone({"model": state["model"], "optimizer": state["optimizer"]["state"]}, folder)
    write_position(folder, Position(**position))


def save_alone(state: dict[str, Any], folder: Path) -> None:
    """Write a state with torch's writer in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def write_position(folder: Path, position: Position, *, digests: bool = True) -> None:
    """position.json, with the digests of all other files as they are now, or in the first form, which had none."""
    content: dict[str, Any] = {"step": position.step, "samples": position.samples}
    if digests:
        files = {file.name: digest_of(file) for file in folder.iterdir() if file.name != "position.json"}
        text = sealed({**content, "files": as_json(files)})
    else:
        text = json.dumps(content)
    (folder / "position.json").write_text(text)
