"""Optimizers of a checkpoint: their state by names of parameters, and the tensors into which it is read.

A checkpoint has state for the parameters that had some at the save. torch's functions make state by a step with zero
gradients, which would also give state to parameters that never had a gradient. This file lets them do so only where
tensors are needed to read into, and undoes it if the load fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from shardwright.checkpoint.format.nested import NestedState
from shardwright.checkpoint.load.checkpoints import Checkpoint, StoredForm
from shardwright.checkpoint.training.section_to_load import SectionToLoad, of_stored_form, targets_below
from shardwright.common.errors import Damaged, OtherOptimizer
from shardwright.engine import parameters_of, units_of, zero_gradient

OPTIMIZER = "optimizer"
_STATE, _GROUPS = "state", "param_groups"
_STORED_GROUPS = f"{OPTIMIZER}.{_GROUPS}"


def as_optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    """Return the optimizers of a model, of which a user may pass none, one or several.

    Raises:
        TypeError: something else.
    """
    if optimizer is None:
        return ()
    is_one = isinstance(optimizer, (Mapping, Optimizer)) or not isinstance(optimizer, Iterable)
    optimizers: tuple[Any, ...] = (optimizer,) if is_one else tuple(optimizer)  # type: ignore[arg-type]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            hint = (
                '. Pass a schedule in extra: extra={"schedule": schedule}'
                if hasattr(each, "state_dict")
                else ""
            )
            raise TypeError(
                f"optimizer: expected a torch.optim.Optimizer or several, got {type(each).__name__}{hint}"
            )
    return optimizers


def state_of_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the state that the optimizers have by now, under the names of parameters, and their groups.

    Raises:
        ValueError: a parameter of an optimizer is not in the model.
    """
    with _without_first_step(optimizers):
        try:
            state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizers))
        except KeyError:
            ours = set(map(id, model.parameters()))
            other = next((p for each in optimizers for p in parameters_of(each) if id(p) not in ours), None)
            if other is None:
                raise
            computing = next((unit for unit in units_of(model) if unit.managed(other) is not None), None)
            if computing is not None:
                raise RuntimeError(
                    f"unit {computing.name!r} computes at this moment, and its modules have full parameters, which are "
                    "not those of the optimizer. Save and load between steps, not inside a forward or a backward"
                ) from None
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(other.shape)} that the model does not have. Build the "
                "optimizer from this model's parameters"
            ) from None
    state[_STATE] = {name: each for name, each in state[_STATE].items() if each}
    return state


@contextlib.contextmanager
def _without_first_step(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Keep torch from stepping optimizers inside this context.

    torch's functions for state dicts step an optimizer that has no state, so that it gets some, unless one of its
    parameters has a gradient. So one parameter of each such optimizer has a zero gradient here.
    """
    marked = []
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        if not optimizer.state and parameters and all(p.grad is None for p in parameters):
            marked.append(min(parameters, key=Tensor.numel))
    try:
        for p in marked:
            p.grad = zero_gradient(p)
        yield
    finally:
        for p in marked:
            p.grad = None


def _owner(name: str, parameters: set[str]) -> str | None:
    """Return the parameter that a stored name such as ``layers.0.weight.exp_avg`` belongs to, or None.

    There is at most one, because no parameter's name begins with another's name and a dot.
    """
    end = len(name)
    while end > 0:
        if name[:end] in parameters:
            return name[:end]
        end = name.rfind(".", 0, end)
    return None


def _fresh_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return state for all parameters, which torch makes by a step with zero gradients.

    Gradients that wait for the user's own step stay as they are.
    """
    gradients = [(p, p.grad) for optimizer in optimizers for p in parameters_of(optimizer)]
    for optimizer in optimizers:
        optimizer.state.clear()
    try:
        for p, _ in gradients:
            p.grad = None
        return dict(get_optimizer_state_dict(model, optimizers))
    finally:
        for p, gradient in gradients:
            p.grad = gradient


# -- of a load ---------------------------------------------------------------------------------------------------------


@dataclass
class OptimizersToLoad(SectionToLoad):
    """The optimizers that a load restores, with the tensors to read into.

    Attributes:
        checkpoint, model, optimizers: what the load got from the user.
        settings: whether the groups get the stored settings, such as the learning rate; else they keep their own.
        state: the optimizers' state and groups. It has a tensor for each one that the checkpoint has, and no others.
        before: the state and groups that each optimizer had, if :meth:`prepare` replaced them; :meth:`undo` needs them.
    """

    key = OPTIMIZER
    checkpoint: Checkpoint
    model: nn.Module
    optimizers: Sequence[Optimizer]
    settings: bool
    state: dict[str, Any] = field(default_factory=dict, init=False)
    tensors: Mapping[str, Any] = field(default_factory=dict, init=False)
    before: list[tuple[dict[Any, Any], list[dict[str, Any]]]] = field(default_factory=list, init=False)

    def prepare(self) -> None:
        """Give the optimizers tensors for all stored state, by a step if they lack some.

        Raises:
            ValueError: a parameter is not in the model, or there is no memory for a stored tensor.
        """
        state = state_of_optimizers(self.model, self.optimizers)
        own = group_tensors(state[_GROUPS]) if self.settings else {}
        of_groups = targets_below(self.checkpoint, _STORED_GROUPS, of_stored_form(self.checkpoint, own))
        names = {name for group in state[_GROUPS] for name in group["params"]}
        stored = self.checkpoint.below(f"{OPTIMIZER}.{_STATE}")
        having = {owner for name in stored if (owner := _owner(name, names)) not in (None, name)}
        if not having <= state[_STATE].keys():
            self.before = [
                (dict(each.state), [dict(group) for group in each.param_groups]) for each in self.optimizers
            ]
            state = _fresh_state(self.model, self.optimizers)
        state[_STATE] = {name: each for name, each in state[_STATE].items() if name in having}
        self.state, self.tensors = state, {_STATE: state[_STATE], _GROUPS: of_groups}

    def check(self) -> None:
        self._check_state()
        stored = self.checkpoint.leaves.get(_STORED_GROUPS)
        if self.settings and stored is not None:
            check_groups(self.state[_GROUPS], stored)
        if isinstance(stored, list) and not self.checkpoint.below(f"{OPTIMIZER}.{_STATE}"):
            self._check_keys(stored)

    def _check_keys(self, stored: list[Any]) -> None:
        """Raise OtherOptimizer if the stored groups are those of another optimizer. For checkpoints without state.

        Then each side has a setting that the other lacks. If only one side has more, it is another version of the same
        optimizer.
        """
        theirs, mine = (
            {key for group in groups for key in group} for groups in (stored, self.state[_GROUPS])
        )
        if theirs - mine and mine - theirs:
            raise OtherOptimizer(
                f"{self.checkpoint.place}: expected the optimizer's settings {', '.join(sorted(mine - theirs))}, found "
                f"{', '.join(sorted(map(str, theirs - mine)))}; this is a checkpoint of another optimizer"
            )

    def _check_state(self) -> None:
        """Raise OtherOptimizer unless the stored state and that of the optimizers have the same names and shapes."""
        place, stored = self.checkpoint.place, self.checkpoint.below(f"{OPTIMIZER}.{_STATE}")
        for name, own in self.state[_STATE].items():
            for key, value in own.items():
                form = stored.get(f"{name}.{key}")
                is_there = form is not None or self.checkpoint.has(f"{OPTIMIZER}.{_STATE}.{name}.{key}")
                shape = list(value.shape) if isinstance(value, Tensor) else None
                stored_shape = list(form.shape) if isinstance(form, StoredForm) else None
                if is_there and shape == stored_shape:
                    continue
                found = (
                    "none"
                    if not is_there
                    else "no tensor"
                    if stored_shape is None
                    else f"shape {stored_shape}"
                )
                raise OtherOptimizer(
                    f"{place}: expected the optimizer's {key} of {name}, found {found}; this is a checkpoint of "
                    "another optimizer"
                )
        tensors = NestedState.of({OPTIMIZER: self.tensors}).tensors
        more = next(
            (
                name
                for name in self.checkpoint.tensors
                if name.startswith(f"{OPTIMIZER}.") and name not in tensors
            ),
            None,
        )
        if more is not None:
            raise OtherOptimizer(
                f"{place} has the tensor {more}, which this optimizer does not have; this is a checkpoint of another "
                "optimizer"
            )

    def accept(self, content: Mapping[str, Any]) -> None:
        groups = self.state[_GROUPS]
        if self.settings:
            check_groups(groups, stored_groups(content, groups))
        check_states(content.get(_STATE, {}), self.state)

    def restore(self, content: Mapping[str, Any]) -> None:
        """Give the optimizers the state that was read, and the stored settings of their groups."""
        groups = list(self.state[_GROUPS])
        if self.settings:
            stored = stored_groups(content, groups)
            groups = [{**_stored_group(mine, groups, stored), "params": mine["params"]} for mine in groups]
        state = _with_values(self.state[_STATE], content.get(_STATE, {}))
        for optimizer in self.optimizers:
            own = [groups.pop(0) for _ in optimizer.param_groups]
            names = {name for group in own for name in group["params"]}
            loaded: Any = {
                _STATE: {name: each for name, each in state.items() if name in names},
                _GROUPS: own,
            }
            with _without_first_step([optimizer]):
                set_optimizer_state_dict(
                    self.model, optimizer, loaded, options=StateDictOptions(strict=False)
                )

    def undo(self) -> None:
        for optimizer, (state, groups) in zip(self.optimizers, self.before, strict=False):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(settings)


# -- what a checkpoint has ---------------------------------------------------------------------------------------------


def group_tensors(groups: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Tensors among the settings of groups, such as rates, by the names that they have in a checkpoint."""
    tensors = NestedState.of({OPTIMIZER: {_GROUPS: list(groups)}}).tensors
    return {name: each.tensor for name, each in tensors.items()}


def check_groups(groups: Sequence[Mapping[str, Any]], stored: Any) -> None:
    """Raise ValueError unless the parameters of each group were in one group at the save, with settings that fit."""
    for number, mine in enumerate(groups):
        check_settings(_stored_group(mine, groups, stored), mine, f"optimizer.param_groups[{number}]")


def _stored_group(
    mine: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], stored: Any
) -> dict[str, Any]:
    if type(stored) is not list or not all(
        isinstance(each, dict) and type(each.get("params")) is list for each in stored
    ):
        raise Damaged("expected the groups of an optimizer, each with its parameters")
    names = mine["params"]
    if not names:
        same = [each for each in stored if not each["params"]] if len(stored) == len(groups) else []
        return same[0] if len(same) == 1 else dict(mine)
    homes = {number for name in names for number, each in enumerate(stored) if name in each["params"]}
    missing = next((name for name in names if not any(name in each["params"] for each in stored)), None)
    if missing is not None:
        raise ValueError(f"{missing} is a parameter of this optimizer, and of no optimizer in the checkpoint")
    if len(homes) > 1:
        raise ValueError(
            f"a group of this optimizer has parameters of {len(homes)} groups of the checkpoint, such as {names[0]}. "
            "Build the optimizer with the groups of the save"
        )
    return stored[homes.pop()]  # type: ignore[no-any-return]


def stored_groups(content: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Any:
    """Return the groups of a checkpoint: as a list, or by parameters as torch's flat form has them."""
    if _GROUPS in content:
        return content[_GROUPS]
    flat: list[dict[str, Any]] = []
    for mine in groups:
        found = {}
        for name in mine["params"][:1]:
            start = f"{_GROUPS}.{name}."
            found = {key.removeprefix(start): each for key, each in content.items() if key.startswith(start)}
        flat.append({**mine, **found})
    return flat


def _with_values(state: Any, content: Any) -> Any:
    """Return the tensors of ``state``, and the values of ``content`` at the same places."""
    if isinstance(state, Mapping) and isinstance(content, Mapping):
        return {
            key: _with_values(each, content[key]) if key in content else each for key, each in state.items()
        }
    return state if isinstance(state, Tensor) else content


# -- checks of stored values -------------------------------------------------------------------------------------------


def check_states(stored: Any, mine: Mapping[str, Any]) -> None:
    """Compare the stored states of parameters with those of the optimizer that gets them.

    Args:
        stored: values and tensors by the parameter's name and their key.
        mine: ``state`` of the same form, and ``param_groups``.

    Raises:
        Damaged: they are of another kind, or of no parameter of the optimizer.
    """
    names = {name for group in mine["param_groups"] for name in group["params"]}
    for name, values in _same(stored, dict, "optimizer.state").items():
        if name not in mine["state"]:
            if name in names:  # another rank has its state
                continue
            raise Damaged(f"optimizer.state has {name!r:.200}, which this optimizer does not have")
        for key, value in _same(values, dict, f"optimizer.state.{name}").items():
            if key in mine["state"][name]:
                _check_kind(value, mine["state"][name][key], f"optimizer.state.{name}.{key}")


def check_settings(stored: Mapping[Any, Any], mine: Mapping[str, Any], name: str) -> None:
    """Compare the stored settings of a group of parameters with those of the group that gets them.

    Raises:
        Damaged: they are of another kind. The message has ``name``.
    """
    for key, value in stored.items():
        if not isinstance(key, str):
            raise Damaged(f"{name} has a key that is no name")
        if key != "params" and key in mine:
            _check_kind(value, mine[key], f"{name}.{key}")


def _same(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise Damaged(f"expected {name} as {kind.__name__}, found {type(value).__name__}")
    return value


def _check_kind(value: Any, own: Any, name: str) -> None:
    """Numbers may stand for one another, and anything for nothing."""
    if own is None or value is None or isinstance(own, Tensor):
        fits = isinstance(value, (bool, int, float, str, Tensor)) or value is None or own is None
    elif isinstance(own, (bool, int, float)):
        fits = isinstance(value, (bool, int, float, Tensor))
    elif isinstance(own, list):  # such as the names of a group's parameters
        fits = isinstance(value, (list, tuple))
    elif isinstance(own, tuple):
        fits = isinstance(value, (list, tuple)) and len(value) == len(own)
        if fits:
            for number, (each, mine) in enumerate(zip(value, own, strict=False)):
                _check_kind(each, mine, f"{name}[{number}]")
    else:
        fits = isinstance(value, type(own)) or not isinstance(own, (str, dict))
    if not fits:
        raise Damaged(f"{name} is {type(value).__name__}, expected {type(own).__name__}")
