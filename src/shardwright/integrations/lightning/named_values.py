"""The values of a state, the dict of models, optimizers and others that ``fabric.save`` and ``fabric.load`` take.

Each key has a :class:`NamedValue`, which knows what is saved of it, which stored content fits it, and how it is
restored. ``checkpoints.py`` writes and reads them. Nothing here opens a file or imports ``lightning``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.checkpoint import StoredForm, abbreviated
from shardwright.engine import FSDPModule, RaggedTensor, RankGroup, companion_of, unit_of
from shardwright.integrations.lightning.models import Forward
from shardwright.optim import ShardedCompanion, mapped

VALUE = "value"  #: the kind of what is neither model nor optimizer


@dataclass
class NamedValue:
    """A value that a state has under one key. This class is for values that are neither models nor optimizers.

    A value with ``state_dict`` and ``load_state_dict`` is saved and restored by them, another is replaced.
    """

    kind: ClassVar[str] = VALUE
    key: str
    value: Any
    _own: Any = field(default=None, init=False)  #: its present state, while it is restored

    @property
    def _has_state(self) -> bool:
        return all(callable(getattr(self.value, name, None)) for name in ("state_dict", "load_state_dict"))

    def to_save(self) -> Any:
        """Return what a folder stores."""
        return self.value.state_dict() if self._has_state else self.value

    def as_unsharded(self) -> Any:
        """Return what one file stores, as an unsharded run saves it."""
        return self.to_save()

    def fitting(self, path: Path, stored: Any, strict: bool) -> Any:
        """Return the part of ``stored`` to restore, whose tensors are :class:`StoredForm`, or raise if it does not fit.

        Raises:
            ValueError: it is no optimizer's state, or that of another optimizer.
            RuntimeError: lists all that a model misses, does not have, or has in another shape.
        """
        self._own = self.to_save()
        return stored

    def target(self, form: StoredForm, keys: tuple[Any, ...]) -> Tensor:
        """Return a tensor to read a stored one into: a new one that is cut as the DTensor at ``keys`` of this value, or
        whole on the host."""
        own = self._own
        for key in keys:
            try:
                own = own[key]
            except (LookupError, TypeError):
                own = None
        if isinstance(own, DTensor) and tuple(own.shape) == form.shape and own.dtype == form.dtype:
            return own.detach().clone()
        return torch.empty(form.shape, dtype=form.dtype)

    def restore(self, stored: Any, strict: bool) -> Any:
        """Restore the value in place if it can be, and return it or the one that replaces it."""
        if not self._has_state:
            return stored
        self.value.load_state_dict(stored)
        return self.value


@dataclass
class NamedModel(NamedValue):
    """A model of a state, which ``fabric.setup`` has returned or ``fully_shard`` has sharded."""

    kind: ClassVar[str] = "model"

    def __post_init__(self) -> None:
        if not isinstance(self.module, FSDPModule):
            raise TypeError(
                f"state[{self.key!r}] is a {type(self.module).__name__} that is not sharded, so each rank would save a "
                "different one. Set it up first (model = fabric.setup(model)), or pass its state_dict()."
            )

    @property
    def module(self) -> nn.Module:
        """The model itself, without the module that Fabric calls."""
        return self.value.module if isinstance(self.value, Forward) else self.value

    def to_save(self) -> Any:
        return self.module.state_dict()

    def fitting(self, path: Path, stored: Any, strict: bool) -> Any:
        stored = stored if isinstance(stored, Mapping) else {"": stored}
        mine = self._own = self.to_save()
        problems = []
        if strict and (missing := [name for name in mine if name not in stored]):
            problems.append(f"missing in the checkpoint: {_quoted(missing)}")
        if strict and (unexpected := [name for name in stored if name not in mine]):
            problems.append(f"unexpected in the checkpoint: {_quoted(unexpected)}")
        for name, value in mine.items():
            each = stored.get(name)
            shape = each.shape if isinstance(each, StoredForm) else "no tensor"
            if isinstance(value, Tensor) and name in stored and shape != tuple(value.shape):
                problems.append(f"{name!r} is {tuple(value.shape)} here and {shape} in the checkpoint")
        if problems:
            raise RuntimeError(
                f"The checkpoint {path} does not fit state[{self.key!r}]: {'; '.join(problems)}."
            )
        return {name: stored[name] for name in mine if name in stored}

    def target(self, form: StoredForm, keys: tuple[Any, ...]) -> Tensor:
        own = self._own[keys[0]]
        return own if isinstance(own, Tensor) else torch.empty(form.shape, dtype=form.dtype)

    def restore(self, stored: Any, strict: bool) -> Any:
        self.module.load_state_dict(stored, strict=strict)
        return self.value


@dataclass
class NamedOptimizer(NamedValue):
    """An optimizer of a state, whose parameters belong to models of the state.

    Attributes:
        models: the models of the state.
        names: the names of its parameters, by group. Those of several models have the model's key in front.
    """

    kind: ClassVar[str] = "optimizer"
    models: dict[str, nn.Module]
    names: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        owners = {
            id(p): (m, name) for m, model in self.models.items() for name, p in model.named_parameters()
        }
        for p in self.parameters:
            if id(p) not in owners:
                raise ValueError(
                    f"state[{self.key!r}] is a {type(self.value).__name__} with a parameter of shape {tuple(p.shape)} "
                    "that no model in the state has. Add its model to the state, and set up model and optimizer first."
                )
        several = len({owners[id(p)][0] for p in self.parameters}) > 1
        self.names = [
            [".".join(owners[id(p)]) if several else owners[id(p)][1] for p in group["params"]]
            for group in self.value.param_groups
        ]

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.value.param_groups for p in group["params"]]

    @property
    def _flat_names(self) -> list[str]:
        return [name for group in self.names for name in group]

    def to_save(self) -> Any:
        """Return its state dict with names for the numbers of parameters, which depend on how it was made."""
        state, names = self.value.state_dict(), self._flat_names
        return {
            "state": {names[number]: values for number, values in state["state"].items()},
            "param_groups": [
                {**group, "params": list(here)}
                for group, here in zip(state["param_groups"], self.names, strict=True)
            ],
        }

    def as_unsharded(self) -> Any:
        return self.value.state_dict()

    def fitting(self, path: Path, stored: Any, strict: bool) -> Any:
        self._by_number(stored)
        return stored

    def _by_number(self, stored: Any) -> dict[str, Any]:
        """Return a stored state dict with the numbers of parameters here.

        Raises:
            ValueError: it is not of an optimizer with the same parameters in the same groups.
        """
        try:
            theirs = [list(group["params"]) for group in stored["param_groups"]]
            state = dict(stored.get("state", {}))  # before its first step an optimizer has none
        except (TypeError, ValueError, LookupError, AttributeError):
            raise ValueError(
                f"The value stored as {self.key!r} is not the state dict of an optimizer."
            ) from None
        mine, sizes = [len(group) for group in self.names], [len(group) for group in theirs]
        if mine != sizes:
            raise ValueError(
                f"Optimizer {self.key!r} has groups of {mine} parameters, the stored optimizer has groups of {sizes}. "
                "Build the optimizer with the same groups as at the save."
            )
        number = {name: i for i, name in enumerate(self._flat_names)}
        numbers: dict[str | int, int] = {}  #: by the parameter as the stored state calls it
        for group, here in zip(theirs, self.names, strict=True):
            by_name = all(isinstance(each, str) for each in group)
            if by_name and (other := set(group) ^ set(here)):
                raise ValueError(
                    f"Optimizer {self.key!r} was saved with other parameters in a group: "
                    f"{_quoted(sorted(other))}. Build the optimizer with the same groups as at the save."
                )
            order = group if by_name else here
            numbers.update({each: number[name] for each, name in zip(group, order, strict=True)})
        parameters = self.parameters
        for each, values in state.items():
            if each not in numbers:
                raise ValueError(
                    f"The value stored as {self.key!r} has the state of a parameter {each!r} that is in none of its "
                    "groups."
                )
            self._check_shapes(each, parameters[numbers[each]], values)
        return {
            "state": {numbers[each]: values for each, values in state.items()},
            "param_groups": [
                {**group, "params": [number[name] for name in here]}
                for group, here in zip(stored["param_groups"], self.names, strict=True)
            ],
        }

    def _check_shapes(self, name: str | int, p: Tensor, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"The state of parameter {name!r} that is stored as {self.key!r} is no dict.")
        companion = companion_of(self.value)
        whole = companion.whole if isinstance(companion, ShardedCompanion) else ()
        if p in whole or hasattr(self.value, "state_per_block"):
            return
        for what, value in values.items():
            shape = getattr(value, "shape", ())  # of a tensor, or of one in the checkpoint
            if shape and tuple(shape) != tuple(p.shape):
                raise ValueError(
                    f"The stored {what!r} of optimizer {self.key!r} for parameter {name!r} has shape {tuple(shape)}, "
                    f"but the parameter has shape {tuple(p.shape)}. It was saved for another model, or with "
                    "parameters in another order."
                )

    def target(self, form: StoredForm, keys: tuple[Any, ...]) -> Tensor:
        """Return a tensor to read a stored one into. One of a parameter's shape is cut as the parameter is."""
        parameters = dict(zip(self._flat_names, self.parameters, strict=True))
        p = parameters.get(keys[1]) if keys[0] == "state" and len(keys) > 1 else None
        unit = unit_of(p) if p is not None else None
        if p is None or unit is None or not form.shape or form.shape != tuple(p.shape):
            return torch.empty(form.shape, dtype=form.dtype)
        managed = unit.managed(p)
        return _as_dtensor(managed.cut.wrap(torch.empty_like(managed.local, dtype=form.dtype)))

    def restore(self, stored: Any, strict: bool) -> Any:
        by_number, parameters = self._by_number(stored), self.parameters
        by_number["state"] = {
            number: mapped(values, partial(_placed, p=parameters[number]))
            for number, values in by_number["state"].items()
        }
        self.value.load_state_dict(by_number)
        return self.value


def _placed(value: Any, p: Tensor) -> Any:
    """Return this rank's part of a whole tensor of the parameter's shape, and other tensors in memory of their own."""
    if not isinstance(value, Tensor) or isinstance(value, (DTensor, RaggedTensor)):
        return value
    unit = unit_of(p)
    if unit is None or not value.ndim or value.shape != p.shape:
        return value.clone()
    cut = unit.managed(p).cut
    return _as_dtensor(cut.wrap(cut.part_of(value).to(p.device).clone(memory_format=torch.contiguous_format)))


def _as_dtensor(value: Any) -> Any:
    return value.as_dtensor() if isinstance(value, RaggedTensor) else value


def _quoted(names: list[str]) -> str:
    return abbreviated(list(map(repr, names)), 10)


def agreed_values(state: Mapping[str, Any], ranks: RankGroup) -> dict[str, NamedValue]:
    """Return what a state has: models first, then optimizers, then other values. Every rank must call it.

    Raises:
        TypeError: on every rank: a module is not sharded.
        ValueError: on every rank: there is no model, an optimizer's parameters are in none, or ranks have other keys.
    """
    things: dict[str, NamedValue] = {}

    def kinds() -> dict[str, str]:
        things.update(_named_values(state))
        return {key: thing.kind for key, thing in things.items()}

    def error(others: list[int], theirs: dict[str, str], first: dict[str, str]) -> Exception:
        keys = sorted(theirs.keys() | first.keys(), key=str)
        key = next(key for key in keys if theirs.get(key) != first.get(key))
        return ValueError(
            f"state[{key!r}] is {_kind_in_words(theirs, key)} on rank {others[0]} and {_kind_in_words(first, key)} on "
            "rank 0. Pass a state with the same keys on every rank."
        )

    ranks.check_equal(ranks.run_on_all(kinds), error)
    return things


def _named_values(state: Mapping[str, Any]) -> dict[str, NamedValue]:
    models = {key: NamedModel(key, each) for key, each in state.items() if isinstance(each, nn.Module)}
    if not models:
        raise ValueError(
            f"The state has no model, only {', '.join(map(repr, state)) or 'nothing'}. Add the model that "
            "fabric.setup returned: state={'model': model, ...}."
        )
    modules = {key: model.module for key, model in models.items()}
    optimizers = {
        key: NamedOptimizer(key, each, modules) for key, each in state.items() if isinstance(each, Optimizer)
    }
    found: dict[str, NamedValue] = {**models, **optimizers}
    return {**found, **{key: NamedValue(key, each) for key, each in state.items() if key not in found}}


def _kind_in_words(kinds: Mapping[str, str], key: str) -> str:
    return {"model": "a model", "optimizer": "an optimizer", VALUE: "a value"}.get(
        kinds.get(key, ""), "missing"
    )
