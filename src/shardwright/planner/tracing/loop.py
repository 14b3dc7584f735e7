"""Plans of any training loop: a user's function runs on fake tensors. Also the GPU of this machine as a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import torch

from shardwright.planner.allocator import Rules
from shardwright.planner.devices import Device, DeviceError, parse_devices
from shardwright.planner.program import Program
from shardwright.planner.speed import speed_of
from shardwright.planner.tracing.fakes import A_VALUE, UnknownValueError
from shardwright.planner.tracing.tracer import trace
from shardwright.planner.tracing.training import watch_training
from shardwright.planner.verdict import Verdict, judge


def plan(loop: Callable[[], object], on: str, *, value: float | None = None) -> Verdict:
    """Say whether a training loop fits into the memory of its GPUs. It needs no GPU and no other rank.

        def loop():
            with sw.deferred_init():
                model = Model()
            for block in model.layers:
                sw.fully_shard(block)
            sw.fully_shard(model)
            sw.materialize(model)
            optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
            for _ in range(2):
                model(torch.zeros(4, 2048, dtype=torch.int64)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        verdict = sw.plan(loop, on="8xh100")
        print(verdict)

    The function runs once in this process, as rank 0. A process group exists while it runs. Its tensors are on the CPU,
    have no content, and stand for those of the GPU. Models may be sharded by ``sw.fully_shard`` or torch's function, or
    not at all. Let the function make two steps, since the optimizer makes its state in the first one.

    Args:
        loop: builds the model and makes the steps.
        on: devices, such as "8xh100": the number of ranks and a device, a .toml file with the memory of a device as
            ``gib``, or "local", the GPU of this machine. Without a number it is one device.
        value: the number that ``item()`` and ``float()`` return where no plan computes the value, such as that of a
            loss. None: such a read raises an error that names its line.

    Returns:
        The verdict. ``fits`` is True or False; ``exact`` and ``traced`` have bytes by group, ``usage`` those of
        PyTorch's allocator with the settings in PYTORCH_ALLOC_CONF, ``peak`` the moment with most live bytes,
        ``speed.seconds`` the least, the likely and the largest time of the last step. ``str()`` gives the lines that
        ``shardwright plan`` prints.

    Raises:
        ValueError: no such device, a setting of PYTORCH_ALLOC_CONF that no plan covers, or a loop that makes no step or
            a single one.
        RuntimeError: this process has joined a process group.
        UnknownValueError: the function reads a value that no plan computes.
        AbsentDeviceError: a ValueError; the function uses a GPU, as ``.cuda()`` does.
    """
    if not callable(loop):
        raise TypeError(f"expected a function that builds a model and makes steps, found {loop!r}")
    ranks, device = parse_devices(on, local_device)
    rules = Rules.of(os.environ)
    try:
        program = program_of_loop(loop, ranks, value=value)
    except UnknownValueError as error:
        is_read = value is None and error.what.startswith(A_VALUE)
        way = "; sw.plan(..., value=1.0) says what item() returns" if is_read else ""
        raise UnknownValueError(error.what, error.line, way) from None
    return judge(program, device, ranks, rules, speed_of(program, device, ranks))


def program_of_loop(
    loop: Callable[[], object], ranks: int, kind: Literal["cpu", "cuda"] = "cuda", value: float | None = None
) -> Program:
    """Return the program of rank 0 of ``ranks``. ``kind``: of the devices. Others and errors as for :func:`plan`."""
    with trace(ranks, kind, value) as recorder:
        recorder.phase("build")
        with watch_training(recorder) as training:
            kept = loop()
            training.check()
            training.claim()
            program = recorder.program()
            del kept
    return program


def local_device() -> Device:
    """Return the first GPU that this process sees.

    Raises:
        DeviceError: there is none.
    """
    if not torch.cuda.is_available():
        raise DeviceError("expected a device that is named, found 'local', and this machine has no GPU")
    properties = torch.cuda.get_device_properties(0)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(
        "local",
        properties.name,
        properties.total_memory,
        "torch.cuda.get_device_properties",
        host_nbytes=host,
        node=torch.cuda.device_count(),
    )
