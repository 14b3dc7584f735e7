"""The modules of a model that become units: policies, pure functions from a module to a list of them.

    for unit in sw.wrap.by_class(Block)(model):
        sw.fully_shard(unit, mesh=mesh)

or in one call ``sw.wrap.auto_wrap(model, sw.wrap.by_class(Block), mesh=mesh)``. Only :func:`auto_wrap` changes a model.
``api.py`` makes units.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from shardwright.engine.assembly.find import inner_first
from shardwright.engine.front.api import fully_shard
from shardwright.engine.front.module import FSDPModule, original_class
from shardwright.engine.model.pools import bytes_in
from shardwright.engine.tensors.parameter import Managed

__all__ = ["Policy", "Units", "as_policy", "auto_wrap", "by_class", "by_predicate", "by_size"]

M = TypeVar("M", bound=nn.Module)
Modules = list[nn.Module]

_OF_ROOT = ("memory", "prefetch", "strict")  #: options of ``fully_shard`` for a whole model


class Units(list["nn.Module | list[nn.Module]"]):
    """The units that a policy has chosen, inner units first and the whole model last. ``print`` shows a table.

    Each item is the argument of one call of ``fully_shard``: a module, or a list of modules that form one unit.
    """

    def __init__(
        self, model: nn.Module, groups: Iterable[Modules], ignored: Iterable[nn.Parameter] = ()
    ) -> None:
        super().__init__(group[0] if len(group) == 1 else group for group in groups)
        self._model = model
        self._ignored = {id(p) for p in ignored}

    def __str__(self) -> str:
        names = {id(m): name or "(the model)" for name, m in self._model.named_modules()}
        rows = [("unit", "class", "parameters", "bytes", "")]
        owner: dict[int, int] = {}
        for number, item in enumerate(self):
            modules = item if isinstance(item, list) else [item]
            own = {id(p): p for m in modules for p in m.parameters() if id(p) not in self._ignored}
            mine = [p for key, p in own.items() if key not in owner and not isinstance(p, Managed)]
            inside = {id(m) for module in modules for m in module.modules()}
            lenders = sorted(
                {
                    owner[key]
                    for key in own
                    if key in owner and not any(id(m) in inside for m in _modules_of(self[owner[key]]))
                }
            )
            owner |= {key: number for key in own if key not in owner}
            rows.append(
                (
                    ", ".join(names[id(m)] for m in modules),
                    ", ".join(dict.fromkeys(_class_of(m).__name__ for m in modules)),
                    f"{sum(p.numel() for p in mine):,}",
                    f"{sum(p.numel() * p.element_size() for p in mine):,}",
                    f"shares weights with {', '.join(rows[n + 1][0] for n in lenders)}" if lenders else "",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i in (2, 3) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def _modules_of(item: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return item if isinstance(item, list) else [item]


class _Tree:
    """A model during its division: modules that may become units, inner ones first, and parameters that units own."""

    def __init__(self, model: nn.Module, ignored: Iterable[nn.Module], left_out: set[int]) -> None:
        self.model = model
        skipped = {id(m) for top in ignored for m in top.modules()}
        order = list(inner_first(model))
        self.place = {id(m): i for i, m in enumerate(order)}
        self.modules = [
            m
            for m in order
            if m is not model and id(m) not in skipped and is_called(m) and not isinstance(m, FSDPModule)
        ]
        self.groups: list[Modules] = []
        self._chosen: set[int] = set()
        self._owned = set(left_out)

    def free(self) -> list[nn.Module]:
        return [m for m in self.modules if id(m) not in self._chosen]

    def left_of(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters that a unit of this module would own."""
        return [p for p in module.parameters() if id(p) not in self._owned and not isinstance(p, Managed)]

    def choose(self, group: Modules) -> None:
        self.groups.append(group)
        self._chosen.update(id(m) for m in group)
        self._owned.update(id(p) for m in group for p in m.parameters())


class Policy:
    """A function from a module to its units; ``first | second`` also divides the rest by the second policy.

    Made by :func:`by_class`, :func:`by_size` and :func:`by_predicate`. It never chooses modules that are already
    sharded, or containers without a forward. It chooses a module once, even if the model uses it twice.
    """

    def __init__(self, choose: Callable[[_Tree], None]) -> None:
        self._choose = choose

    def __call__(
        self,
        model: nn.Module,
        *,
        ignored_modules: Iterable[nn.Module] = (),
        ignored_params: Iterable[nn.Parameter] = (),
    ) -> Units:
        """The units of ``model``, inner ones first, itself last (unless it is a container without a forward).

        Args:
            model: it is not changed, and may be deferred or on the meta device.
            ignored_modules: these modules and those below them become no units. Their parameters do not count.
            ignored_params: parameters that do not count.
        """
        ignored_modules, ignored_params = list(ignored_modules), list(ignored_params)
        left_out = [*ignored_params, *(p for m in ignored_modules for p in m.parameters())]
        tree = _Tree(model, ignored_modules, {id(p) for p in left_out})
        self._choose(tree)
        groups = sorted(tree.groups, key=lambda group: max(tree.place[id(m)] for m in group))
        return Units(model, [*groups, *([[model]] if is_called(model) else [])], left_out)

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented

        def both(tree: _Tree) -> None:
            self._choose(tree)
            other._choose(tree)

        return Policy(both)


def by_class(*classes: type[nn.Module] | str, group: int = 1) -> Policy:
    """Every module of these classes is a unit, as with FSDP1's ``ModuleWrapPolicy``.

    Args:
        classes: module classes (subclasses count too), or names of classes (``model._no_split_modules``).
        group: this many consecutive modules of one parent form one unit, as a list. For blocks that are too small to
            fill a collective.

    Raises:
        TypeError: an argument is neither a class nor a name.
        ValueError: the model has no module of any of these classes, or no module of a class whose name you passed.
    """
    kinds = tuple(c for c in classes if isinstance(c, type) and issubclass(c, nn.Module))
    names = {c for c in classes if isinstance(c, str)}
    if not classes or len(kinds) + sum(isinstance(c, str) for c in classes) < len(classes):
        raise TypeError(f"by_class expects module classes or their names, got {classes!r}")
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise ValueError(f"group must be a number of modules, at least 1, got {group!r}")

    def chosen(m: nn.Module) -> bool:
        return isinstance(m, kinds) or _class_of(m).__name__ in names

    def choose(tree: _Tree) -> None:
        there = {_class_of(m).__name__ for m in tree.model.modules()}
        missing = sorted(names - there)
        if missing or not any(chosen(m) for m in tree.model.modules()):
            class_names = missing or [c.__name__ for c in kinds]
            raise ValueError(
                f"by_class: {type(tree.model).__name__} has no module of class {', '.join(class_names)}; its modules "
                f"are of {', '.join(sorted(there))}"
            )
        chosen_modules = [m for m in tree.free() if chosen(m)]
        if group == 1:
            for m in chosen_modules:
                tree.choose([m])
            return
        waiting = {id(m) for m in chosen_modules}
        for parent in tree.model.modules():
            siblings = [m for m in parent.children() if id(m) in waiting]
            waiting.difference_update(id(m) for m in siblings)
            for start in range(0, len(siblings), group):
                tree.choose(siblings[start : start + group])

    return Policy(choose)


def by_predicate(predicate: Callable[[nn.Module], bool]) -> Policy:
    """Every module is a unit for which ``predicate(module)`` is true, as with FSDP1's ``lambda_auto_wrap_policy``.

    Raises:
        TypeError: ``predicate`` cannot be called, or is a class or a policy.
    """
    if not callable(predicate) or isinstance(predicate, (type, Policy)):
        raise TypeError(f"by_predicate expects a function of a module, got {predicate!r}")

    def choose(tree: _Tree) -> None:
        for m in tree.free():
            if predicate(m):
                tree.choose([m])

    return Policy(choose)


def by_size(minimum: int | str) -> Policy:
    """A module is a unit if the parameters below it that are in no inner unit reach ``minimum``.

    Inner modules are looked at first, as by FSDP1's ``size_based_auto_wrap_policy``; tied parameters count once.

    Args:
        minimum: a number of elements, or a number of bytes such as "64 MiB".

    Raises:
        ValueError: it is neither.
    """
    nbytes = bytes_in(minimum) if isinstance(minimum, str) else None
    if nbytes is None and (isinstance(minimum, (bool, str)) or not isinstance(minimum, int) or minimum < 1):
        raise ValueError(f'by_size expects a number of elements, or bytes such as "64 MiB", got {minimum!r}')

    def choose(tree: _Tree) -> None:
        for m in tree.free():
            left = tree.left_of(m)
            if nbytes is None:
                enough = sum(p.numel() for p in left) >= int(minimum)
            else:
                enough = bool(left) and sum(p.numel() * p.element_size() for p in left) >= nbytes
            if enough:
                tree.choose([m])

    return Policy(choose)


def as_policy(policy: Any) -> Policy:
    """A :class:`Policy` from an ``auto_wrap_policy`` of FSDP1.

    It may be a set (or another collection) of module classes, a function of a module, or a torch policy with the call
    ``policy(module=, recurse=, nonwrapped_numel=)``.

    Raises:
        TypeError: none of these.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, (set, frozenset, list, tuple)):
        return by_class(*policy)
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        return by_class(policy)
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            "expected a policy of sw.wrap, module classes, a function of a module, or a torch policy with arguments "
            f"module, recurse and nonwrapped_numel, got {policy!r}"
        )
    if "recurse" not in inspect.signature(policy).parameters:
        return by_predicate(policy)

    def choose(tree: _Tree) -> None:
        free = {id(m) for m in tree.free()}
        _follow_torch(tree.model, policy, free, tree, set())

    return Policy(choose)


def _follow_torch(module: nn.Module, policy: Any, free: set[int], tree: _Tree, seen: set[int]) -> int:
    """Run torch's protocol: ask whether to visit children, then whether the rest is a unit. Returns elements in
    units."""
    numel = sum(p.numel() for p in module.parameters())
    inside = 0
    if policy(module=module, recurse=True, nonwrapped_numel=numel):
        for child in module.children():
            if id(child) not in seen:
                seen.add(id(child))
                inside += _follow_torch(child, policy, free, tree, seen)
        if policy(module=module, recurse=False, nonwrapped_numel=numel - inside) and id(module) in free:
            tree.choose([module])
            return numel
    return inside


def auto_wrap(model: M, policy: Any, **options: Any) -> M:
    """Call :func:`~shardwright.fully_shard` on every unit of a policy and at last on the model, in place.

        sw.wrap.auto_wrap(model, sw.wrap.by_class(Block), mesh=mesh, memory="arena")

    Args:
        model: the whole model.
        policy: a policy of this module, or an argument of :func:`as_policy`.
        options: of ``fully_shard``. ``memory``, ``prefetch`` and ``strict`` go to the model, all others to every unit.

    Raises:
        ValueError: ``model`` is a container without a forward, and an option applies only to a whole model.
    """
    units = as_policy(policy)(
        model,
        ignored_modules=options.get("ignored_modules") or (),
        ignored_params=options.get("ignored_params") or (),
    )
    of_units = {name: value for name, value in options.items() if name not in _OF_ROOT}
    if len(of_units) < len(options) and not is_called(model):
        root_options = ", ".join(name for name in _OF_ROOT if name in options)
        raise ValueError(
            f"{root_options}: pass this to the call for the whole model; {type(model).__name__} has no forward"
        )
    for unit in units:
        fully_shard(unit, **(options if unit is model else of_units))
    return model


def is_called(module: nn.Module) -> bool:
    """Whether it has a forward. Containers such as ``nn.ModuleList`` have none."""
    return type(module).forward is not nn.Module.forward


def _class_of(module: nn.Module) -> type:
    return original_class(type(module)) if isinstance(module, FSDPModule) else type(module)
