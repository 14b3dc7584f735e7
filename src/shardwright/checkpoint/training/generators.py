"""The states of a rank's random generators, as tensors of a checkpoint.

Stored: torch's generator of the host, of the current accelerator, Python's ``random``, and numpy's global generator if
numpy was imported. At the same number of ranks they go on where they were. At another number each rank gets a seed that
depends on the stored state of the first rank, the rank and the number of ranks.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.format.digests import Damaged


def generator_states() -> dict[str, Tensor]:
    """The states of this process's generators: 1-d tensors on the host, uint8 or int64."""
    states = {"torch": torch.get_rng_state()}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    version, numbers, gauss = random.getstate()
    states["python"] = _integers([version, *numbers], gauss)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        if name == "MT19937":
            states["numpy"] = _integers([*map(int, keys), int(position)], cached if has_gauss else None)
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Let this process's generators go on from these states. Generators without a stored state stay as they are."""
    torch.set_rng_state(states["torch"])
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
    if "python" in states:
        (version, *numbers), gauss = _from_integers(states["python"])
        random.setstate((version, tuple(numbers), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        (*keys, position), gauss = _from_integers(states["numpy"])
        cached = 0.0 if gauss is None else gauss
        numpy.random.set_state(("MT19937", keys, position, int(gauss is not None), cached))


def check_generator_states(states: Mapping[str, Tensor]) -> None:
    """Raise Damaged if a state is none of a generator's. No generator of this process changes."""
    if not isinstance(states, Mapping) or not all(isinstance(each, Tensor) for each in states.values()):
        raise Damaged("generators: expected a tensor for each generator")
    try:
        torch.Generator().set_state(states["torch"])
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if device is not None and device.type != "cpu" and device.type in states:
            torch.Generator(device).set_state(states[device.type])
        if "python" in states:
            (version, *numbers), gauss = _from_integers(states["python"])
            random.Random().setstate((version, tuple(numbers), gauss))
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in states:
            (*keys, position), gauss = _from_integers(states["numpy"])
            cached = 0.0 if gauss is None else gauss
            if not 0 <= position <= len(keys):  # numpy does not check, and would read beyond its numbers
                raise ValueError(f"position {position} of numpy's generator")
            numpy.random.RandomState().set_state(("MT19937", keys, position, int(gauss is not None), cached))
    except (RuntimeError, TypeError, ValueError, LookupError, OverflowError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise Damaged(f"generators: the state of a random generator cannot be restored ({reason})") from None


def derived_seed(first_ranks: Mapping[str, Tensor], rank: int, ranks: int) -> int:
    """A seed for a rank, from the stored states of the first rank."""
    text = f"{rank} of {ranks}".encode()
    digest = hashlib.sha256(bytes(first_ranks["torch"].tolist()) + text).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed all generators of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def _integers(numbers: list[int], gauss: float | None) -> Tensor:
    """Integers and a number that may be absent, as one tensor of int64."""
    bits = [] if gauss is None else [torch.tensor(gauss, dtype=torch.float64).view(torch.int64).item()]
    return torch.tensor([len(bits), *bits, *numbers], dtype=torch.int64)


def _from_integers(tensor: Tensor) -> tuple[list[int], float | None]:
    has_gauss, *numbers = tensor.tolist()
    if not has_gauss:
        return numbers, None
    return numbers[1:], torch.tensor(numbers[0]).view(torch.float64).item()
