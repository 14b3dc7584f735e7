"""Ray Train: the trainer's jobs on Ray's workers, and checkpoints of your own training functions.

    from shardwright.integrations.ray import trainer

    trainer("job.toml", scaling_config=ScalingConfig(num_workers=4), run_config=RunConfig(...)).fit()

Ray starts the workers, makes their process group, and starts them again after a failure. `trainer` needs the extra
`ray` and Ray Train v2. The run's folder is in Ray's folder of the experiment, which all hosts must share. Users read
docs/clusters.md. This is the one file that imports `ray`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchConfig, TorchTrainer

from shardwright.train.config import load_config
from shardwright.train.errors import UserError
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.metrics import last_record
from shardwright.train.run.position import step_folder

RUN = "run"
"""The run's folder in Ray's folder of the experiment."""
REPORTED = "reported"
"""Beside it: the checkpoints that Ray knows, as hard links. Ray deletes some of these, the run deletes its own."""
SECONDS_TO_ANSWER = 30.0
"""The longest time that a worker waits for Ray's list of checkpoints."""

# -- start -------------------------------------------------------------------------------------------------------------


def trainer(
    config: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    scaling_config: ScalingConfig,
    run_config: RunConfig,
    **options: Any,
) -> TorchTrainer:
    """Return a trainer of Ray whose `fit` runs a job as `shardwright train` does, one rank for each worker.

    If the experiment has a checkpoint, the job goes on from the newest whole one: after a failure, if
    `run_config.failure_config` allows it, and with a new trainer of the same name and storage. Metrics are reported to
    Ray with each checkpoint.

    Args:
        config: the job, in TOML. Its paths must be valid on all hosts.
        overrides: values by `section.key`.
        scaling_config: with the number of workers.
        run_config: with a storage path on a file system that all hosts share, and a name, since Ray else makes a new
            one each time. Unless it has a `checkpoint_config`, Ray keeps as many checkpoints as the run.
        options: for `TorchTrainer`.

    Raises:
        UserError: the configuration or the storage cannot be used.
    """
    workers = scaling_config.num_workers
    texts = [(key, _text(value)) for key, value in (overrides or {}).items()]
    job = load_config(Path(config), texts, ranks=workers if isinstance(workers, int) else 1, resumes=True)
    if run_config.storage_filesystem is not None:
        raise UserError(
            f"run_config: expected no storage_filesystem, found a {type(run_config.storage_filesystem).__name__}; use "
            "a storage_path that is a folder"
        )
    if "://" in str(run_config.storage_path):
        raise UserError(
            f"run_config: expected a storage_path that is a folder, found {run_config.storage_path}; checkpoints are "
            "written in place by all hosts, so use a shared file system"
        )
    if job.checkpoint.folder:
        raise UserError(
            f"checkpoint.folder: expected none with Ray Train, found {job.checkpoint.folder}; checkpoints are in the "
            "storage_path of run_config"
        )
    if run_config.checkpoint_config == CheckpointConfig():
        run_config.checkpoint_config = CheckpointConfig(num_to_keep=job.checkpoint.keep)
    backend = "cpu:gloo,cuda:nccl" if scaling_config.use_gpu else "gloo"
    return TorchTrainer(
        _train,
        train_loop_config=job.model_dump(mode="json"),
        torch_config=options.pop("torch_config", TorchConfig(backend=backend)),
        scaling_config=scaling_config,
        run_config=run_config,
        **options,
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- training ----------------------------------------------------------------------------------------------------------


def _train(values: dict[str, Any]) -> None:
    """Run a rank of the job: the function that Ray calls in each worker."""
    from shardwright.train.rank.hosted import train_in_group

    if ray.train.get_context().get_world_rank() == 0:
        _remove_unknown()
    train_in_group(values, _experiment() / RUN, _report_saved)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _remove_unknown() -> None:
    """Remove what an earlier attempt has linked but not reported on all workers, because Ray will never delete it."""
    known = ray.train.get_all_reported_checkpoints(
        CheckpointConsistencyMode.COMMITTED, timeout_s=SECONDS_TO_ANSWER
    )
    names = {Path(each.checkpoint.path).name for each in known if each.checkpoint is not None}
    for folder in (_experiment() / REPORTED).glob("*"):
        if folder.name not in names:
            shutil.rmtree(folder, ignore_errors=True)


def _experiment() -> Path:
    return Path(ray.train.get_context().get_storage().experiment_fs_path)


def _report_saved(run: RunFolder, step: int) -> None:
    report_checkpoint(step_folder(run.checkpoints, step), {**last_record(run.metrics_file), "step": step})


def report_checkpoint(folder: str | Path, metrics: Mapping[str, Any]) -> None:
    """Report to Ray a checkpoint that all workers have written into one folder. Every worker must call it.

    Nothing is copied: Ray gets hard links to the files, so if Ray or you delete one of the two, the other one stays.

    Args:
        folder: in Ray's folder of the experiment, `ray.train.get_context().get_storage().experiment_fs_path`.
        metrics: for Ray, of this checkpoint.

    Raises:
        OSError: the file system has no hard links.
    """
    checkpoint = None
    if ray.train.get_context().get_world_rank() == 0:
        checkpoint = Checkpoint.from_directory(_linked(Path(folder)))
    ray.train.report(
        dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )


def _linked(folder: Path) -> str:
    """Return a new folder with hard links to the files of a checkpoint."""
    place = _experiment() / REPORTED
    place.mkdir(exist_ok=True)
    number = 0
    while (target := place / f"{folder.name}{f'-{number}' if number else ''}").exists():
        number += 1
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial, copy_function=os.link)
    partial.rename(target)
    return str(target)
