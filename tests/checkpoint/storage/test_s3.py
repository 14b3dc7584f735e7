"""Checkpoints in S3, as a server on this machine plays it. Skipped where its packages are not installed.

They are ``s3fs``, and ``moto`` with its server. What holds for every store is tested in `test_object_stores`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.checkpoint import save_state
from shardwright.checkpoint.load.checkpoints import checkpoint_at
from shardwright.checkpoint.storage import object_files
from shardwright.checkpoint.storage.object_store import ObjectStore
from shardwright.engine import RankGroup
from tests.checkpoint.kit.models import trained
from tests.checkpoint.kit.states import load_state
from tests.support.pool import multirank

fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
pytest.importorskip("s3fs", reason="needs s3fs")
moto_server = pytest.importorskip("moto.moto_server.threaded_moto_server", reason="needs moto[server]")
ALONE = RankGroup(alone=True)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def system(address: str) -> Any:
    """The file system with an empty bucket ``runs``; every rank gets the settings."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": address,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    files = fsspec.filesystem("s3")
    if not dist.is_initialized() or dist.get_rank() == 0:
        if files.exists("runs"):
            files.rm("runs", recursive=True)
        files.mkdir("runs")
    if dist.is_initialized():
        dist.barrier()
    return files


def uploads(files: Any) -> list[Any]:
    return files.call_s3("list_multipart_uploads", Bucket="runs").get("Uploads", [])


@pytest.fixture
def s3(address: str) -> Iterator[Any]:
    environment = dict(os.environ)
    yield system(address)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_returns_and_torch_reads_it(s3: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    url, model = "s3://runs/one/step-3", nn.Linear(30, 4)
    sw.save_checkpoint(url, model, extra={"step": 3})
    attempt = checkpoint_at(url).index.attempt  # type: ignore[attr-defined]
    stored = sorted(name.rsplit("/", 1)[1] for name in s3.ls("runs/one/step-3", refresh=True))
    assert stored == [".metadata", f"__0_0.{attempt}.distcp", f"__values.{attempt}.distcp", "index.json"]
    other = nn.Linear(30, 4)
    assert sw.load_checkpoint(url, other) == {"step": 3}
    assert torch.equal(model.weight, other.weight)
    read = {"model": nn.Linear(30, 4).state_dict()}
    dcp.load(read, storage_reader=FsspecReader(url), no_dist=True)
    assert torch.equal(read["model"]["weight"], model.weight)
    with pytest.raises(FileExistsError, match="holds a whole checkpoint"):
        sw.save_checkpoint(url, model, overwrite=True)


@pytest.mark.extensive("a server and a failure")
def test_an_upload_that_fails_does_not_appear(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_files, "BLOCK", 5 << 20)  # the least that S3 takes
    tensor = torch.arange(3 << 20)
    asked = []

    def fails_at_the_second_part(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if method == "upload_part":
            asked.append(options["PartNumber"])
            if asked[-1] == 2:
                assert uploads(s3)
                raise PermissionError("Access Denied")
        return original(self, method, *args, **options)

    kind = fsspec.get_filesystem_class("s3")
    original = kind.call_s3
    with monkeypatch.context() as patched:
        patched.setattr(kind, "call_s3", fails_at_the_second_part)
        with pytest.raises(
            OSError, match=r"__0_0\..*cannot be written: Access Denied\. Set AWS_PROFILE, or AWS_ACC"
        ):
            save_state("s3://runs/big", {"t": tensor})
    assert asked == [1, 2] and not uploads(s3) and not s3.find("runs", refresh=True)
    save_state("s3://runs/big", {"t": tensor}, verified=True)
    read = {"t": torch.zeros_like(tensor)}
    load_state("s3://runs/big", read, ALONE)
    assert torch.equal(read["t"], tensor) and not uploads(s3)


_KILLED = """
import os, signal, torch, fsspec
from shardwright.checkpoint.storage import object_files
from shardwright.engine.collective import RankGroup
from shardwright.checkpoint import save_state

object_files.BLOCK = 5 << 20
kind = fsspec.get_filesystem_class("s3")
original = kind.call_s3

def dies_at_the_second_part(self, method, *args, **options):
    if method == "upload_part" and options["PartNumber"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, method, *args, **options)

kind.call_s3 = dies_at_the_second_part
save_state("s3://runs/killed", {"t": torch.zeros(3 << 20)})
"""


@pytest.mark.extensive("a server and a program to kill")
def test_a_killed_save_leaves_no_checkpoint_and_is_replaced_if_asked(s3: Any) -> None:
    url, tensor = "s3://runs/killed", torch.ones(5)
    killed = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = s3.find("runs", refresh=True)
    assert "__begun" in left and len(uploads(s3)) == 1
    with pytest.raises(FileNotFoundError, match="holds no whole checkpoint: a save was interrupted"):
        load_state(url, {"t": tensor}, ALONE)
    with pytest.raises(FileExistsError, match=r"what an interrupted save has left \(1 object\)"):
        save_state(url, {"t": tensor})
    save_state(url, {"t": tensor}, overwrite=True)
    read = {"t": torch.zeros(5)}
    load_state(url, read, ALONE)
    assert torch.equal(read["t"], tensor)


def test_a_commit_never_replaces_an_object(s3: Any) -> None:
    later = ObjectStore("s3://runs/c").unfinished()
    later.begin(0, overwrite=False)
    later.write(later.stored_name("index.json"), b"later")
    s3.pipe_file("runs/c/index.json", b"first")
    with pytest.raises(FileExistsError, match="was written by another save"):
        later.commit(overwrite=True)
    assert s3.cat_file("runs/c/index.json") == b"first"


@pytest.mark.parametrize(
    ("settings", "saved", "loaded"),
    [
        (
            {},
            r"s3://absent/c/__begun\S+ cannot be written: The specified bucket does not exist\. Check the URL",
            None,
        ),
        (
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_EC2_METADATA_DISABLED": "true"},
            r"s3://absent/c cannot be read: Unable to locate credentials\. Set AWS_PROFILE",
            r"index\.json cannot be read: Unable to locate credentials\. Set AWS_PROFILE",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"},
            r"cannot be read: Could not connect to the endpoint.*\. Check the network",
            r"cannot be read: Could not connect to the endpoint.*\. Check the network",
        ),
    ],
    ids=["bucket", "credentials", "connection"],
)
def test_what_is_missing_is_one_line(
    s3: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], saved: str, loaded: str | None
) -> None:
    for name, value in settings.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    kind = fsspec.get_filesystem_class("s3")
    kind.clear_instance_cache()
    loaded = (
        loaded or "holds no whole checkpoint (The specified bucket does not exist): a save was interrupted"
    )
    for use, problem in ((sw.save_checkpoint, saved), (sw.load_checkpoint, loaded)):
        with pytest.raises(OSError) as caught:
            use("s3://absent/c", nn.Linear(2, 2))
        text = str(caught.value)
        assert (problem in text or re.search(problem, text)) and "\n" not in text
    kind.clear_instance_cache()


@pytest.mark.extensive("a server and three numbers of ranks")
@pytest.mark.filterwarnings("ignore:The checkpoint was saved by")
@multirank(3)
def test_two_ranks_save_one_loads_and_saves_and_three_load(rank: int, world_size: int, address: str) -> None:
    system(address)
    pair, one = dist.new_group([0, 1]), dist.new_group([0])
    expected: dict[str, Any] = {}
    if rank < 2:
        model, optimizer = trained(0, pair)
        sw.save_checkpoint("s3://runs/two", model, optimizer, process_group=pair)
        expected = {name: each.full_tensor() for name, each in model.state_dict().items()}
    if rank == 0:
        model, optimizer = trained(1, one)
        sw.load_checkpoint("s3://runs/two", model, optimizer, process_group=one)
        sw.save_checkpoint("s3://runs/one", model, optimizer, process_group=one)
    dist.barrier()
    model, optimizer = trained(2, dist.group.WORLD)
    sw.load_checkpoint("s3://runs/one", model, optimizer)
    read = {name: each.full_tensor() for name, each in model.state_dict().items()}
    assert all(torch.equal(read[name], value) for name, value in expected.items())


@pytest.mark.extensive("a server and a writer")
@multirank(2)
def test_an_asynchronous_save_appears(rank: int, world_size: int, address: str) -> None:
    files = system(address)
    mine = {f"t{rank}": torch.arange(1000.0) + rank}
    with sw.AsyncCheckpoint(verified=True) as checkpoints:
        for step in (1, 2):
            checkpoints.save_state(f"s3://runs/step-{step}", mine)
    read = {f"t{rank}": torch.zeros(1000)}
    load_state("s3://runs/step-2", read, RankGroup())
    assert torch.equal(read[f"t{rank}"], mine[f"t{rank}"])
    stored = files.find("runs/step-1", refresh=True)
    assert len(stored) == 5 and not any("note" in name or "begun" in name for name in stored)
