"""Optimizers over sharded parameters: inside ``step`` plain local tensors stand in for the DTensors.

``param_groups`` and ``state`` hold DTensors between steps, as checkpoints expect. The arithmetic of a step never sees
them, because dispatch through DTensor takes several times as long as the step itself. ``whole`` steps the parameters
that an optimizer needs whole.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from shardwright.engine import (
    COMPANION,
    COUNTS_STEPS,
    TAKEN,
    Managed,
    RaggedTensor,
    Unit,
    before_optimizer_step,
    companion_of,
    count_of_objects,
    count_step,
    unit_of,
)
from shardwright.engine.compat import (
    local_of,
    only_schedulers_wrap,
    seen_by_schedulers,
    step_without_hooks,
    tell_schedulers,
    uncompiled,
)
from shardwright.init import value_of
from shardwright.optim.companion import ShardedCompanion, sharded_companion
from shardwright.optim.cuts import block_spec
from shardwright.optim.host_state import (
    HostState,
    host_of_state,
    kept_from_device,
    loaded,
    moved_to_host,
)
from shardwright.optim.in_calls import step_in_calls
from shardwright.optim.kept import prepared
from shardwright.optim.needs import Need, Needs, check, cost_of, name_of, needs_of
from shardwright.optim.stand_ins import SHARDED, LocalStandIn, ragged_spec
from shardwright.optim.whole.state import host_of_whole, mapped
from shardwright.optim.whole.step import Owners
from shardwright.optim.whole.updates import updates_of

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def fully_shard_optimizer(optimizer: O, *, needs: Needs | None = None) -> O:
    """Let a torch optimizer step on local shards, in place, and return it.

        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    The results equal those of the optimizer on the whole, unsharded tensors. If the optimizer updates single elements
    or blocks, each rank steps its shards. If it needs a tensor whole, one rank steps the tensor: its owner, which also
    keeps its state. Gradients and values move to the owner and back while other tensors are computed. Every rank must
    call ``step``, with gradients of the same parameters.

    State dicts, parameter groups, schedulers and hooks work as before, except that step hooks see local tensors.
    Schedulers may be built before this call or after it. If a step on whole tensors raises, every rank raises. A second
    call follows parameters that ``fully_shard`` or ``materialize`` has replaced since, and else does nothing.

    Args:
        optimizer: built on the parameters of a sharded model. If it was built before ``fully_shard`` (on parameters
            that were deferred, on the meta device or whole), its groups and its state now refer to the sharded
            parameters. Groups may also have plain parameters.
        needs: the pieces of a parameter that the optimizer needs whole: 1 for single elements, n for blocks of n
            consecutive elements in row-major order from the tensor's first, "tensor" for the whole tensor. Or a
            function of the parameter that returns one of these. Not needed for torch's optimizers and for optimizers
            with a method ``shard_needs(self, p)``, which is such a function.

    Raises:
        TypeError: not a torch optimizer, or ``needs`` is none of these.
        ValueError: none of its parameters belongs to a sharded model; the optimizer is unknown; something other than a
            scheduler has replaced its ``step``; it has state on the meta device; an earlier call had other ``needs``;
            or a layout cuts a block that must stay whole, for which ``add_param_group`` raises an error, too.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"fully_shard_optimizer expects a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    sharded_already = isinstance(optimizer, _ShardedStep)
    if sharded_already:
        _refuse_other_needs(optimizer, needs)
        companion = sharded_companion(optimizer)
        if companion.objects == count_of_objects() and not _became(optimizer):
            return optimizer
    else:
        companion = ShardedCompanion(
            needs_of(optimizer, needs), updates_of(optimizer), companion_of(optimizer).stepped
        )
    if "step" in vars(optimizer) and not sharded_already and not only_schedulers_wrap(optimizer):
        raise ValueError(
            f"{getattr(vars(optimizer)['step'], '__qualname__', vars(optimizer)['step'])} has already replaced the "
            f"step of this {type(optimizer).__name__}, so the step for shards would never run. Call "
            "fully_shard_optimizer first, and replace or wrap the step after that."
        )
    became = _became(optimizer)
    groups = [[became.get(p, p) for p in group["params"]] for group in optimizer.param_groups]
    if not any(isinstance(p, SHARDED) for params in groups for p in params):
        raise ValueError(
            f"None of the {sum(map(len, groups))} parameters of this {type(optimizer).__name__} belongs to a sharded "
            "model, so its step would not train one. Build the optimizer from model.parameters() of the model that "
            "fully_shard got, and call fully_shard before fully_shard_optimizer."
        )
    with _parameters_in_groups(optimizer, groups):
        _take_up(optimizer, companion, optimizer.param_groups)
    _follow(optimizer, groups, became, companion.whole)
    _move_to_host(optimizer, companion)
    companion.objects = count_of_objects()
    if isinstance(optimizer, _ShardedStep):
        optimizer._followed()
        return optimizer  # type: ignore[return-value]
    optimizer.__dict__[COMPANION] = companion
    vars(optimizer).pop("step", None)  # a scheduler's wrapper; the class's own step replaces it
    optimizer.__class__ = _sharded_class(type(optimizer))  # type: ignore[arg-type]
    optimizer.register_state_dict_post_hook(_state_as_dtensors)
    optimizer.register_load_state_dict_post_hook(_state_as_ragged)
    return optimizer


def _refuse_other_needs(optimizer: Optimizer, needs: Needs | None) -> None:
    """Refuse a second call with ``needs`` that differ from those of the first one, for any parameter."""
    if needs is None:
        return
    before, now = sharded_companion(optimizer).needs, needs_of(optimizer, needs)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if now(p) != before(p):
            raise ValueError(
                f"needs: expected {before(p)!r} for parameter {name_of(p)}, as in the first call for this "
                f"{type(optimizer).__name__}, got {now(p)!r}. The state of the optimizer is already cut for it: leave "
                "needs out, or build a new optimizer."
            )


def _became(optimizer: Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Return which parameters of the optimizer are out of date, each with the sharded parameter of now.

    A parameter is out of date if ``fully_shard`` has replaced the object, or if its state is not cut as it is.
    """
    became: dict[torch.Tensor, torch.Tensor] = {}
    whole = sharded_companion(optimizer).whole if isinstance(optimizer, _ShardedStep) else ()
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        now = p
        while (origin := now.__dict__.get(TAKEN)) is not None and not isinstance(now, Managed):
            now = origin.sharded
        state = optimizer.state.get(p, {}) if isinstance(now, Managed) and now not in whole else {}
        tensors = {
            k: v for k, v in state.items() if isinstance(v, torch.Tensor) and not isinstance(v, SHARDED)
        }
        if now is not p or any(value.ndim for value in tensors.values()):
            became[p] = now
            for key, value in tensors.items():
                if value.is_meta:
                    raise ValueError(
                        f"Optimizer state {key!r} of parameter {name_of(now)!r} is on the meta device, so it has no "
                        "values. Build the optimizer after materialize, or the model under deferred_init."
                    )
    return became


@contextmanager
def _parameters_in_groups(optimizer: Optimizer, groups: list[list[torch.Tensor]]) -> Iterator[None]:
    """Put other parameters into the groups inside this context.

    ``shard_needs`` and ``shard_updates`` of some classes look for a parameter in the groups.
    """
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


@torch.no_grad()
def _follow(
    optimizer: Any,
    groups: list[list[torch.Tensor]],
    became: dict[torch.Tensor, torch.Tensor],
    whole: set[torch.Tensor],
) -> None:
    """Put the new parameters into groups and state.

    State of a parameter's shape is cut as the parameter is; that of parameters in ``whole`` stays whole.
    """
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value_of(value) for key, value in group.items()}, params=params)
    for state in optimizer.state.values():
        state.update({key: value_of(value) for key, value in state.items()})
    for old, new in became.items():
        if old not in optimizer.state:
            continue
        state = optimizer.state.pop(old)
        unit = unit_of(new)
        for key, value in state.items():
            if new not in whole and isinstance(value, torch.Tensor) and unit is not None:
                spec = ragged_spec(optimizer, new, key, value, new.shape)  # type: ignore[arg-type]
                if spec is not None:
                    value = RaggedTensor.from_full(value, spec)
                elif value.ndim and value.shape == new.shape:
                    cut = unit.managed(new).cut
                    value = cut.wrap(cut.part_of(value).clone(memory_format=torch.contiguous_format))
            optimizer.state[new][key] = value


def _take_up(optimizer: Any, companion: ShardedCompanion, groups: list[dict[str, Any]]) -> None:
    """Check the parameters of groups, and choose where they are stepped and where their state is."""
    needs_of_parameters = check(groups, companion.needs)
    _check_state_per_block(optimizer, needs_of_parameters)
    _choose_owners(companion, needs_of_parameters, cost_of(optimizer))
    _choose_places(companion, needs_of_parameters)


def _check_state_per_block(optimizer: Any, needs_of_parameters: list[tuple[str, torch.Tensor, Need]]) -> None:
    for name, p, block in needs_of_parameters if hasattr(optimizer, "state_per_block") else ():
        if isinstance(p, SHARDED) and block != "tensor" and block > 1:
            try:
                block_spec(p, block)
            except ValueError as error:
                raise ValueError(f"Parameter {name!r}: {error}") from None


def _choose_owners(
    companion: ShardedCompanion,
    needs_of_parameters: list[tuple[str, torch.Tensor, Need]],
    cost: Callable[[torch.Tensor], float],
) -> None:
    """Choose the rank that will step each parameter that the optimizer needs whole and that has no owner yet."""
    by_mesh: dict[Any, list[Any]] = {}
    for name, p, need in needs_of_parameters:
        # A second owner would step the parameter again, with the gradient that the first owner has moved.
        if need == "tensor" and isinstance(p, SHARDED) and p not in companion.whole:
            by_mesh.setdefault(p.device_mesh, []).append((name, p, cost(p), companion.updates(p)))
    owners_by_mesh = companion.owners
    chosen = {mesh: owners_by_mesh.get(mesh) or Owners(mesh) for mesh in by_mesh}
    for mesh, entries in by_mesh.items():
        chosen[mesh].check(entries)
    owners_by_mesh.update(chosen)
    for mesh, entries in by_mesh.items():
        owners_by_mesh[mesh].add(entries)
        companion.whole.update(p for _, p, *_ in entries)


def _choose_places(
    companion: ShardedCompanion, needs_of_parameters: list[tuple[str, torch.Tensor, Need]]
) -> None:
    """Make what carries state to the device and back, if any parameter's state is stored on the host."""
    if companion.host_state is None:
        whole = companion.whole
        passes = any(
            (host_of_whole(p) if p in whole else host_of_state(p)) is not None
            for _, p, _ in needs_of_parameters
        )
        companion.host_state = HostState() if passes else None


def _move_to_host(optimizer: Optimizer, companion: ShardedCompanion) -> None:
    """Move the state that is there to the host, for parameters whose state is stored there between steps."""
    if companion.host_state is not None:
        for p, values in optimizer.state.items():
            host = host_of_state(p) if isinstance(p, torch.Tensor) else None
            if host is not None:
                values.update(moved_to_host(values, host))


def _state_as_dtensors(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Put state of ragged parameters into a state dict as DTensors, which torch's state-dict functions gather."""
    state["state"] = mapped(
        dict(state["state"]), lambda v: v.as_dtensor() if isinstance(v, RaggedTensor) else v
    )
    return state


def _state_as_ragged(optimizer: Optimizer) -> None:
    companion = sharded_companion(optimizer)
    if companion.host_state is not None:
        for p, values in optimizer.state.items():
            if isinstance(p, torch.Tensor):
                values.update(loaded(values, p))
    for owners in companion.owners.values():
        owners.settle(optimizer.state)
    for p, values in optimizer.state.items():
        if isinstance(p, SHARDED) and p not in companion.whole:
            for key, value in values.items():
                spec = ragged_spec(optimizer, p, key, value, p.shape)
                if spec is not None:
                    values[key] = RaggedTensor.from_full(value, spec)
    _move_to_host(optimizer, companion)


#: What a step puts back at its end: the parameters of each group, the state, and each parameter with its stand-in.
_Outside = tuple[list[list[Any]], Any, list[tuple[Any, LocalStandIn | None]]]


class _ShardedStep:
    """A mixin in front of an optimizer's class; see :func:`fully_shard_optimizer`."""

    calls_another_step = True
    param_groups: list[dict[str, Any]]
    state: Any

    def _followed(self) -> None:
        """Do what a subclass needs after parameters have replaced others in the groups."""

    @torch.no_grad()
    def _enter(self) -> tuple[_Outside, tuple[list[list[torch.Tensor]], Any]]:
        """Prepare a step on local tensors, and change neither groups nor state yet.

        A model has thousands of parameters, so this is one loop over them.

        Returns:
            The arguments of :meth:`_leave`, which ends the step: the groups' parameters and the state of now, and each
            parameter with its stand-in, if it has one. Then those of :meth:`_put_in`, which begins it: the local
            tensors of each group, and their state.
        """
        companion = sharded_companion(self)
        stand_ins, whole = companion.stand_ins, companion.whole
        outer = self.__dict__.get("state", companion.hidden_state)
        inner: Any = defaultdict(dict)
        groups = [group["params"] for group in self.param_groups]
        locals_: list[list[torch.Tensor]] = []
        entered: list[tuple[Any, LocalStandIn | None]] = []
        for owners in companion.owners.values():
            owners.settle(outer)
        try:
            for params in groups:
                locals_.append([])
                for p in params:
                    stand_in = stand_ins.get(p)
                    if stand_in is None and not isinstance(p, SHARDED):
                        entered.append((p, None))
                        locals_[-1].append(p)
                        if p in outer:
                            inner[p] = outer[p]
                        continue
                    local = local_of(p)
                    if stand_in is None or stand_in.local is not local:
                        stand_in = stand_ins[p] = LocalStandIn(local, p)
                    entered.append((p, stand_in))
                    locals_[-1].append(local)
                    gradient = p.grad
                    if gradient is not None:
                        if gradient.dtype != local.dtype:
                            local.grad_dtype = gradient.dtype
                        local.grad = local_of(gradient) if isinstance(gradient, SHARDED) else gradient
                    else:
                        local.grad = None
                    if whole and p in whole:  # a tensor's hash is a call of Python code
                        continue
                    state = outer.get(p)
                    if state:
                        stand_in.refresh(state, p, self)  # type: ignore[arg-type]
                        inner[local] = stand_in.inner
                    else:
                        stand_in.clear()
        except BaseException:  # a stand-in has another shape or dtype, or state of another form
            for _, stand_in in entered:
                if stand_in is not None:
                    stand_in.local.grad = None
            raise
        return (groups, outer, entered), (locals_, inner)

    def _put_in(self, locals_: list[list[torch.Tensor]], inner: Any) -> None:
        """Give the optimizer the stand-ins and their state, until :meth:`_leave`."""
        for group, params in zip(self.param_groups, locals_, strict=True):
            group["params"] = params
        self.state = inner

    @torch.no_grad()
    def _leave(
        self, groups: list[list[Any]], outer: Any, entered: list[tuple[Any, LocalStandIn | None]]
    ) -> None:
        companion = sharded_companion(self)
        whole = companion.whole
        inner, self.state = self.state, outer
        for group, params in zip(self.param_groups, groups, strict=True):
            group["params"] = params
        for p, stand_in in entered:
            if stand_in is None:
                if p in inner:
                    outer[p] = inner[p]
                continue
            stand_in.local.grad = None
            state = None if whole and p in whole else inner.get(stand_in.local)
            if state is not None:
                stand_in.inner = state
                stand_in.publish(outer, p, self)  # type: ignore[arg-type]
        if whole:
            # Owners got their state first, but gathering a state dict follows its order, which must be equal on all
            # ranks.
            ordered = {p: outer[p] for params in groups for p in params if p in outer} | outer
            if list(map(id, ordered)) != list(map(id, outer)):
                outer.clear()
                outer.update(ordered)
        if companion.host_state is not None:
            del self.__dict__["state"]
            companion.hidden_state = outer

    def _finish_leaving(self) -> None:
        """Put the parameters back if the step before could not.

        An exception, such as one of a signal's handler, may come just while a step puts them back.
        """
        companion = sharded_companion(self)
        if companion.unfinished is not None:
            self._leave(*companion.unfinished)
            companion.unfinished = None

    def __getattr__(self, name: str) -> Any:
        """Return ``state`` after waiting for its copies to the host, if any still run."""
        companion = self.__dict__.get(COMPANION)
        if name == "state" and isinstance(companion, ShardedCompanion) and companion.hidden_state is not None:
            assert companion.host_state is not None
            companion.host_state.host_wait()
            self.state, companion.hidden_state = companion.hidden_state, None
            return self.state
        inherited = getattr(super(), "__getattr__", None)
        if inherited is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return inherited(name)

    @contextmanager
    def _on_device(self, unit: Unit) -> Iterator[None]:
        """Have the state of this unit's parameters on the device inside this context, for a step of them."""
        host = unit.state_host
        if host is None:
            yield
            return
        host_state = sharded_companion(self).host_state
        assert host_state is not None
        inner = self.state
        with host_state.on_device(unit, host, inner) as self.state:
            try:
                yield
            finally:
                self.state = inner

    def _send_state(self, unit: Unit, params: list[torch.Tensor]) -> None:
        """Begin to copy the state of the unit's ``params`` to the device, because they will be stepped soon."""
        host = unit.state_host
        if host is not None:
            companion = sharded_companion(self)
            assert companion.host_state is not None
            stand_ins = companion.stand_ins
            companion.host_state.send(unit, host, [stand_ins[p].inner for p in params if p in stand_ins])

    def _settle_state(self) -> None:
        """Release the device's memory for state, because no further unit is stepped for now."""
        host_state = sharded_companion(self).host_state
        if host_state is not None:
            host_state.settle()

    @uncompiled  # a tracer cannot follow the exchange of parameters
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        tell_schedulers(self)  # type: ignore[arg-type]
        loss = None
        if closure is not None:
            # A closure runs forward and backward, which need the sharded parameters. So it runs before the stand-ins.
            with torch.enable_grad():
                loss = closure()
        companion = sharded_companion(self)
        self._finish_leaving()
        if companion.objects != count_of_objects():  # parameters may have been sharded since
            fully_shard_optimizer(self)  # type: ignore[type-var]
        roots = before_optimizer_step(self)  # type: ignore[arg-type]
        outside, inside = self._enter()
        groups, outer, _ = outside
        companion.unfinished = outside
        try:  # from here on an exception, as of a signal's handler, puts the parameters back
            self._put_in(*inside)
            if companion.whole or companion.host_state is not None:
                # Hooks of the step run once, although the optimizer's own code runs several times.
                plain_step = step_without_hooks(_kind_of(self))
                step = Optimizer.profile_hook_step(lambda me: step_in_calls(me, plain_step, groups, outer))  # type: ignore[attr-defined]
                step(self)
            else:
                super().step()  # type: ignore[misc]
        finally:
            self._leave(*outside)
            companion.unfinished = None
        count_step(roots)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the wrapped step runs the hooks; torch must not add them twice
    seen_by_schedulers(step)
    vars()[COUNTS_STEPS] = True  # torch's own hooks run while stand-ins are in place

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        before = len(self.param_groups)
        super().add_param_group(param_group)  # type: ignore[misc]
        try:
            _take_up(self, sharded_companion(self), self.param_groups[before:])
        except BaseException:
            del self.param_groups[before:]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._finish_leaving()
        if sharded_companion(self).host_state is None or _loads_itself(_kind_of(self)):
            super().load_state_dict(state_dict)  # type: ignore[misc]
        else:
            with prepared(self, kept_from_device):  # type: ignore[arg-type]
                super().load_state_dict(state_dict)  # type: ignore[misc]
        self._keep_gradient_dtypes(state_dict)

    def _keep_gradient_dtypes(self, state_dict: dict[str, Any]) -> None:
        """Give loaded state its stored dtype back where that is the dtype of the gradients.

        torch's ``load_state_dict`` casts state to the dtype of the parameter, which may be another one.
        """
        for group, theirs in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for p, number in zip(group["params"], theirs["params"], strict=False):
                dtype = getattr(p, "grad_dtype", None)
                if dtype in (None, p.dtype):
                    continue
                state = self.state.get(p, {})
                for key, value in state_dict["state"].get(number, {}).items():
                    if getattr(value, "dtype", None) == dtype and isinstance(state.get(key), torch.Tensor):
                        state[key] = state[key].to(dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._finish_leaving()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        parameters = [p for group in self.param_groups for p in group["params"]]
        among = {id(p) for p in parameters}
        for unit in {id(u): u for p in parameters if (u := unit_of(p)) is not None}.values():
            unit.gradients.forget(among)


def _loads_itself(kind: type) -> bool:
    """Return whether the class defines its own ``load_state_dict``, which may read the tensors."""
    return kind.load_state_dict is not Optimizer.load_state_dict  # type: ignore[attr-defined]


def _kind_of(optimizer: Any) -> type:
    """Return the optimizer's class without our mixin."""
    classes = type(optimizer).__mro__
    return classes[classes.index(_ShardedStep) + 1]


@functools.cache
def _sharded_class(kind: type) -> type:
    return type(f"Sharded{kind.__name__}", (_ShardedStep, kind), {})
