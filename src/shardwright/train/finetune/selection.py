"""The layers that get adapters, and the parameters that are trained in full: patterns against names of a model.

Nothing here changes a model. A pattern fits a whole name, or the end of a name after a dot.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.errors import UserError

#: Last parts of the names of layers that choose experts.
ROUTERS = ("router", "gate", "shared_expert_gate")


def fits(name: str, pattern: str) -> bool:
    """Return whether a pattern, such as "wq" or "layers.0.*", fits a dotted name."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks: what its method `blocks` returns, else the members of its outermost lists of modules.

    A model without either is one block.
    """
    method = getattr(model, "blocks", None)
    if callable(method) and not isinstance(method, nn.Module):  # a list of modules is callable, too
        return list(method())
    blocks: list[nn.Module] = []
    pending: list[nn.Module] = [model]
    while pending:
        module = pending.pop()
        if isinstance(module, nn.ModuleList):
            blocks += list(module)
        else:
            pending += module.children()
    return blocks or [model]


def layers_to_adapt(model: nn.Module, settings: FinetuneConfig) -> dict[str, nn.Linear]:
    """By name, the linear layers that get adapters, in the model's order.

    Raises:
        UserError: a pattern fits no layer, or one that can have no adapter; or a layer is too small for the rank.
    """
    layers = _chosen(model, settings) if settings.targets else _all_in_blocks(model)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, layer in layers.items():
        outputs, inputs = layer.weight.shape
        if settings.rank > min(outputs, inputs):
            raise UserError(
                f"finetune.rank: expected at most {min(outputs, inputs)}, the smaller side of {name!r} "
                f"({outputs} x {inputs}), found {settings.rank}; choose a smaller rank, or leave the layer out of "
                "finetune.targets"
            )
        others = [other for other in owners[id(layer.weight)] if other != f"{name}.weight"]
        if others:
            raise UserError(
                f"finetune.targets: expected layers with weights of their own, found {name!r}, which shares its "
                f"weight with {others[0]!r}; an adapter would change only one of them. Leave it out, or train it in "
                "full with finetune.train_also"
            )
    return layers


def _all_in_blocks(model: nn.Module) -> dict[str, nn.Linear]:
    inside = {id(module) for block in blocks_of(model) for module in block.modules()}
    layers = {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear) and not _is_router(name)
    }
    layers = {
        name: layer
        for name, layer in layers.items()
        if not (is_mamba_output(model, name) or _is_mamba_step(model, name)) and _is_linear(layer)
    }
    if not layers:
        kinds = _matrix_kinds(model, inside)
        raise UserError(
            "finetune.method: expected blocks with torch.nn.Linear layers, found none"
            + (
                f"; their matrices are in {', '.join(kinds)}, which can have no adapters here"
                if kinds
                else ""
            )
            + ". Use method = 'full'"
        )
    return layers


def _is_router(name: str) -> bool:
    return any(part in ROUTERS for part in name.split("."))


def is_mamba_output(model: nn.Module, name: str) -> bool:
    """Return whether a layer is the output projection of a Mamba layer.

    Fused kernels use its weight without calling it, and peft refuses to put an adapter there.
    """
    owner, _, last = name.rpartition(".")
    return last == "out_proj" and "a_log" in _own_parameters(model, owner)


def _is_mamba_step(model: nn.Module, name: str) -> bool:
    """Return whether a layer makes the step sizes of a Mamba layer, which uses its weight without calling it."""
    owner, _, last = name.rpartition(".")
    return last == "dt_proj" and "a_log" in _own_parameters(model, owner)


def _own_parameters(model: nn.Module, owner: str) -> set[str]:
    return {each.lower() for each, _ in model.get_submodule(owner).named_parameters(recurse=False)}


def _is_linear(layer: nn.Linear) -> bool:
    """Return whether a layer makes one row of outputs of each row of inputs, as the adapter beside it does.

    A class with a forward of its own may not: layers of transformers with weights by groups take inputs by groups.
    """
    if type(layer).forward is nn.Linear.forward:
        return True
    probe = copy.copy(layer)
    probe._parameters = {
        name: None if each is None else nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device="meta"))
        for name, each in layer._parameters.items()
    }
    rows = torch.empty(1, 3, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        with torch.no_grad():
            return bool(type(layer).forward(probe, rows).shape == (1, 3, layer.out_features))
    except Exception:  # of code that is not ours
        return False


def _matrix_kinds(model: nn.Module, inside: set[int]) -> list[str]:
    """Classes of the modules of blocks that hold matrices themselves."""
    kinds = {
        type(module).__name__ for module in model.modules() if id(module) in inside and _matrices(module)
    }
    return sorted(kinds)


def _matrices(module: nn.Module) -> list[str]:
    return [f"{name} {list(p.shape)}" for name, p in module.named_parameters(recurse=False) if p.ndim >= 2]


def _chosen(model: nn.Module, settings: FinetuneConfig) -> dict[str, nn.Linear]:
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    for pattern in settings.targets:
        matches = {name: modules[name] for name in modules if fits(name, pattern)}
        linear = [name for name, module in matches.items() if isinstance(module, nn.Linear)]
        others = [name for name in matches if name not in linear]
        # A pattern that ends in a wildcard fits modules of every kind. One that ends in a name means that name.
        literal = not set("*?[") & set(pattern.rpartition(".")[2])
        if others and (literal or not linear):
            raise UserError(_not_linear(pattern, others, matches))
        if not linear:
            raise UserError(
                f"finetune.targets: expected patterns of linear layers, found {pattern!r}, which fits none; "
                + _nearest(pattern, [name for name, m in modules.items() if isinstance(m, nn.Linear)])
            )
        router = next((name for name in linear if name.rpartition(".")[2] == "router"), None)
        if router is not None:
            if literal:
                raise UserError(
                    f"finetune.targets: expected linear layers that forward calls, found {pattern!r}, which fits the "
                    f"router {router!r}; its weight is used directly. Train it in full: finetune.train_also = "
                    f"[{pattern + '.*'!r}]"
                )
            linear = [name for name in linear if name.rpartition(".")[2] != "router"]
        for name in list(linear):
            why = (
                "whose weight a Mamba layer uses directly"
                if _is_mamba_step(model, name)
                else f"a {type(modules[name]).__name__}, which takes inputs by groups"
                if not _is_linear(modules[name])  # type: ignore[arg-type]
                else ""
            )
            if why and literal:
                raise UserError(
                    f"finetune.targets: expected linear layers that forward calls row by row, found {pattern!r}, which "
                    f"fits {name!r}, {why}. Leave it out, or train it in full: finetune.train_also = "
                    f"[{pattern + '.*'!r}]"
                )
            if why:
                linear.remove(name)
        chosen.update(linear)
    return {name: modules[name] for name in modules if name in chosen}  # type: ignore[misc]


def _not_linear(pattern: str, others: list[str], matches: Mapping[str, nn.Module]) -> str:
    name = next((name for name in others if _matrices(matches[name])), others[0])
    module = matches[name]
    matrices = _matrices(module)
    if matrices:
        what = f"a {type(module).__name__} with {', '.join(matrices)}"
    else:
        inside = [child for child, m in module.named_modules() if isinstance(m, nn.Linear)]
        what = f"a {type(module).__name__} without a matrix"
        if inside:
            what += f"; its linear layers are {_some(inside)}: write {pattern + '.*'!r} for all of them"
            return (
                f"finetune.targets: expected torch.nn.Linear, found {pattern!r}, which fits {name!r}, {what}"
            )
    return (
        f"finetune.targets: expected torch.nn.Linear, found {pattern!r}, which fits {name!r}, {what}; adapters need "
        f"torch.nn.Linear. Leave it out, or train it in full: finetune.train_also = [{pattern + '.*'!r}]"
    )


def parameters_to_train(model: nn.Module, settings: FinetuneConfig) -> list[str]:
    """Return the names of the parameters that are trained in full; a tied one under its first name.

    Raises:
        UserError: a pattern fits no parameter.
    """
    names = _first_names(model)
    chosen = _matching(names, settings.train_also, "finetune.train_also")
    return [name for name in dict.fromkeys(names.values()) if name in chosen]


def parameters_to_freeze(model: nn.Module, settings: FinetuneConfig) -> list[nn.Parameter]:
    """Return the parameters that `freeze` names, or all that `train_only` does not name.

    A pattern fits the name of a parameter, or of a module that has it.

    Raises:
        UserError: a pattern fits none, or no parameter would be trained.
    """
    if not (settings.freeze or settings.train_only):
        return []
    names = _first_names(model)
    key = "finetune.freeze" if settings.freeze else "finetune.train_only"
    chosen = _matching(names, settings.freeze or settings.train_only, key, modules=True)
    frozen = {name for name in names.values() if (name in chosen) == bool(settings.freeze)}
    parameters = dict(model.named_parameters())
    if not any(p.requires_grad for name, p in parameters.items() if name not in frozen):
        raise UserError(f"{key}: expected a parameter that is trained, found none; leave some of them out")
    return [p for name, p in parameters.items() if name in frozen]


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the name of each parameter, and the first name of the same one, which has others where weights are
    tied."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _matching(names: Mapping[str, str], patterns: Iterable[str], key: str, modules: bool = False) -> set[str]:
    """Return the first names of the parameters that patterns fit. With `modules` a pattern may fit a module that has
    them.

    Raises:
        UserError: a pattern fits no parameter.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [
            own for name, own in names.items() if any(fits(each, pattern) for each in _within(name, modules))
        ]
        if not matches:
            raise UserError(
                f"{key}: expected patterns of parameters, found {pattern!r}, which fits none; "
                + _nearest(pattern, list(names))
            )
        chosen.update(matches)
    return chosen


def _within(name: str, modules: bool) -> list[str]:
    """Return the name of a parameter, and those of the modules that have it."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)] if modules else [name]


def _nearest(pattern: str, names: list[str]) -> str:
    """Return a hint with the names most like a pattern."""
    if not names:
        return "the model has none"
    wanted = pattern.strip("*?.")
    ends = list(dict.fromkeys(name.split(".", depth)[-1] for depth in (9, 2) for name in names))
    ends += [".".join(name.split(".")[-2:]) for name in names]
    near = difflib.get_close_matches(wanted, list(dict.fromkeys([*ends, *names])), 3, cutoff=0.5)
    if not near:  # a part of a name, such as "nrom" of "norm.weight"
        parts = {part: end for end in reversed(ends) for part in end.split(".")}
        near = [parts[part] for part in difflib.get_close_matches(wanted, list(parts), 3, cutoff=0.6)]
    if near:
        return f"near names: {', '.join(near)}"
    lasts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return f"there are {_some(lasts if len(lasts) > 2 else dict.fromkeys(ends))}"


def _some(names: Iterable[str], limit: int = 6) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
