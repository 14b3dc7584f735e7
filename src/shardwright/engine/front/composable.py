"""The state of a sharded module for torch's own code.

Pipeline schedules, ``replicate``, ``register_fsdp_forward_method``, ``share_comm_ctx`` and ``FSDPMemTracker`` of torch
recognise a sharded module by its class and by the result of ``torch.distributed.fsdp.fully_shard.state(module)``. This
file has that result. It has only the attributes that these callers use. Each passes on to the module's unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwright.engine.assembly.find import own_modules
from shardwright.engine.base.visit import Visit
from shardwright.engine.compat.fully_shard import mark_fully_sharded, mark_managed, sharded_state_of
from shardwright.engine.model.backward import BACKWARD, Backward
from shardwright.engine.model.calls import Calls, depth_of
from shardwright.engine.model.root import Root, attach, root_of
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import reduce


def introduce(unit: Unit, modules: list[nn.Module]) -> None:
    """Call the unit before and after the modules' forward, and register them as sharded with torch and transformers."""
    calls = Calls(unit)
    before = [
        m.register_forward_pre_hook(calls.before_forward, prepend=True, with_kwargs=True) for m in modules
    ]
    after = [m.register_forward_hook(calls.after_forward) for m in modules]
    state = ModuleState(
        unit, ForwardHooks(before, calls.before_forward), ForwardHooks(after, calls.after_forward)
    )
    for module in modules:
        mark_fully_sharded(module, state)
        for _, child in own_modules(module):
            mark_managed(child)


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of a module that ``fully_shard`` was applied to, else None. The name is torch's."""
    state = sharded_state_of(module)
    return state if isinstance(state, ModuleState) else None


class _Part:
    """A base class: attributes that only torch's class has raise an error, because they would have no effect."""

    __slots__ = ()
    torch_class: ClassVar[str]

    def __getattr__(self, name: str) -> NoReturn:
        raise self._missing(name)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            raise self._missing(name) from None

    def _missing(self, name: str) -> AttributeError:
        return AttributeError(
            f"torch's {self.torch_class} has {name!r}, but shardwright sharded this module, and its engine has no "
            "such attribute. Use the methods of the sharded module."
        )


class ModuleState(_Part):
    """The object that ``fully_shard.state(module)`` returns."""

    __slots__ = ("__weakref__", "_hooks_after", "_hooks_before", "calls", "unit")
    torch_class = "FSDPState"

    def __init__(self, unit: Unit, before: ForwardHooks, after: ForwardHooks) -> None:
        self.unit = unit
        self._hooks_before, self._hooks_after = before, after
        #: For running forward methods of torch: an object that notices their end, and the number of earlier calls.
        self.calls: list[tuple[weakref.finalize[Any, Any], int]] = []

    def __deepcopy__(self, memo: Any) -> None:
        """A copied module gets a new state when it is sharded."""

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.unit.watch.modules())

    @property
    def _is_root(self) -> bool | None:
        root = root_of(self.unit)
        return None if root is None else root.top is self.unit

    @property
    def _device(self) -> torch.device:
        return self.unit.ranks.device

    @property
    def _mp_policy(self) -> Any:
        return self.unit.arguments.users_policy

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        unit = self.unit
        return [ParamGroup(each) for each in (unit, *unit.siblings) if each.parameters]

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AssertionError(
                f"Unit {self.unit.name!r} has parameters on {len(groups)} meshes, so it has one group for each mesh: "
                "read _fsdp_param_groups."
            )
        return groups[0] if groups else None

    @property
    def _state_ctx(self) -> StateContext:
        return StateContext(self.unit)

    @property
    def _comm_ctx(self) -> Any:
        """Shared by all models over the same ranks, whatever it is set to."""
        return self.unit.comm

    @_comm_ctx.setter
    def _comm_ctx(self, value: Any) -> None:
        pass

    # FSDPMemTracker removes these hooks, registers its own around ``_pre_forward`` and ``_post_forward``, and assigns
    # their handles. In the end it removes these and registers the methods themselves.

    @property
    def _pre_forward_hook_handle(self) -> ForwardHooks:
        return self._hooks_before

    @_pre_forward_hook_handle.setter
    def _pre_forward_hook_handle(self, handle: RemovableHandle) -> None:
        self._hooks_before.replace(handle)

    @property
    def _post_forward_hook_handle(self) -> ForwardHooks:
        return self._hooks_after

    @_post_forward_hook_handle.setter
    def _post_forward_hook_handle(self, handle: RemovableHandle) -> None:
        self._hooks_after.replace(handle)

    def _lazy_init(self) -> None:
        unit = self.unit
        if unit.root is None:
            attach(unit.watch.modules()[0])

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unit = self.unit
        depth = depth_of(unit)
        args, kwargs = Calls(unit).before_forward(module, args, kwargs)
        # torch's caller does not report an exception. It holds these arguments until the call ends.
        kwargs = _Keywords(kwargs)
        root = cast(Root, root_of(unit))
        visit = root.visits.frames[-1].visit
        if visit is not None and unit in _replaced:
            visit.listener = _LISTENER
        left = weakref.finalize(kwargs, _leave, unit, root.visits.frames[-1], depth)
        left.atexit = False
        self.calls.append((left, depth))
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        unit = self.unit
        left, depth = self.calls.pop()
        left.detach()
        try:
            return Calls(unit).after_forward(module, args, output)
        except BaseException:
            Calls(unit).forward_failed(depth)
            raise

    def _root_post_backward_final_callback(self) -> None:
        """Wait for the reductions. torch calls it after :meth:`ParamGroup.post_backward` of all groups."""
        root = root_of(self.unit)
        if root is not None:
            root.finish_held()


class ForwardHooks:
    """The handle of the hooks before, or after, the forward of a unit's modules.

    Removed hooks keep their places among the other hooks of a module, so that they come back to these.
    """

    def __init__(self, handles: list[RemovableHandle], hook: Callable[..., Any]) -> None:
        self._handles = handles
        self._hook = hook
        self._others: list[RemovableHandle] = []

    def remove(self) -> None:
        """Remove these hooks, or those that replace them."""
        self._set(_nothing)
        for handle in self._others:
            handle.remove()
        self._others.clear()

    def replace(self, handle: RemovableHandle) -> None:
        """Note a hook that is called in their place. If it is the method of a state, set these hooks again instead."""
        hook = (handle.hooks_dict_ref() or {}).get(handle.id)
        if isinstance(getattr(hook, "__self__", None), ModuleState):
            handle.remove()
            self._set(self._hook)
        else:
            self._others.append(handle)

    def _set(self, hook: Callable[..., Any]) -> None:
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks[handle.id] = hook


def _nothing(*_: Any) -> None:
    """A hook in the place of a removed one."""


class _Keywords(dict[str, Any]):
    """Keyword arguments that allow weak references."""


def _leave(unit: Unit, frame: Any, depth: int) -> None:
    """Clean up after an exception in a call that torch's forward method had begun."""
    root = root_of(unit)
    if root is not None and frame in root.visits.frames[depth : depth + 1]:
        Calls(unit).forward_failed(depth)


class StateContext(_Part):
    """The shared part of the states of one model."""

    __slots__ = ("unit",)
    torch_class = "FSDPStateContext"

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    @property
    def all_states(self) -> list[ModuleState]:
        """The states of the whole model, the outermost first. Empty before the model's first forward."""
        root = root_of(self.unit)
        tops = [unit.watch.modules()[:1] for unit in root.units() if unit.main is None] if root else []
        return [state for module in tops for m in module if (state := state_of(m)) is not None]

    @property
    def is_last_backward(self) -> bool:
        root = self.unit.root
        return root is None or root.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        cast(Any, self.unit.watch.modules()[0]).set_is_last_backward(value)


#: Methods of groups that FSDPMemTracker has replaced.
_replaced: weakref.WeakKeyDictionary[Unit, dict[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()


class _Replaced(Backward):
    """Calls the methods that replace those of a unit's group."""

    def enter(self, visit: Visit) -> None:
        if visit not in visit.unit.activity.visits:
            ParamGroup(visit.unit).pre_backward(visit)

    def close(self, visit: Visit) -> None:
        if visit in visit.unit.activity.visits:
            ParamGroup(visit.unit).post_backward(visit)


_LISTENER = _Replaced()


class ParamGroup(_Part):
    """The parameters of a unit."""

    __slots__ = ("unit",)
    torch_class = "FSDPParamGroup"

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.unit.watch.modules())

    @property
    def device(self) -> torch.device:
        return self.unit.ranks.device

    @property
    def fsdp_params(self) -> list[Param]:
        return [Param(p) for p in self.unit.parameters]

    @property
    def comm_ctx(self) -> Any:
        """Shared by all models over the same ranks, whatever it is set to."""
        return self.unit.comm

    @comm_ctx.setter
    def comm_ctx(self, value: Any) -> None:
        pass

    @property
    def _module_fqn(self) -> str:
        return self.unit.name

    @property
    def is_unsharded(self) -> bool:
        """Whether this rank has the full weights, also if modules show sharded parameters."""
        return self.unit.weights.ready

    @property
    def is_sharded(self) -> bool:
        return not self.unit.weights.ready

    def reshard(self) -> None:
        self.unit.release()

    @property
    def pre_backward(self) -> Callable[..., None]:
        """Called where backward reaches the module, if it was replaced before the forward."""
        return _replaced.get(self.unit, {}).get("pre_backward", self._enter)

    @pre_backward.setter
    def pre_backward(self, function: Callable[..., None]) -> None:
        self._replace("pre_backward", function)

    @property
    def post_backward(self) -> Callable[..., None]:
        """After all backwards of a step: release the weights, and reduce the held gradients.

        Also called where backward leaves the module, if it was replaced before the forward.
        """
        return _replaced.get(self.unit, {}).get("post_backward", self._leave)

    @post_backward.setter
    def post_backward(self, function: Callable[..., None]) -> None:
        self._replace("post_backward", function)

    def _replace(self, name: str, function: Callable[..., None]) -> None:
        if isinstance(getattr(function, "__self__", None), ParamGroup):
            _replaced.get(self.unit, {}).pop(name, None)
            if not _replaced.get(self.unit, True):
                del _replaced[self.unit]
        else:
            _replaced.setdefault(self.unit, {})[name] = function

    def _enter(self, visit: Visit) -> None:
        BACKWARD.enter(visit)

    def _leave(self, visit: Visit | None = None) -> None:
        unit = self.unit
        if visit is not None:
            BACKWARD.close(visit)
            cast(Root, unit.root).reductions.finish()  # so that its caller finds the gradients
            return
        if unit.root is None or unit.activity.busy:
            return
        if unit.settings.reshard_after_backward and not unit.ranks.keeps_full:
            unit.release()
        waits = unit.gradients.has_gradients()
        if unit.settings.sync and (waits or unit.gradients.held):
            reduce(unit, needed=not waits)


class Param(_Part):
    """One parameter."""

    __slots__ = ("parameter",)
    torch_class = "FSDPParam"

    def __init__(self, parameter: ManagedParameter) -> None:
        self.parameter = parameter

    @property
    def sharded_param(self) -> nn.Parameter:
        return self.parameter.sharded

    @property
    def unsharded_param(self) -> torch.Tensor:
        """The full parameter. It has values only while the module is unsharded."""
        return self.parameter.full

    @property
    def _unsharded_param(self) -> torch.Tensor:
        return self.parameter.full

    @property
    def _param_fqn(self) -> str:
        return self.parameter.name
