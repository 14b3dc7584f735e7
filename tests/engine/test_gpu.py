"""Behaviour that only a GPU shows, on one of them with NCCL: the same numbers, streams in order, memory given back.

Run with ``pytest -m gpu``; skipped where there is none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.activations import checkpoint_blocks
from tests.engine.kit.models import build, full, loss_of, shard, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process and its first GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_training_equals_the_plain_model(compute: torch.dtype | None, reshard: bool | None) -> None:
    sizes = {"layers": 6, "dim": 256, "hidden": 1024}  # large enough for gathers to overlap with computation
    plain = build(**sizes).cuda()
    work = copy.deepcopy(plain)
    model = shard(
        build(**sizes),
        reshard_after_forward=reshard,
        mp_policy=sw.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    )
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(8):
        batch = tokens(step, 0, 0).cuda()
        loss_of(model(batch), batch).backward()
        if compute is not None:
            work = copy.deepcopy(plain).to(compute)
        else:
            work = plain
        loss_of(work(batch), batch).backward()
        for p, q in zip(plain.parameters(), work.parameters(), strict=True):
            p.grad = q.grad.float()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        work.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p), q, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["none", "full", "ops"])
def test_offload_of_activations_keeps_bits_and_frees_memory(kind: str) -> None:
    batch = torch.randint(11, (64, 128), generator=torch.Generator().manual_seed(0)).cuda()
    outcomes, peaks, host_bytes = [], [], 0
    for offloaded in (False, True):
        model = build(layers=6, dim=256, hidden=1024)
        checkpoint_blocks(model.blocks, kind)
        model = shard(model)
        if offloaded:
            offload = sw.offload_activations(model.blocks)
        optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for step in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = loss_of(model(batch), batch)
            loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
            found += [loss.detach(), *(full(p.grad).clone() for p in model.parameters())]
            if offloaded and step:
                assert offload.host_bytes == host_bytes
            host_bytes = offload.host_bytes if offloaded else 0
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(found)
        peaks.append(peak)
    assert all(map(torch.equal, *outcomes))
    assert host_bytes > 0 and peaks[1] < peaks[0]


@pytest.mark.usefixtures("alone")
def test_memory_at_rest_is_the_shard_and_peaks_stay_low() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
    unit = sum(p.numel() * p.element_size() for p in blocks[0].parameters())
    model = nn.Sequential(*blocks)
    for block in blocks:
        sw.fully_shard(block)
    sw.fully_shard(model)
    x = torch.randn(8, 1024, device="cuda")
    for _ in range(2):
        model(x).square().mean().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - rest < 2.5 * unit  # two slabs and some activations
    assert torch.cuda.memory_allocated() - rest < 0.1 * unit


def large(memory: str, compute: torch.dtype | None = None) -> nn.Module:
    """Units whose gathers, computation and reductions take long enough to overlap."""
    model = build(layers=6, dim=512, hidden=2048)
    policy = sw.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        sw.fully_shard(block, mp_policy=policy)
    return sw.fully_shard(model, mp_policy=policy, memory=memory)


def losses(model: nn.Module, steps: int, graphed: bool = False) -> list[float]:
    def function(*batches: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for batch in batches:
            loss = loss_of(model(batch), batch)
            loss.backward()
            total += loss.detach()
        return total

    step = sw.GraphedStep(model, function) if graphed else function
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    found = []
    for number in range(steps):
        found.append(step(*[tokens(number, micro, 0).cuda() for micro in range(2)]).clone())
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert not graphed or step.captured
    return [float(loss) for loss in found]


MEMORY = ["dynamic", "max_pool", "arena"]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def replay(index: int, store: str, memory: str, compute: torch.dtype | None) -> None:
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{store}")
    assert losses(large(memory, compute), 10, graphed=True) == losses(large(memory, compute), 10)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_graph_replay_is_bit_equal(memory: str, compute: torch.dtype | None, tmp_path: Path) -> None:
    """In a process of its own: after a failed capture nothing works any more in a process of torch 2.11."""
    torch.multiprocessing.spawn(replay, (str(tmp_path / "store"), memory, compute), nprocs=1)


@pytest.mark.usefixtures("alone", "deterministic")
@pytest.mark.parametrize("memory", MEMORY)
def test_streams_are_in_order(memory: str) -> None:
    """As many steps in which the host waits after every unit give the same bits."""
    waiting = large(memory, torch.bfloat16)
    for block in waiting.blocks:
        block.register_forward_hook(lambda *_: torch.cuda.synchronize())
        block.register_full_backward_hook(lambda *_: torch.cuda.synchronize())
    assert losses(large(memory, torch.bfloat16), 60) == losses(waiting, 60)


@pytest.mark.usefixtures("alone")
def test_nothing_is_allocated_by_the_engine_in_the_arena() -> None:
    model = large("arena")
    losses(model, 3)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = tokens(0, 0, 0).cuda()
    seen = []
    for _ in range(3):
        loss_of(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.cuda.memory_stats()["num_device_alloc"])
    assert len(set(seen)) == 1  # nothing taken from the device any more
    assert sw.memory_report(model).leases[1] == 0


POLICIES = {
    "all": sw.CPUOffloadPolicy(),
    "state": sw.Offload(parameters=False, gradients=False),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrap", [sw.fully_shard_optimizer, sw.optim.in_backward])
@pytest.mark.parametrize("policy", POLICIES)
def test_offload_changes_nothing_but_places(policy: str, wrap: Callable[..., torch.optim.Optimizer]) -> None:
    models = []
    for given in (sw.OffloadPolicy(), POLICIES[policy]):
        model = shard(build(layers=6, dim=512, hidden=2048), offload_policy=given)
        # On the CPU and on the device alike: one multiplication and one addition, each rounded.
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, foreach=True))
        for step in range(4):
            batch = tokens(step, 0, 0).cuda()
            loss_of(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    offloaded = {"cpu"} if policy == "all" else {"cuda"}
    assert {p.to_local().device.type for p in models[1].parameters()} == offloaded
    for values in optimizer.state.values():
        momentum = values["momentum_buffer"].to_local()
        assert momentum.device.type == "cpu"
        # With parameters on the CPU the optimizer makes its state itself, and there is nothing to copy.
        assert momentum.is_pinned() == (policy == "state")
    with sw.unsharded(models[0]), sw.unsharded(models[1]):
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(q.cpu(), p.cpu(), rtol=1e-5, atol=1e-6)
