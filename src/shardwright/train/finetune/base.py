"""The base that adapters belong to: where it came from, and a digest of each frozen parameter.

Checkpoints of adapters do not hold the base. So a run keeps this reference, and a resume compares the base that it has
built or loaded with it. The digest is over the values in the model, so it is the same for every number of ranks,
strategy and layout, and wherever the values came from.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint import Damaged, ModelTensor, tensors_of
from shardwright.common.sealed_json import sealed, unsealed
from shardwright.engine import RankGroup
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import is_adapter
from shardwright.train.run.writing import write_text

CHUNK = 1 << 22
"""Elements that are hashed at once; each needs a few times 8 bytes meanwhile."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Base:
    """A frozen base.

    Attributes:
        source: the folder or hub name it was loaded from, or how it was drawn, in words.
        digests: by name of each frozen parameter: dtype, shape and 16 hexadecimal digits of its values.
    """

    source: str
    digests: Mapping[str, str]


def base_of(model: nn.Module, source: str) -> Base:
    """Return the reference to the model's frozen parameters. Called by every rank, between steps; each reads its own
    part."""
    entries = [e for e in tensors_of(model) if _is_frozen(e)]
    parts = {entry.name: _parts(entry) for entry in entries}
    everyones = RankGroup().all_gather(parts)
    digests = {}
    for entry in entries:
        by_box: dict[Any, int] = {}
        for rank, own in enumerate(everyones):
            for box, value in own[entry.name].items():
                if by_box.setdefault(box, value) != value:
                    raise RuntimeError(
                        f"rank {rank} has other values of {entry.name!r} than the ranks before it"
                    )
        elements = sum(math.prod(shape) for _, shape in by_box)
        if elements != entry.tensor.numel():
            raise RuntimeError(
                f"the ranks have {elements} elements of {entry.name!r} with {entry.tensor.numel()}"
            )
        kind = str(entry.tensor.dtype).removeprefix("torch.")
        digests[entry.name] = f"{kind} {list(entry.tensor.shape)} {sum(by_box.values()) % 2**64:016x}"
    return Base(source, digests)


def _is_frozen(entry: ModelTensor) -> bool:
    return (
        isinstance(entry.tensor, nn.Parameter)
        and not entry.tensor.requires_grad
        and not is_adapter(entry.name)
    )


def _parts(entry: ModelTensor) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    """By offsets and shape of each box of this rank, the sum of the hashes of its elements."""
    shape = tuple(entry.tensor.shape)
    salt = zlib.crc32(repr(shape).encode())
    return {
        (offsets, tuple(local.shape)): _sum_of_hashes(local, offsets, shape, salt)
        for offsets, local in _boxes(entry)
        if local.numel()
    }


def _boxes(entry: ModelTensor) -> Sequence[tuple[tuple[int, ...], Tensor]]:
    """Return the boxes of this rank, also of a parameter that torch's engine has cut: offsets and elements."""
    tensor = entry.tensor
    if isinstance(tensor, DTensor) and entry.unit is None:
        chunks = tensor.__create_chunk_list__()
        return [(tuple(chunk.offsets), tensor.to_local().detach()) for chunk in chunks]
    return entry.boxes()


@torch.no_grad()
def _sum_of_hashes(local: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], salt: int) -> int:
    """Return a hash of each element's bits and place in the whole tensor, summed: the cut does not matter. Below
    2**64."""
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    rows = max(1, CHUNK // max(1, math.prod(local.shape[1:])))
    for first in range(0, local.shape[0] if local.ndim else 1, rows):
        part = local[first : first + rows] if local.ndim else local
        places = torch.full((), salt, dtype=torch.int64, device=local.device)
        for dim in range(local.ndim):
            begin = offsets[dim] + (first if dim == 0 else 0)
            along = torch.arange(begin, begin + part.shape[dim], device=local.device)
            step = math.prod(shape[dim + 1 :])
            places = places + (along * step).view(-1, *[1] * (local.ndim - dim - 1))
        bits = part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64)
        total += _mixed(bits ^ _mixed(places.expand(part.shape))).sum()
    return int(total) % 2**64


def _mixed(x: Tensor) -> Tensor:
    """Return the finaliser of SplitMix64 (Steele et al., 2014). Products wrap around, shifts are of unsigned
    numbers."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# -- files -------------------------------------------------------------------------------------------------------------


def write_base(file: Path, base: Base) -> None:
    """Write a reference; one rank calls it. Raises UserError if the file cannot be written."""
    write_text(file, sealed({"source": base.source, "parameters": dict(base.digests)}))


def read_base(file: Path) -> Base:
    """Read a reference. Raises UserError if there is none, or a damaged one."""
    try:
        content = unsealed(file.read_bytes(), file.name)
        return Base(content["source"], content["parameters"])
    except FileNotFoundError:
        raise UserError(
            f"{file}: expected the reference to the base of this run, found no such file; without it a resume cannot "
            "tell whether the adapters belong to this base. Restore the file, or start a new run"
        ) from None
    except (OSError, KeyError, json.JSONDecodeError, Damaged) as error:
        raise UserError(f"{file}: expected the reference to the base of this run, found a damaged file: {error}. "
                        "Restore it, or start a new run") from None  # fmt: skip


def check_same_base(file: Path, base: Base) -> None:
    """Compare a base with the reference in a file. Raises UserError that names the first parameter that differs."""
    expected = read_base(file)
    for name in dict.fromkeys([*expected.digests, *base.digests]):
        before, now = expected.digests.get(name), base.digests.get(name)
        if before == now:
            continue
        moved = "" if expected.source == base.source else f" (from {expected.source})"
        raise UserError(
            f"{file}: expected the base that the adapters were trained on{moved}, found another one from "
            f"{base.source}: {name} is {now or 'not a frozen parameter there'}, expected "
            f"{before or 'none'}. Restore that base, or start a new run"
        )
