"""Streams to other processes, with transformers models as consumers: by a process group and by shared memory."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from tests.checkpoint.kit.architectures import MODELS, make, shard
from tests.engine.kit.models import build
from tests.support import multirank
from tests.support.pool import forkserver

Weights = dict[str, torch.Tensor]


def drawn(name: str, seed: int) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model = make(name)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens).logits


def memory_files() -> set[str]:
    """The files in memory of all processes, without heartbeats, which other tests make and remove meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("shardwright-heartbeat-")}


def parts(world_size: int) -> tuple[DeviceMesh, Any]:
    """The mesh of all ranks but the last, and a group of the first rank and the last."""
    mesh = DeviceMesh("cpu", list(range(world_size - 1)))
    return mesh, dist.new_group([0, world_size - 1])


def consume(model: Any, buckets: Iterator[Weights]) -> int:
    count = 0
    for bucket in buckets:
        sw.load_pretrained(model, bucket, allow_missing=True)
        count += 1
    return count


@pytest.mark.extensive("every architecture of transformers")
def test_every_model_of_transformers_is_saved_under_its_stored_names(tmp_path: Path) -> None:
    """As its own ``save_pretrained`` writes them: from_pretrained of transformers reads what is written here."""
    pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    for name in MODELS:
        model = drawn(name, 0)
        model.save_pretrained(tmp_path / name)
        expected = safetensors.load_file(tmp_path / name / "model.safetensors")
        found: Weights = {}
        for bucket in sw.stream_weights(model, bucket_bytes="4 KiB"):
            found |= bucket
        assert found.keys() == expected.keys(), name
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name
        sw.save_pretrained(model, tmp_path / f"{name}-ours")
        again = safetensors.load_file(tmp_path / f"{name}-ours" / "model.safetensors")
        assert again.keys() == expected.keys(), name


@pytest.mark.extensive("transformers")
@multirank(3, timeout=90)
@pytest.mark.parametrize("way", ["group", "share"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_transformers_consumer_computes_the_exported_logits(
    rank: int, world_size: int, name: str, way: str, tmp_path: Path
) -> None:
    """Two ranks train, the third generates; bit for bit as the exported model does."""
    transformers = pytest.importorskip("transformers")
    mesh, group = parts(world_size)
    address = f"{tmp_path.parent.name}-{tmp_path.name}-{name}"[-80:]
    if rank < 2:
        layout = "ragged" if name == "llama" else "per_parameter"
        model = shard(drawn(name, 1), mesh=mesh, layout=layout)
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(rank))
        model.train()(tokens, labels=tokens).loss.backward()
        optimizer.step()
        sw.save_pretrained(model, tmp_path / "saved", config=model.config.to_dict())
        options: dict[str, Any] = {"group": group} if way == "group" else {"share": address}
        count = 0
        for bucket in sw.stream_weights(model, bucket_bytes="6 KiB", **options):
            assert bucket == {}
            count += 1
        assert count > 3
        dist.barrier()
    else:
        consumer = drawn(name, 2)
        count = consume(consumer, sw.receive_weights(group if way == "group" else address))
        assert count > 3
        dist.barrier()
        warnings.simplefilter("ignore")
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        assert torch.equal(logits(consumer), logits(exported))
        assert not torch.equal(logits(exported), logits(drawn(name, 1)))


@multirank(3)
def test_names_and_dtypes_reach_a_group(rank: int, world_size: int) -> None:
    mesh, group = parts(world_size)
    if rank < 2:
        model = build(3).to(torch.bfloat16)
        model.register_buffer("steps", torch.tensor(7))
        model.register_buffer("nothing", torch.empty(0, 3))
        sw.fully_shard(model, mesh=mesh)
        for _ in sw.stream_weights(model, names=["norm.*", "steps", "nothing"], group=group):
            pass
        if rank == 0:
            with pytest.raises(ValueError, match="sends the weights"):
                sw.receive_weights(group)
    else:
        (bucket,) = [dict(each) for each in sw.receive_weights(group)]
        assert torch.equal(bucket["norm.weight"], build(3).norm.weight.to(torch.bfloat16))
        assert bucket["steps"].item() == 7 and bucket["nothing"].shape == (0, 3)


@multirank(3)
@pytest.mark.parametrize("way", ["group", "share"])
@pytest.mark.parametrize("end", ["consumer leaves", "sender leaves", "weights change"])
def test_streams_that_end_early(rank: int, world_size: int, way: str, end: str, tmp_path: Path) -> None:
    """A consumer that leaves drops the rest. A sender that leaves is reported to the consumer."""
    mesh, group = parts(world_size)
    address = f"{tmp_path.parent.name}-{tmp_path.name}"[-80:]
    options: dict[str, Any] = {"group": group} if way == "group" else {"share": address}
    if rank < 2:
        model = sw.fully_shard(build(3), mesh=mesh)
        stream = sw.stream_weights(model, bucket_bytes=500, **options)
        if end == "consumer leaves":
            assert len(list(stream)) > 3
        elif end == "sender leaves":
            next(stream)
            stream.close()
        else:
            next(stream)
            with torch.no_grad():
                model.norm.bias.add_(1)
            with pytest.raises(RuntimeError, match="Weights changed after 1 of"):
                next(stream)
    else:
        source = options.get("group", address)
        if end == "consumer leaves":
            with pytest.raises(KeyError):
                for bucket in sw.receive_weights(source):
                    bucket["nowhere"]
        else:
            reason = "ended early" if end == "sender leaves" else "Weights changed"
            with pytest.raises(RuntimeError, match=rf"stopped after 1 of \d+ buckets of weights: .*{reason}"):
                for bucket in sw.receive_weights(source):
                    assert bucket
    dist.barrier()


# -- processes that are killed -----------------------------------------------------------------------------------------


def _slow_consumer(address: str, reports: Any) -> None:
    for bucket in sw.receive_weights(address, timeout=20):
        reports.send(sorted(bucket))
        time.sleep(60)


def _sender(address: str) -> None:
    for _ in sw.stream_weights(build(3, dim=64, hidden=64), bucket_bytes="8 KiB", share=address, timeout=20):
        pass


def _process(target: Callable[..., None], *arguments: Any) -> Any:
    process = forkserver().Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def test_a_killed_consumer_is_an_error_of_the_sender_and_leaves_nothing(tmp_path: Path) -> None:
    before = memory_files()
    here, there = forkserver().Pipe(duplex=False)
    consumer = _process(_slow_consumer, f"{tmp_path}"[-80:], there)
    model = build(3)
    stream = sw.stream_weights(model, bucket_bytes=500, share=f"{tmp_path}"[-80:], timeout=20)

    def kill() -> None:
        assert here.poll(20) and here.recv()
        os.kill(consumer.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match=r"a consumer did not finish bucket 0 of \d+.*has ended"):
        list(stream)
    killer.join()
    consumer.join()
    assert memory_files() <= before
    # The name is free again.
    sw.stream_weights(model, share=f"{tmp_path}"[-80:]).close()


def test_a_killed_sender_is_an_error_of_the_consumer_and_leaves_nothing(tmp_path: Path) -> None:
    before = memory_files()
    address = f"{tmp_path}"[-80:]
    sender = _process(_sender, address)
    buckets = sw.receive_weights(address, timeout=20)
    kept = dict(next(buckets))
    os.kill(sender.pid, signal.SIGKILL)
    sender.join()
    with pytest.raises(ConnectionError, match="has ended"):
        for _ in buckets:
            pass
    assert memory_files() <= before
    expected = build(3, dim=64, hidden=64).state_dict()
    assert kept and all(torch.equal(value, expected[key]) for key, value in kept.items())


def test_several_consumers_get_their_own_copies(tmp_path: Path) -> None:
    address = f"{tmp_path}"[-80:]
    model = build(3)
    found: list[Weights] = [{}, {}]

    def consumer(number: int) -> None:
        for bucket in sw.receive_weights(address, timeout=20):
            for tensor in bucket.values():
                tensor.add_(number)  # nobody else sees it
            found[number] |= bucket

    threads = [threading.Thread(target=consumer, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for _ in sw.stream_weights(model, bucket_bytes=500, share=address, consumers=2, timeout=20):
        pass
    for thread in threads:
        thread.join()
    for number in range(2):
        assert found[number].keys() == model.state_dict().keys()
        assert all(
            torch.equal(found[number][key], value + number) for key, value in model.state_dict().items()
        )


def test_a_process_of_another_user_does_not_end_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can connect to an address without a file. The sender closes such a connection and waits for its own."""
    address, model, own = f"{tmp_path}"[-80:], build(3), os.getuid()
    stream = sw.stream_weights(model, bucket_bytes=500, share=address, timeout=20)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0shardwright-weights-{own}/{address}")
        found: Weights = {}
        consumer = threading.Thread(
            target=lambda: [found.update(each) for each in sw.receive_weights(address, timeout=20)]
        )
        # The sender takes this process for another user's when it checks the first connection.
        users = iter([own + 1])
        monkeypatch.setattr(os, "getuid", lambda: next(users, own))
        first = threading.Thread(target=lambda: [None for _ in stream])
        first.start()
        stranger.settimeout(20)
        assert stranger.recv(1) == b""  # closed
        consumer.start()
        consumer.join()
        first.join()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_nobody_comes(tmp_path: Path) -> None:
    address = f"{tmp_path}"[-80:]
    with pytest.raises(TimeoutError, match="no process of this host sent under this name"):
        next(sw.receive_weights(address, timeout=0.1))
    with pytest.raises(TimeoutError, match=r"expected 2 consumers within 0\.1 s, found 0"):
        next(sw.stream_weights(build(), share=address, consumers=2, timeout=0.1))
    stream = sw.stream_weights(build(), share=address)
    with pytest.raises(OSError, match="another process sends under this name"):
        sw.stream_weights(build(), share=address)
    stream.close()
