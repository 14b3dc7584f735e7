"""A rank runs on the cores of its GPU's NUMA node."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.train.parallel.affinity import bind_to_node_of, cores_of


@pytest.mark.parametrize(
    ("node", "allowed", "bound"),
    [
        (1, set(range(8)), {2, 3, 6}),
        (1, {0, 3}, {3}),
        (1, {2, 3}, None),  # all of them are near already
        (1, {0, 1}, None),  # a scheduler has given others
        (-1, set(range(8)), None),  # the machine has one node
        (None, set(range(8)), None),  # a container does not show it
    ],
)  # fmt: skip
def test_a_rank_runs_on_cores_near_its_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: int | None,
    allowed: set[int],
    bound: set[int] | None,
) -> None:
    device, nodes = tmp_path / "bus/pci/devices/0000:3b:00.0", tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    nodes.mkdir(parents=True)
    if node is not None:
        (device / "numa_node").write_text(f"{node}\n")
    (nodes / "cpulist").write_text("2-3,6\n")
    chosen: list[Any] = []
    at = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: at)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: allowed)
    monkeypatch.setattr("os.sched_setaffinity", lambda process, cores: chosen.append(cores))
    monkeypatch.setattr("torch.set_num_threads", lambda count: chosen.append(count))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert bind_to_node_of(torch.device("cuda", 0), tmp_path) == (bound or set())
    assert chosen == ([bound, min(2, len(bound))] if bound else [])


def test_lists_of_the_kernel() -> None:
    assert cores_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11} and cores_of("\n") == set()
