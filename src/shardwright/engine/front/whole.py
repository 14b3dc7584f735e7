"""``unsharded``: a context that shows the full parameters of a model as plain tensors, between steps.

Parameters are gathered one by one from the shards, in the storage dtype, and are not in a slab. Units know only that
they must not be used inside the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from shardwright.engine.assembly.find import UNIT, own_modules
from shardwright.engine.assembly.states import digest
from shardwright.engine.base.offload import whole_of
from shardwright.engine.compat.autograd import in_backward
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.model.divergence import UNSHARD
from shardwright.engine.model.optimizer_hook import reduce_held
from shardwright.engine.model.root import root_of
from shardwright.engine.tensors.numbers.reading import FULL, agree_to_read_over
from shardwright.engine.tensors.parameter import STANDS_FOR, Managed, ManagedParameter, Slot, unit_of
from shardwright.engine.unit.owning import settle
from shardwright.engine.unit.unit import Unit

M = TypeVar("M", bound=nn.Module)


class Options(NamedTuple):
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@dataclass(eq=False)
class Shown:
    """A parameter, its full tensor on ranks that have one, and hashes of the gathered values."""

    unit: Unit
    p: ManagedParameter
    full: nn.Parameter | None
    value: int = 0
    gradient: int | None = None


@contextmanager
def unsharded(
    module: M,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[M]:
    """Show the full parameters of a sharded module inside the context, as plain ``nn.Parameter`` in their storage
    dtype.

        with sw.unsharded(model):
            model.head.weight[:, 0] = 0.0   # every rank does the same

    Every rank must enter it, between steps, and must make the same edits: each rank keeps the edits of its own shard.
    It needs the memory of the full parameters (and gradients) on each rank that has them. Inside, ``state_dict()``
    returns the state dict of a plain model. Forward, backward, optimizer steps, conversions and copies of the sharded
    units raise an error inside. Contexts nest if their options are equal for the parameters that both show. A module
    that is not sharded stays unchanged.

    Args:
        module: a sharded model or any module inside one.
        recurse: also the parameters of units inside ``module``.
        writeback: keep the edits, also if an exception ends the context. False: the parameters get their old values
            back. If a parameter was replaced, or has another shape (and then no gradient), the next forward uses the
            new one; with False the old parameter is put back.
        rank0_only: only the first rank of the mesh gets full tensors and keeps them; on the others the parameters stay
            sharded, and each full parameter exists only during its gather. Needs ``writeback=False``.
        offload_to_cpu: the full parameters (and gradients) are on the CPU. The device holds one of them at a time. Each
            rank has its own copies, so use it mostly with ``rank0_only``.
        with_grads: also the full gradients, as ``.grad``, written back like the parameters. Held gradients of earlier
            micro-batches are reduced first, as for clipping.

    Raises:
        RuntimeError: a forward or backward is under way, or the parameters hold no values yet.
        ValueError: ``rank0_only`` with ``writeback``; other options than in an outer context; or, at the end, a full
            tensor with another dtype or, if it is tensor-parallel, another shape.
        NotImplementedError: parameters that define their own all-gather (``fsdp_pre_all_gather``).
    """
    options = Options(writeback, rank0_only, offload_to_cpu, with_grads)
    modules = list(module.modules()) if recurse else [m for _, m in own_modules(module)]
    if writeback and rank0_only:
        raise ValueError(
            "unsharded(rank0_only=True) gives the full parameters to one rank only, so edits cannot reach the shards "
            "of other ranks. Pass writeback=False."
        )
    with showing(module, modules, options):
        yield module


@contextmanager
def showing(
    top: nn.Module,
    modules: list[nn.Module],
    options: Options,
    check: Callable[[list[Shown]], None] | None = None,
) -> Iterator[None]:
    """A context that shows the full parameters of ``modules``, which are all in ``top``.

    ``check`` gets the shown parameters before the body. If it raises, nothing has changed.
    """
    shown = _show(modules, options)
    try:
        if check is not None:
            check(shown)
        yield
    finally:
        _restore(top, shown, options)


@torch.no_grad()
def _show(modules: list[nn.Module], options: Options) -> list[Shown]:
    parameters = _find(modules, options)
    units = list(dict.fromkeys(unit for unit, _ in parameters))
    agree_to_gather(units)
    if options.with_grads:
        reduce_held([p.sharded for _, p in parameters])
    first = [not any(unit.mesh.get_coordinate() or ()) for unit, _ in parameters]
    with torch.inference_mode(False):
        shown = [
            _gather(unit, p, options, is_shown=mine or not options.rank0_only)
            for (unit, p), mine in zip(parameters, first, strict=True)
        ]
    for unit in units:
        unit.weights.show_sharded()  # where the user has called unshard()
    for each in shown:
        each.unit.watch.unsharded[each.p.sharded] = options
        if each.full is not None:
            each.p.show(each.full)
    return shown


def agree_to_gather(units: list[Unit]) -> None:
    """Raise, with the ranks' names, unless all ranks are about to gather."""
    for root in dict.fromkeys(map(root_of, units)):
        if root is not None:
            root.agreement.agree_all(UNSHARD, 0)
    # Models before their first call have no agreement.
    for comm in dict.fromkeys(comm for unit in units if unit.root is None for comm in unit.ranks.every):
        agree_to_read_over(comm, FULL)


def _find(modules: list[nn.Module], options: Options) -> list[tuple[Unit, ManagedParameter]]:
    """The sharded parameters to show that are not shown yet, each once."""
    units: list[Unit | None] = [m.__dict__.get(UNIT) for m in modules]
    units += [unit_of(p) for m in modules for p in _sharded_parameters(m)]
    for unit in dict.fromkeys(u for u in units if u is not None):
        _refuse_in_use(unit)
        if not unit.watch.unsharded:
            settle(unit)
    unit_of_parameter: dict[nn.Parameter, Unit] = {}
    for sharded in (p for m in modules for p in _sharded_parameters(m)):
        unit = unit_of(sharded)
        if unit is None:
            continue
        outer: Options | None = unit.watch.unsharded.get(sharded)
        if outer is None:
            unit_of_parameter[sharded] = unit
        elif outer[:-1] != options[:-1] or (options.with_grads and not outer.with_grads):
            raise ValueError(
                f"unsharded({_options_in_words(options)}) was entered inside "
                f"unsharded({_options_in_words(outer)}), and both show the "
                f"parameters of unit {unit.name!r}. Pass the same options to both."
            )
    result = [
        (unit, p) for sharded, unit in unit_of_parameter.items() if (p := unit.managed(sharded)) is not None
    ]
    for unit, p in result:
        if p.sharded in unit.without_values():
            raise RuntimeError(
                f"Parameter {p.name!r} of unit {unit.name!r} holds no values yet, since it was sharded deferred or on "
                "the meta device. Call shardwright.materialize(model), or load a checkpoint."
            )
        if p.extension is not None:
            raise NotImplementedError(
                f"Parameter {p.name!r} of unit {unit.name!r} is a {type(p.local).__name__}, which defines its own "
                "all-gather (fsdp_pre_all_gather); unsharded shows plain tensors only."
            )
    return result


def _sharded_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The sharded parameters of a module, also if it shows full ones."""
    for p in module._parameters.values():
        if p is not None:
            p = getattr(p, STANDS_FOR, p)
            if isinstance(p, Managed):
                yield p  # type: ignore[misc]


def _refuse_in_use(unit: Unit) -> None:
    root = root_of(unit)
    if root is not None:
        root.recover_if_failed()
    if unit.activity.busy or in_backward() or (root is not None and (root.caller or root.backward)):
        raise RuntimeError(
            f"unsharded was entered while unit {unit.name!r} or its model is in forward or backward. Enter it between "
            "steps."
        )


def _options_in_words(options: Options) -> str:
    return ", ".join(f"{name}={value}" for name, value in options._asdict().items())


def _gather(unit: Unit, p: ManagedParameter, options: Options, is_shown: bool) -> Shown:
    """Gather a parameter. Every rank must call it."""
    to_cpu = is_shown and options.offload_to_cpu
    whole = _whole(p.sharded.detach(), to_cpu)
    gradient = p.sharded.grad if options.with_grads else None
    whole_gradient = _whole(gradient, to_cpu) if gradient is not None else None
    if not is_shown:
        return Shown(unit, p, None)
    full = nn.Parameter(whole, requires_grad=p.sharded.requires_grad)
    for key, value in p.full.__dict__.items():  # attributes that the user has set
        if not key.startswith("_shardwright"):
            full.__dict__.setdefault(key, value)
    full.__dict__[STANDS_FOR] = p.sharded
    full.grad = whole_gradient
    shown = Shown(unit, p, full)
    if options.writeback:
        shown.value = int(digest(full.detach()))
        shown.gradient = None if full.grad is None else int(digest(full.grad))
    return shown


def _whole(tensor: Any, to_cpu: bool) -> torch.Tensor:
    """A full tensor in separate memory."""
    whole = whole_of(tensor)
    local = local_of(tensor) if hasattr(tensor, "full_tensor") else tensor
    same = whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    whole = whole.clone() if same else whole
    return whole.cpu() if to_cpu else whole


@torch.no_grad()
def _restore(top: nn.Module, shown: list[Shown], options: Options) -> None:
    """Put the sharded parameters back, with the edits. Does not communicate, because only this rank may have failed."""
    refused: list[str] = []
    sharded = {id(each.full): each.p.sharded for each in shown if each.full is not None}
    for module in top.modules():
        for name, p in module._parameters.items():
            if id(p) in sharded:  # also under names that the body has tied to it
                Slot.of(module, name).show(sharded[id(p)])
    for each in shown:
        each.unit.watch.unsharded.pop(each.p.sharded, None)
        if each.full is None:
            continue
        for slot in each.p.slots:
            if slot.holds(each.full) or not options.writeback:
                slot.show(each.p.sharded)
        if options.writeback:
            refused += _write_back(each, options)
        del each.full.__dict__[STANDS_FOR]
    if refused:
        raise ValueError(
            f"shardwright cannot cut these changed full parameters: {'; '.join(refused)}. They were not written back. "
            "Assign a new nn.Parameter instead, or change the parameter after the context."
        )


def _write_back(shown: Shown, options: Options) -> list[str]:
    """Copy this rank's part of an edited full parameter, and of its gradient, into the sharded one.

    A digest of the full tensor shows whether it was edited, so all ranks decide alike. Returns a description of each
    parameter that cannot be cut.
    """
    p, full = shown.p, shown.full
    assert full is not None
    resized = full.shape != p.sharded.shape
    if full.dtype != p.local.dtype or (resized and p.cut.parallel is not None):
        kind = "tensor-parallel " if p.cut.parallel is not None else ""
        return [
            f"{kind}{p.name!r} of {tuple(p.sharded.shape)} and {p.local.dtype} is {tuple(full.shape)} and {full.dtype}"
        ]
    if resized:
        try:
            p.sharded.data = full.detach()
        except ValueError as error:  # as by a shard_placement_fn
            return [str(error)]
        p.sharded.grad = None
        return []
    if int(digest(full.detach())) != shown.value:
        p.local.copy_(p.cut.part_of(full))
    if options.with_grads:
        gradient, sharded = full.grad, p.sharded
        if gradient is None:
            sharded.grad = None
        elif sharded.grad is None:
            part = p.cut.part_of(gradient).to(p.local.device)
            sharded.grad = p.cut.wrap(part.clone(memory_format=torch.contiguous_format))
        elif int(digest(gradient)) != shown.gradient:
            local = local_of(sharded.grad) if hasattr(sharded.grad, "full_tensor") else sharded.grad
            local.copy_(p.cut.part_of(gradient))
    return []
