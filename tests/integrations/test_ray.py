"""Jobs of the trainer, and checkpoints of other training functions, on a local cluster of Ray Train."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardwright.train.errors import UserError
from tests.train.kit.jobs import config_file, losses, ranks, wait_for_steps

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")

ENGINE = ("--parallel.engine", "shardwright", "--validation.every", "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    source = Path(__file__).parents[2]
    paths = [str(source / "src"), str(source)]
    ray.init(
        num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    )
    yield
    ray.shutdown()


def settings(storage: Path, **more: Any) -> dict[str, Any]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    failures = FailureConfig(max_failures=more.pop("max_failures", 0))
    return {
        "scaling_config": ScalingConfig(num_workers=2),
        "run_config": RunConfig(name="job", storage_path=str(storage), failure_config=failures, **more),
    }


def send_to_a_worker(run: Path, number: int) -> None:
    """A signal, after five steps."""
    import psutil

    wait_for_steps(run, 5)
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith("ray::RayTrainWorker"):
            process.send_signal(number)
            return
    raise AssertionError("found no worker")


def test_a_job_goes_on_after_its_worker_was_killed_and_in_a_new_trainer(
    cluster: None, tmp_path: Path
) -> None:
    from shardwright.integrations.ray import trainer

    config, storage = config_file(tmp_path), tmp_path / "ray"
    values = {
        "parallel.engine": "shardwright",
        "validation.every": 0,
        "checkpoint.every": 2,
        "train.steps": 60,
    }
    run = storage / "job/run"
    killer = threading.Thread(target=send_to_a_worker, args=(run, signal.SIGKILL))
    killer.start()
    result = trainer(config, values, **settings(storage, max_failures=1)).fit()
    killer.join()
    assert result.error is None and result.metrics["step"] == 60
    assert result.checkpoint.path == str(storage / "job/reported/step-60")

    more = trainer(config, {**values, "train.steps": 64}, **settings(storage)).fit()
    assert more.metrics["step"] == 64
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-62", "step-64"]
    assert sorted(path.name for path in (storage / "job/reported").iterdir()) == ["step-62", "step-64"]

    whole = tmp_path / "whole"
    arguments = ("train", config, *ENGINE, "--train.steps", "64", "--run.dir", whole)
    assert [status for status, _ in ranks(2, *arguments)] == [0, 0]
    assert losses(run) == losses(whole)
    ours, theirs = (weights(each / "checkpoints/step-64", tmp_path / "weights.pt") for each in (run, whole))
    assert ours.keys() == theirs.keys() and len(ours) > 5
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_job_whose_worker_is_stopped_goes_on(cluster: None, tmp_path: Path) -> None:
    from shardwright.integrations.ray import trainer

    values = {
        "parallel.engine": "shardwright",
        "validation.every": 0,
        "checkpoint.every": 2,
        "train.steps": 60,
    }
    run = tmp_path / "ray/job/run"
    stopper = threading.Thread(target=send_to_a_worker, args=(run, signal.SIGSTOP))
    stopper.start()
    values["fault.stall_seconds"] = 3
    result = trainer(config_file(tmp_path), values, **settings(tmp_path / "ray", max_failures=1)).fit()
    stopper.join()
    assert result.error is None and result.metrics["step"] == 60
    (diagnosis,) = run.glob("hangs/*/diagnosis.txt")
    assert "process stopped (T)" in diagnosis.read_text()
    first, second = json.loads((run / "run.json").read_text())["sessions"]
    assert (first["status"], second["status"]) == ("failed", "finished")
    assert first["ended_by"].startswith("the job hung: rank ")


def weights(checkpoint: Path, file: Path) -> dict[str, Any]:
    """The tensors of a checkpoint, whole, by name."""
    dcp_to_torch_save(checkpoint, file)
    flat: dict[str, Any] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                collect(f"{name}/{key}", each)
        elif isinstance(value, torch.Tensor):
            flat[name] = value

    collect("", torch.load(file, weights_only=True))
    return flat


def own_training(values: dict[str, Any]) -> None:
    """A training function of a user."""
    import ray.train
    import torch
    import torch.distributed as dist
    from torch import nn

    import shardwright as sw
    from shardwright.integrations.ray import report_checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    sw.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    storage = Path(ray.train.get_context().get_storage().experiment_fs_path)
    for step in (1, 2):
        loss = model(torch.ones(3, 6) * (dist.get_rank() + 1)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        folder = storage / f"mine-{step}"
        sw.save_checkpoint(folder, model, optimizer)
        report_checkpoint(folder, {"step": step})


def test_a_training_function_of_your_own_reports_checkpoints(cluster: None, tmp_path: Path) -> None:
    from ray.train.torch import TorchTrainer

    result = TorchTrainer(own_training, train_loop_config={}, **settings(tmp_path)).fit()
    assert result.error is None and result.metrics == {"step": 2}
    assert result.checkpoint.path == str(tmp_path / "job/reported/mine-2")
    one, other = (tmp_path / "job" / place / "index.json" for place in ("mine-2", "reported/mine-2"))
    assert one.samefile(other)


def test_mistakes_are_found_before_workers_start(tmp_path: Path) -> None:
    from pyarrow.fs import LocalFileSystem
    from ray.train import RunConfig, ScalingConfig

    from shardwright.integrations.ray import trainer

    config, scaling = config_file(tmp_path), ScalingConfig(num_workers=2)
    with pytest.raises(UserError, match=r"train\.steps"):
        trainer(config, {"train.steps": "none"}, **settings(tmp_path))
    with pytest.raises(UserError, match="expected no storage_filesystem, found a LocalFileSystem"):
        files = RunConfig(storage_path=str(tmp_path), storage_filesystem=LocalFileSystem())
        trainer(config, scaling_config=scaling, run_config=files)
    with pytest.raises(UserError, match="expected a storage_path that is a folder, found s3://bucket"):
        trainer(config, scaling_config=scaling, run_config=RunConfig(name="x", storage_path="s3://bucket/x"))
    with pytest.raises(
        UserError, match=r"checkpoint\.folder: expected none with Ray Train, found s3://bucket/x"
    ):
        trainer(config, {"checkpoint.folder": "s3://bucket/x"}, **settings(tmp_path))
