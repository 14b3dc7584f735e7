"""The states of a rank's random generators, as tensors of a checkpoint.

Stored: torch's generator of the host, of the current accelerator, Python's ``random``, and numpy's global generator if
numpy was imported. At the same number of ranks they go on where they were. At another number each rank gets a seed that
depends on the stored state of the first rank, the rank and the number of ranks.
"""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shardwright.checkpoint.load.checkpoints import Checkpoint
from shardwright.checkpoint.training.section_to_load import SectionToLoad, targets_below
from shardwright.common.errors import Damaged
from shardwright.engine import RankGroup

GENERATORS = "generators"  #: the key of the section in a checkpoint


def stored_by(names: Iterable[str], ranks: RankGroup) -> tuple[int, str]:
    """Return the number of ranks that have stored their generators, and the key of those that this rank takes.

    They are its own at the stored number of ranks, else the first rank's. ``names``: of the tensors of a checkpoint.
    """
    saved = sum(name.startswith(f"{GENERATORS}.rank") and name.endswith(".torch") for name in names)
    return saved, f"rank{ranks.rank if saved == ranks.size else 0}"


def generator_states() -> dict[str, Tensor]:
    """Return the states of this process's generators: 1-d tensors on the host, uint8 or int64."""
    states = {"torch": torch.get_rng_state()}
    if (device := _accelerator()) is not None:
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
    """Let this process's generators go on from these states. Generators without a stored state stay as they are.

    Raises:
        Damaged: a state is none of a generator's. No generator has changed.
    """
    check_generator_states(states)
    numpy, device = sys.modules.get("numpy"), _accelerator()
    of_device = None if device is None else torch.get_device_module(device).set_rng_state
    of_numpy = None if numpy is None else numpy.random.set_state
    _give(states, torch.set_rng_state, of_device, random.setstate, of_numpy)


def check_generator_states(states: Mapping[str, Tensor]) -> None:
    """Raise Damaged if a state is none of a generator's. No generator of this process changes."""
    if not isinstance(states, Mapping) or not all(isinstance(each, Tensor) for each in states.values()):
        raise Damaged("generators: expected a tensor for each generator")
    numpy, device = sys.modules.get("numpy"), _accelerator()
    of_device = None if device is None else torch.Generator(device).set_state
    of_numpy = None if numpy is None else numpy.random.RandomState().set_state
    try:
        _give(states, torch.Generator().set_state, of_device, random.Random().setstate, of_numpy)
    except (RuntimeError, TypeError, ValueError, LookupError, OverflowError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise Damaged(f"generators: the state of a random generator cannot be restored ({reason})") from None


def _give(
    states: Mapping[str, Tensor],
    host: Callable[[Tensor], object],
    accelerator: Callable[[Tensor], object] | None,
    python: Callable[[tuple[Any, ...]], object],
    numpy: Callable[[tuple[Any, ...]], object] | None,
) -> None:
    """Give stored states to generators, by the functions that set their states."""
    host(states["torch"])
    device = _accelerator()
    if accelerator is not None and device is not None and device.type in states:
        accelerator(states[device.type])
    if "python" in states:
        (version, *numbers), gauss = _from_integers(states["python"])
        python((version, tuple(numbers), gauss))
    if numpy is not None and "numpy" in states:
        (*keys, position), gauss = _from_integers(states["numpy"])
        if not 0 <= position <= len(keys):  # numpy does not check, and would read beyond its numbers
            raise ValueError(f"position {position} of numpy's generator")
        numpy(("MT19937", keys, position, int(gauss is not None), 0.0 if gauss is None else gauss))


def _accelerator() -> torch.device | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device if device is not None and device.type != "cpu" else None


def seed_generators(seed: int | bytes) -> None:
    """Seed all generators of this process, with an integer or with the digest of bytes."""
    if isinstance(seed, bytes):
        seed = int.from_bytes(hashlib.sha256(seed).digest()[:8], "little") >> 1
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


@dataclass(frozen=True)
class GeneratorsToLoad(SectionToLoad):
    """The stored generators that this rank takes.

    Attributes:
        ranks: of the load.
        saved_ranks: number of ranks that have stored their generators.
        name: the key of those that this rank takes.
        tensors: to read into, below that key.
    """

    key = GENERATORS
    ranks: RankGroup
    saved_ranks: int
    name: str
    tensors: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint, ranks: RankGroup) -> Self | None:
        """Return the section, or None if the checkpoint has none. Raises ValueError if there is no memory for it."""
        saved, name = stored_by(checkpoint.tensors, ranks)
        if not saved:
            return None
        return cls(ranks, saved, name, {name: targets_below(checkpoint, f"{GENERATORS}.{name}", {})})

    def is_new(self, name: str) -> bool:
        return True

    def accept(self, content: Mapping[str, Any]) -> None:
        check_generator_states(content[self.name])

    def restore(self, content: Mapping[str, Any]) -> None:
        """Let the generators go on. At another number of ranks each rank gets a new seed, and the first rank warns."""
        ranks, states = self.ranks, content[self.name]
        if self.saved_ranks == ranks.size:
            set_generator_states(states)
            return
        seed_generators(bytes(states["torch"].tolist()) + f"{ranks.rank} of {ranks.size}".encode())
        if ranks.is_first:
            warnings.warn(
                f"The checkpoint was saved by {self.saved_ranks} ranks and is loaded by {ranks.size}, so random "
                "generators do not go on where they were: each rank has a seed derived from the checkpoint and its "
                "rank.",
                stacklevel=4,
            )
