"""Random numbers in place of replicated elements: ranks that keep the same elements must draw the same numbers.

A rank draws with its own generator. So the ranks compare the states of their generators before they draw.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine.comm import Communicator
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.tensors.naming import EDITED, parameter_of
from shardwright.engine.tensors.numbers.reading import DRAW, agree_to_read_over


def agree_to_draw(func: Any, target: DTensor, kwargs: dict[str, Any]) -> None:
    """Wait for the ranks that keep the same elements of ``target``, before ``func`` fills it with random numbers.

    Raises:
        RuntimeError: their generators are in different states.
    """
    mesh, local = target.device_mesh, local_of(target)
    axes = [axis for axis, p in enumerate(target.placements) if p.is_replicate() and mesh.size(axis) > 1]
    if not axes or local.is_meta:
        return
    state = zlib.crc32(bytes(_state(kwargs.get("generator"), local.device).tolist()))
    device = torch.device(mesh.device_type)
    for comm in (Communicator(mesh.get_group(axis), device) for axis in axes):
        if comm.exchanges:
            same = agree_to_read_over(comm, DRAW, str(state))
        else:
            same = (
                len(set(comm.gather_row(local.new_tensor([state], dtype=torch.int64)).flatten().tolist()))
                == 1
            )
        if not same:
            name = parameter_of(target.__dict__.get(EDITED, local))
            raise RuntimeError(
                f"{func} fills {f'parameter {name}' if name else 'a sharded tensor'} with random numbers, and the "
                f"generators of ranks {comm.ranks}, which keep the same elements, are in different states. So their "
                "copies would differ. Call torch.manual_seed with the same number on every rank before, or pass equal "
                "generators."
            )


def _state(generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    if generator is not None:
        return generator.get_state()
    return (
        torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device)
    )
