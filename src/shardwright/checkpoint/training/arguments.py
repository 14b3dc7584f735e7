"""Arguments of a save or a load, checked on every rank before anything is read or written.

Each check raises one error that names the argument and says what to pass. Nothing here knows what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint.storage.locations import Location, store_of
from shardwright.checkpoint.storage.stores import Store
from shardwright.engine import RankGroup


def place_of(path: Location, ranks: RankGroup) -> Store:
    """Return the place of a checkpoint. Every rank must call it. Raises TypeError or ValueError on every rank."""
    return ranks.run_own(lambda: store_of(path))


def check_model_and_extra(model: nn.Module, extra: Mapping[str, Any] | None) -> None:
    """Raise TypeError if they are something else."""
    if not isinstance(model, nn.Module):
        hint = ". Pass the model itself" if isinstance(model, Mapping) else ""
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}{hint}")
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f'extra: expected a dict, such as extra={{"step": 100}}, got {type(extra).__name__}')


def refuse_sharded_optimizers(extra: Mapping[str, Any]) -> None:
    """Raise ValueError for an optimizer of a sharded model in ``extra``."""
    for key, value in extra.items():
        if isinstance(value, Optimizer) and any(
            hasattr(p, "full_tensor") for group in value.param_groups for p in group["params"]
        ):
            raise ValueError(
                f"extra[{key!r}] is the optimizer of a sharded model, whose state has other forms on other ranks. Pass "
                "it with the others: optimizer=[...]"
            )


def reason_of(error: Exception) -> str:
    """Return an error in one short line."""
    line = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {line}"


def summary(optimizers: Sequence[Optimizer], extra: Mapping[str, Any], generators: bool) -> tuple[Any, ...]:
    """Return the arguments in plain values, for :func:`check_same`."""
    return [type(each).__name__ for each in optimizers], sorted(map(str, extra)), generators


def check_same(summaries: Sequence[tuple[Any, ...]], ranks: RankGroup) -> None:
    """Raise ValueError if a rank has passed other arguments than the first one."""
    names = "optimizer", "extra", "generators"

    def error(others: list[int], theirs: tuple[Any, ...], first: tuple[Any, ...]) -> Exception:
        what, other, one = next(each for each in zip(names, theirs, first, strict=True) if each[1] != each[2])
        return ValueError(
            f"{what}: rank {others[0]} has passed {other}, and rank 0 {one}. Pass the same on every rank"
        )

    ranks.check_equal(summaries, error)
