"""The class of a sharded module: :class:`FSDPModule`, its methods, and the class in front of the user's class.

The methods change settings of units.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn, cast

import torch
from torch import nn

from shardwright.engine.assembly.find import UNIT, own_modules
from shardwright.engine.comm import (
    BlockCodec,
    Codec,
    GradientHook,
    RegisteredMemory,
    SymmetricMemory,
    is_block_codec,
)
from shardwright.engine.compat.callers import called_by_split_backward, called_by_torchs_fully_shard
from shardwright.engine.compat.compiler import hide_from_dynamo
from shardwright.engine.compat.fully_shard import TorchFSDPModule, fsdp_classes
from shardwright.engine.extend import NamedMemory
from shardwright.engine.front.composable import ModuleState, introduce, state_of
from shardwright.engine.front.copies import convert, deepcopy_module
from shardwright.engine.front.input_note import note_inputs
from shardwright.engine.front.lending import lends
from shardwright.engine.front.resizing import resizes
from shardwright.engine.front.state_hooks import AfterLoad, AtRest, CutToShards, as_dtensors
from shardwright.engine.memory import Source
from shardwright.engine.model.calls import Calls, depth_of
from shardwright.engine.model.root import Root, attach, root_of
from shardwright.engine.unit.owning import scale_direct_gradients, settle, units_of
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import (
    check_codec,
    follow_requires_grad,
    gather_by,
    issue,
    reduce_by,
    valid_for,
)

_classes: dict[tuple[type, bool], type] = {}
COPY_OF = (
    "_shardwright_copy_of"  #: the attribute under which a shallow copy keeps the module that it was made from
)


@functools.cache
def _hide_engine() -> None:
    hide_from_dynamo(_files_of_engine)


def _files_of_engine() -> list[str]:
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("shardwright.engine.") and name != lends.__module__
    ]
    return [module.__file__ for module in modules if module.__file__]


def install(unit: Unit, modules: list[nn.Module]) -> None:
    """Connect the modules with the unit: hooks, state dicts, and a class in front of each module's own class."""
    _hide_engine()
    for module in modules:
        module.__dict__[UNIT] = unit  # not by setattr, which wrappers forward to the inner module
        for _, child in own_modules(module):
            child.register_state_dict_pre_hook(AtRest(unit))
            child.register_state_dict_post_hook(as_dtensors)
            child.register_load_state_dict_pre_hook(CutToShards(unit))
        module.register_load_state_dict_post_hook(AfterLoad(unit))
        own = any(p is not None for p in module._parameters.values())
        module.__class__ = fsdp_class(type(module), reads_own=own)
    introduce(unit, modules)


def fsdp_class(cls: type, reads_own: bool) -> type:
    """The class ``FSDP<Class>``. With ``reads_own`` other modules may read its parameters, so it notices reads.

    The user's class is at index 2 of the bases, where torch looks for it. torch's own class comes last.
    """
    key = (cls, reads_own)
    if key not in _classes:
        bases = (FSDPModule, cls, TorchFSDPModule)
        own = {**resizes(cls), **(lends(cls) if reads_own else {})}
        _classes[key] = type(f"FSDP{cls.__name__}", bases, own)
        fsdp_classes.setdefault(cls, _classes[key])
    return _classes[key]


def original_class(cls: type) -> type:
    """The class that :func:`fsdp_class` was put in front of."""
    return next(c for c in cls.__mro__[1:] if not issubclass(c, FSDPModule))


class UnshardHandle:
    """The handle that :meth:`FSDPModule.unshard` returns with ``async_op=True``."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait for the gather and show the full parameters. A second call does nothing."""
        units, self._units = self._units, []
        for unit in units:
            if unit.parameters and unit.weights.gathered:
                unit.weights.wait()
                unit.weights.forms.show_full()


class FSDPModule(TorchFSDPModule):
    """The class of a module after :func:`fully_shard`. Only that function makes it.

    ``isinstance`` with torch's class of this name is true, but nothing is inherited from it (``_refuse_inherited``).
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Container code such as ``Sequential.__getitem__`` calls ``type(self)(...)``. This makes a plain module.
        original: Any = original_class(cls)
        self: Any = original.__new__(original)
        self.__init__(*args, **kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not a forward hook with always_call, which does not run after KeyboardInterrupt; users continue after it.
        unit: Unit = self.__dict__[UNIT]
        depth = depth_of(unit)
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            note_inputs(error, unit.name, original_class(type(self)).__name__, args, kwargs)
            Calls(unit).forward_failed(depth)
            raise

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        original = original_class(type(self))
        own: Any = getattr(original, "__deepcopy__", None)
        if own is not None and not str(own.__module__).startswith("torch."):  # torch.fx has one, too
            warnings.warn(
                f"A deepcopy of a sharded {original.__name__} does not call the __deepcopy__ of its class: all its "
                "attributes are copied. A __getstate__ can leave some out.",
                stacklevel=3,
            )
        return deepcopy_module(cast(nn.Module, self), memo, original, install)

    def __copy__(self) -> nn.Module:
        """A module with the same parts and the same unit, as ``copy.copy`` of a plain module."""
        if hasattr(super(), "__copy__"):
            return super().__copy__()  # type: ignore[misc,no-any-return]
        result = cast(nn.Module, object.__new__(type(self)))
        # The unit refers to the original, which lives as long as its copy.
        result.__dict__.update({**self.__dict__, COPY_OF: self.__dict__.get(COPY_OF, self)})
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"A sharded {original_class(type(self)).__name__} cannot be pickled: each rank has only a part, and its "
            "process group ends with the process. Save its state_dict() with torch.distributed.checkpoint or "
            "torch.save."
        )

    def _get_fsdp_state(self) -> ModuleState:  # type: ignore[override]  # not of its class, but with its names
        """The state that torch's own code reads."""
        return cast(ModuleState, state_of(cast(nn.Module, self)))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted because torch has it. Gathers are always asynchronous."""

    def _root(self) -> Root:
        unit = self._fsdp_unit()
        return root_of(unit) or attach(cast(nn.Module, self))

    def _fsdp_unit(self) -> Unit:
        return cast(Unit, getattr(self, UNIT))

    def _only_unit(self, method: str) -> Unit:
        unit = self._fsdp_unit()
        if unit.siblings:
            raise ValueError(
                f"{method} needs all parameters of a unit on one mesh, and unit {unit.name!r} has parameters on "
                "several. Call fully_shard separately for each mesh, without a shard_placement_fn."
            )
        return unit

    def _fsdp_units(self, recurse: bool) -> list[Unit]:
        if not recurse:
            unit = self._fsdp_unit()
            return [unit, *unit.siblings]
        return units_of(cast(nn.Module, self))

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own unit (not inner ones) in its compute dtype and show the full parameters.

        With ``async_op`` the gather is only issued; the returned handle's ``wait`` shows the parameters, and so does
        the module's next forward.
        """
        units = self._fsdp_units(recurse=False)
        for unit in units:
            unit.refuse_unsharded("unshard() of")
            if unit.parameters:
                root = self._root()
                root.recover_if_failed()
                if root.caller is None:
                    root.compute_as(False)
                settle(unit)
                if not unit.activity.busy:
                    follow_requires_grad(unit)
                generation = root.clock.call if root.caller is not None else root.clock.next_call
                if not valid_for(unit, generation):
                    issue(unit, generation)
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release this module's own full parameters and show the sharded ones."""
        for unit in self._fsdp_units(recurse=False):
            if unit.parameters:
                unit.release()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, backward keeps full gradients, in the reduce dtype, until a backward with True reduces the sum.

        This is gradient accumulation without communication. Each rank holds one full gradient of the model. An
        optimizer's step and ``sw.clip_grad_norm_`` reduce the held gradients, too. ``.grad`` is None while they are
        held. To drop them, call ``zero_grad`` of the model or of an optimizer, or assign None to ``.grad``.
        """
        for unit in self._fsdp_units(recurse):
            unit.change(sync=requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """With False, backward skips the reductions that its strategy does once per step.

        This is gradient accumulation by the rule of the strategy. If gradients are sharded (zero2, zero3), every
        backward reduces them. Sums over replicas (hsdp) and replicated gradients (ddp, zero1) wait for a backward with
        True, for clipping or for an optimizer's step. Until then ``.grad`` does not contain them. Applies to the whole
        model.
        """
        self._root().is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Accepted as in torch 2.15. Here you may always call :meth:`finalize_backward`.

        A backward that communicates has reduced its gradients when it returns. Gradients of backwards without gradient
        sync wait for a backward with gradient sync, or for :meth:`finalize_backward`.
        """

    def finalize_backward(self, *, async_op: bool = False) -> GradientReduction | None:
        """Reduce the held gradients of backwards without gradient sync, and release the weights that these have kept.

        Args:
            async_op: return a handle, as torch does. With either value the reductions have ended when this returns.

        Raises:
            RuntimeError: a backward is under way.
        """
        state = state_of(cast(nn.Module, self))
        root = root_of(self._fsdp_unit())
        if root is not None and root.in_backward:
            raise RuntimeError("finalize_backward was called during a backward. Call it after the backward.")
        if root is not None and state is not None:
            for each in state._state_ctx.all_states:
                for group in each._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()
        return GradientReduction() if async_op else None

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With False, gradients are summed over the ranks that shard them, but not yet over the replicas.

        This is gradient accumulation for 2-D meshes. :meth:`set_is_last_backward` does it for the whole model.
        """
        for unit in self._fsdp_units(recurse):
            unit.change(all_reduce=requires_all_reduce)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with each reduced gradient of this module's own unit before it is added to ``.grad``.

        Args:
            hook: gets this rank's flat gradient, in the reduce dtype, after all sums and divisions, and may change it
                in place. Ranks that shard get different parts.
            stream: on an accelerator, run it there; the computation waits for it.
        """
        for unit in self._fsdp_units(recurse=False):
            unit.change(all_reduce_hook=hook if stream is None else _on_stream(hook, stream))

    def set_gradient_comm_hook(self, hook: GradientHook | None, *, recurse: bool = True) -> None:
        """Let ``hook`` reduce gradients, in every strategy and over every mesh axis. None removes the hook.

        See :mod:`shardwright.comm_hooks`: :class:`Compressed` (a shorter dtype, int8 blocks), :class:`PowerSGD`, or
        your own :class:`GradientHook`. The hook gets gradients packed in the reduce dtype and returns their sums, which
        are then divided. Call this on the root, on every rank, between optimizer steps, with one hook object per model.
        If the hook has error feedback, save its ``state_dict`` in checkpoints.

        Raises:
            TypeError: not a GradientHook.
            RuntimeError: gradients of earlier micro-batches are held.
        """
        if hook is not None and not isinstance(hook, GradientHook):
            raise TypeError(f"expected a GradientHook or None, got {hook!r}")
        self._root()  # names the units
        for unit in self._fsdp_units(recurse):
            reduce_by(unit, hook=hook)

    def set_all_gather_codec(self, codec: Codec | BlockCodec | None, *, recurse: bool = True) -> None:
        """Encode weights for gathers, say with ``MXFP8()``: a quarter to half the bytes. None: no encoding.

        Every rank computes with the same decoded weights. Shards, optimizer and checkpoints keep the exact weights. A
        parameter that the codec does not make smaller is sent without encoding, and so is a parameter with
        ``fsdp_pre_all_gather``. ZeRO++ calls this quantised weight communication. Do not call this while units are
        gathered.

        A codec of blocks (``MXFP8``, ``BlockwiseFP8``) encodes parameters of two and more dimensions. The decoded
        weights are those of the whole parameter, encoded and decoded, on any number of ranks. Other codecs encode each
        rank's chunk as one flat row. Where one rank has all of a parameter, nothing is sent, and weights are exact.

        Args:
            codec: turns floating-point rows or matrices into rows of uint8 and back, see
                :class:`shardwright.comm_hooks.Codec` and :class:`shardwright.comm_hooks.BlockCodec`.

        Raises:
            TypeError: not a codec.
            ValueError: the layout of a unit cuts blocks of the codec. No unit has changed then.
        """
        _refuse_no_codec(codec)
        units = self._fsdp_units(recurse)
        for unit in units:
            check_codec(unit, codec)
        for unit in units:
            gather_by(unit, codec=codec)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this module's own unit with ``comm``, an ``AllGather`` of torch's FSDP2. None: the default.

        It gets uint8 tensors: the unit's weights, and 16 bytes that detect ranks that diverge. Gathers that a strategy
        keeps, and gathers over a second mesh axis, use it, too.
        """
        unit = self._only_unit("set_custom_all_gather")
        gather_by(unit, gather=_checked_comm(comm, "AllGather"))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this module's own unit with ``comm``, a ``ReduceScatter`` of torch's FSDP2. None: the default."""
        unit = self._only_unit("set_custom_reduce_scatter")
        reduce_by(unit, scatter=_checked_comm(comm, "ReduceScatter"))

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce-scatter in a separate process group, so that reductions and gathers can run at the same time.

        One communicator runs its collectives one after another. Every rank must make the same call. The group is made
        once per mesh. Do not call this while gradients of earlier micro-batches are held.
        """
        for unit in self._fsdp_units(recurse):
            reduce_by(unit, separate=enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may run at once (default 1), for the whole model.

        With more, a slow reduction overlaps with the next backward. Each needs a buffer for a unit's gradients.

        Raises:
            ValueError: not an integer of at least 1.
        """
        if (
            isinstance(max_input_buffers, bool)
            or not isinstance(max_input_buffers, int)
            or max_input_buffers < 1
        ):
            raise ValueError(f"max_input_buffers must be an integer of at least 1, got {max_input_buffers!r}")
        self._root().reductions.capacity = max_input_buffers

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` from now on.

        Raises:
            ValueError: not a bool, or True for a unit whose strategy replicates parameters.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}")
        for unit in self._fsdp_units(recurse):
            if reshard_after_forward and unit.ranks.replicates_parameters:
                raise ValueError(
                    f"Unit {unit.name!r} has {unit.ranks.strategy}, which keeps full parameters until the "
                    "optimizer's step; they cannot be resharded after forward. Use a strategy that shards parameters."
                )
            unit.change(reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """With False, full parameters stay after backward until they change: fewer gathers, more memory."""
        for unit in self._fsdp_units(recurse):
            unit.change(reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """With False, backward does not gather this unit. Use it only if the unit's backward needs no weights."""
        for unit in self._fsdp_units(recurse=False):
            unit.change(unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather the units of these modules when this unit's forward begins. Default: the unit that came next last
        time."""
        units = tuple(weakref.ref(u) for u in _units_of(modules))
        self._fsdp_unit().change(forward_prefetch=units)

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather the units of these modules when this unit's backward begins. Default: the unit before it in
        forward."""
        units = tuple(weakref.ref(u) for u in _units_of(modules))
        self._fsdp_unit().change(backward_prefetch=units)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's gradient sums by ``factor`` instead of the number of ranks.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"the gradient divide factor must be positive, got {factor!r}")
        for unit in self._fsdp_units(recurse=False):
            unit.change(divide_by=float(factor))
            for p in unit.parameters:
                scale_direct_gradients(unit, p.sharded)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated, as in torch; use set_gradient_divide_factor",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sum in the reduce-scatter and divide afterwards, instead of averaging in it, for this module's own unit."""
        for unit in self._fsdp_units(recurse=False):
            unit.change(force_sum=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """With True, a trainable parameter that a backward did not use gets a gradient of zero instead of None.

        Then weight decay and momentum act on it. Each backward that reduces sets this gradient, for units that have run
        at least once. With either value ranks may use different parameters: if only some ranks used one, the others add
        zeros.
        """
        for unit in self._fsdp_units(recurse):
            unit.change(fills_unused=reduce_scatter_unused_params)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let this module's own unit use memory that the process group's backend allocates and NCCL registers.

        With planned memory this applies to the one block of the model. It takes effect with the next lease or plan.

        Raises:
            NotImplementedError: the backend allocates none (gloo, NCCL on hardware without it).
            MissingCompilerError: on torch 2.11, without a C++ compiler.
            ValueError: the model's memory comes from an allocator of the user's.
        """
        for unit in self._fsdp_units(recurse=False):
            _set_source(unit, RegisteredMemory(unit.comm) if enable and unit.comm.group is not None else None)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Gather this module's own unit into symmetric memory, so that copy engines or symmetric kernels move it.

        With planned memory this applies to the one block of the model. Every rank must make the same call. NCCL's copy
        engines also need the communicator's option ``cta_policy`` or ``NCCL_CTA_POLICY=2``.

        Raises:
            NotImplementedError: no CUDA device, or a torch without symmetric memory.
            MissingCompilerError: on torch 2.11, without a C++ compiler.
            ValueError: the model's memory comes from an allocator of the user's; ``backend`` is not "NCCL".
        """
        if backend != "NCCL":
            raise ValueError(f'backend must be "NCCL", got {backend!r}')
        for unit in self._fsdp_units(recurse=False):
            comms = [comm for comm in (*unit.ranks.once, *unit.ranks.gathers) if comm.group is not None]
            if comms:
                _set_source(unit, SymmetricMemory(comms, backend))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward wait for ``event`` (recorded after the optimizer) before it reads weights, on an
        accelerator."""
        self._root().agreement.streams.gather_after(event)

    def reset_iter_state(self) -> None:
        """Drop the state that an exception in forward or backward left. The next forward also does this."""
        root = root_of(self._fsdp_unit())
        if root is not None:
            root.recover()
            for unit in root.units():
                if unit.parameters:
                    unit.gradients.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``. It also drops held gradients and frees the gradients' memory at once."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in self._fsdp_units(recurse=True):
            if unit.parameters:
                unit.gradients.forget()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``. If a backward has failed, it first puts the sharded parameters back.

        torch's pipeline schedules that separate gradients of weights from gradients of inputs get full parameters.

        Raises:
            ValueError: torch's ``fully_shard`` asks, which was applied to a module around this one.
        """
        root = root_of(self._fsdp_unit())
        if root is not None:
            root.recover_if_failed()
        for unit in self._fsdp_units(recurse=True):
            settle(unit)
        if called_by_torchs_fully_shard():
            raise ValueError(
                f"torch's fully_shard was applied to a module with a {type(self).__name__} inside that shardwright "
                "sharded. One engine must shard the whole model. Apply shardwright's fully_shard to the outer "
                "module, too."
            )
        named = super().named_parameters(*args, **kwargs)  # type: ignore[misc]
        return self._named_full(named) if called_by_split_backward() else named

    def _named_full(self, named: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        root = self._root()
        for unit in self._fsdp_units(recurse=True):
            if (
                unit.parameters and not unit.weights.gathered
            ):  # the last forward has released the weights that this backward reads
                issue(unit, root.clock.call)
            unit.weights.wait()
        fulls = {id(p.sharded): p.full for unit in self._fsdp_units(recurse=True) for p in unit.parameters}
        return ((name, fulls.get(id(p), p)) for name, p in named)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``.to``, ``.half``, ``to_empty`` and similar: keeps the parameter objects, and makes new shards if needed."""
        root = root_of(self._fsdp_unit())
        if root is not None:
            root.recover_if_failed()
        units = [u for u in self._fsdp_units(recurse) if u.parameters]
        convert(cast(nn.Module, self), units, fn, recurse)
        return self


class GradientReduction:
    """The handle that :meth:`FSDPModule.finalize_backward` returns with ``async_op=True``."""

    def wait(self) -> None:
        """Does nothing: the reductions have already ended."""


def _refuse_inherited() -> None:
    """Let methods that only torch's class has raise an error, because they would use torch's engine."""
    for name, value in vars(TorchFSDPModule).items():
        if callable(value) and name not in vars(FSDPModule) and not hasattr(object, name):
            setattr(FSDPModule, name, _refusal(name))


def _set_source(unit: Unit, source: Source | None) -> None:
    """Let a unit's later leases use the memory of ``source``; None: torch's allocator."""
    root = root_of(unit)
    memory = root.pools.memory if root is not None else unit.options.memory
    if source is not None and not isinstance(memory, NamedMemory):
        raise ValueError(
            f"Unit {unit.name!r} uses your allocator {type(memory).__name__}, so shardwright cannot change its "
            'memory type. Register the memory in the allocator, or pass the name of a memory, such as memory="arena".'
        )
    unit.site.owner.source = source
    if root is not None:
        root.pools.restart()


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} of torch {torch.__version__}'s FSDPModule does nothing in shardwright. Remove the call."
        )

    refuse.__name__ = name
    return refuse


_refuse_inherited()


def share_comm_ctx(modules: Sequence[TorchFSDPModule]) -> None:
    """Does nothing; torch has it. Models over the same ranks always share their streams and communicators.

    Raises:
        ValueError: a module is not sharded.
    """
    _units_of(modules)


def _checked_comm(comm: Any, kind: str) -> Any:
    if comm is not None and not (callable(comm) and hasattr(comm, "allocate")):
        raise TypeError(f"expected torch's {kind} for FSDP2 (allocate and __call__) or None, got {comm!r}")
    return comm


def _refuse_no_codec(codec: object) -> None:
    if codec is not None and not all(hasattr(codec, name) for name in ("nbytes", "encode", "decode")):
        raise TypeError(f"expected a codec (nbytes, encode, decode) or None, got {codec!r}")
    if is_block_codec(codec):
        block = codec.block_shape
        if not (
            isinstance(block, tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        ):
            raise TypeError(
                f"block_shape of the codec {codec!r} is {block!r}, expected its rows and columns: two positive integers"
            )


def _on_stream(hook: Callable[[torch.Tensor], None], stream: Any) -> Callable[[torch.Tensor], None]:
    def run(gradient: torch.Tensor) -> None:
        api = torch.get_device_module(gradient.device)
        stream.wait_stream(api.current_stream(gradient.device))
        with api.stream(stream):
            hook(gradient)
        api.current_stream(gradient.device).wait_stream(stream)

    return run


def _units_of(modules: Sequence[object]) -> list[Unit]:
    units: list[Unit] = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"expected sharded modules (results of fully_shard), got {type(module).__name__}"
            )
        units += module._fsdp_units(recurse=False)
    return units
