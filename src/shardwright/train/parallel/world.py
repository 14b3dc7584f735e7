"""The ranks of a job: who this process is among them, its device and its process group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.context import Split
from shardwright.engine.comm import make_mesh, noted
from shardwright.engine.compat import has_expandable_segments, use_one_gloo_thread
from shardwright.train.config import Config, ParallelConfig
from shardwright.train.config.axes import ParallelDims
from shardwright.train.errors import UserError
from shardwright.train.parallel.affinity import bind_to_node_of
from shardwright.train.parallel.checks import check_device, check_ranks
from shardwright.train.parallel.rank_facts import (
    choose_device,
    collective_timeout,
    rank_and_size,
    under_launcher,
)


@dataclass(frozen=True)
class World:
    """The processes of a job, as one of them sees them.

    Attributes:
        context: the ranks that divide each sample; None without such ranks.
    """

    rank: int
    device: torch.device
    mesh: DeviceMesh
    dims: ParallelDims
    context: Split | None = None

    @classmethod
    def of(cls, config: ParallelConfig, rank: int, size: int, device: torch.device) -> World:
        """Return the world of one of `size` ranks, whose process group exists. Called by all ranks together."""
        dims = config.dims(size)
        mesh = _mesh_of(dims.axes, device)
        context = None
        if dims.parts_of("samples") > 1:
            context = Split(_mesh_of(dims.context_axes, device)[tuple(dims.axes_of("samples"))])
        return cls(rank, device, mesh, dims, context)

    @property
    def size(self) -> int:
        return self.dims.ranks

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.dims.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """Ranks, or groups of them, that have data of their own."""
        return self.dims.data

    def figures(self, values: Sequence[float | Tensor]) -> Tensor:
        """Numbers, and tensors without dimensions, on the device in one row: float64 [len(values)]. The host does not
        wait for the device."""
        numbers = [0.0 if isinstance(each, Tensor) else float(each) for each in values]
        row = torch.tensor(numbers, dtype=torch.float64, pin_memory=self.device.type != "cpu")
        row = row.to(self.device, non_blocking=True)
        for place, each in enumerate(values):
            if isinstance(each, Tensor):
                row[place : place + 1].copy_(each.detach().reshape(1), non_blocking=True)
        return row


def _mesh_of(axes: Mapping[str, int], device: torch.device) -> DeviceMesh:
    return make_mesh(device.type, tuple(axes.values()), tuple(axes))


def pick_device(config: Config) -> torch.device:
    """Return the device of this rank. Raises UserError for what this rank, or every rank, cannot run. Waits for
    nobody."""
    _, size = rank_and_size()
    check_ranks(config, size)
    kind = choose_device(config.run)
    check_device(config.train, kind)
    device = torch.device(kind)
    if kind == "cuda":
        # Who has made the group has chosen the device.
        local = torch.cuda.current_device() if dist.is_initialized() else _local_gpu()
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        if config.run.bind_cpus == "auto":
            bind_to_node_of(device)
    return device


#: Variables that show a process some of the GPUs of its machine.
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _local_gpu() -> int:
    """Return the index of this rank's GPU among those that it sees. A scheduler may show each rank one GPU of its
    own."""
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local < count:
        return local
    if count == 1 and any(os.environ.get(mask) for mask in MASKS):
        return 0  # where the ranks meet, `claim_gpu` refuses one that others see, too
    raise UserError(
        f"expected a GPU for each rank of this machine, found {count} for at least {local + 1} ranks; use a smaller "
        "--nproc"
    )


def claim_gpu(store: dist.Store, rank: int, host: str, device: torch.device) -> None:
    """Raise a UserError if another rank has claimed this rank's GPU of the host. `store` is where the ranks meet."""
    if device.type != "cuda":
        return
    number = str(torch.cuda.get_device_properties(device).uuid)
    other = store.compare_set(f"start/gpu/{host}/{number}", "", str(rank)).decode()
    if other != str(rank):
        raise UserError(
            f"expected a GPU for each rank of this machine, found ranks {other} and {rank} on one (GPU-{number}); use "
            "a smaller --nproc, or let the scheduler show each rank a GPU of its own"
        )


@contextmanager
def join_world(config: Config, store: dist.Store | None = None) -> Iterator[World]:
    """Become a rank: pick the device, set up the process group (also for one rank), take it down again at the end.

    `store` is where the ranks of a launched job have met. A process group that exists is used, and stays.
    """
    (rank, size), device = rank_and_size(), pick_device(config)
    kind = device.type
    if dist.is_initialized():
        _check_group(kind)
        yield World.of(config.parallel, rank, size, device)
        return  # who has made the group ends it
    options: dict[str, Any] = {"timeout": collective_timeout()}
    if store is not None or not under_launcher():
        meeting = dist.HashStore() if store is None else dist.PrefixStore("default_pg", store)
        options |= {"store": meeting, "rank": rank, "world_size": size}
    if kind == "cuda":
        options["device_id"] = device
    use_one_gloo_thread()
    # gloo beside NCCL: checkpoints exchange plain objects, which need not pass through the GPU.
    if kind != "cpu" and has_expandable_segments():
        os.environ.setdefault(
            "NCCL_GRAPH_REGISTER", "0"
        )  # else graphs register memory that the allocator moves
    dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", **options)
    try:
        yield World.of(config.parallel, rank, size, device)
        with noted("barrier at the end", None):
            dist.barrier()  # Nobody leaves while another still works: a rank that is gone looks like one that died.
    except BaseException:
        # The other ranks may be anywhere: taking NCCL down could wait for them for ever.
        if kind == "cpu" or size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _check_group(kind: str) -> None:
    """Refuse a process group of another framework that cannot serve. Objects of checkpoints go by gloo."""
    backends = dist.get_backend_config()
    for device, backend in {"cpu": "gloo", **({"cuda": "nccl"} if kind == "cuda" else {})}.items():
        if f"{device}:{backend}" not in backends:
            wanted = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
            raise UserError(
                f"expected a process group with {device}:{backend}, found {backends}; make it with backend={wanted!r}"
            )
