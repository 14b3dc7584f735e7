"""Embeddings that get another number of rows after ``fully_shard``: ``resize_token_embeddings`` of language models.

The model's own method runs while its embeddings are full. Then every rank gets the result of the first rank.
``whole.py`` makes parameters full and writes changes back.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from shardwright.engine.assembly.find import UNIT
from shardwright.engine.assembly.states import TakenTensor, sync_states
from shardwright.engine.collective import RankGroup
from shardwright.engine.front.whole import Options, Shown, showing
from shardwright.engine.tensors.parameter import STANDS_FOR, Managed
from shardwright.engine.unit.owning import settle, units_of
from shardwright.engine.unit.unit import Unit

_METHOD = "resize_token_embeddings"


def resizes(cls: type) -> dict[str, Any]:
    """Attributes for a class in front of ``cls``, if ``cls`` can resize its embeddings."""
    original = getattr(cls, _METHOD, None)
    if not callable(original):
        return {}

    @functools.wraps(original)
    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _resize(self, getattr(cls, _METHOD), args, kwargs)

    return {_METHOD: resize_token_embeddings}


def _resize(model: nn.Module, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model's own method on every rank, while the modules show full parameters of all embeddings."""
    unit: Unit = model.__dict__[UNIT]
    embeddings = _embeddings(model)
    before = _parameters(embeddings)
    if not any(isinstance(getattr(p, STANDS_FOR, p), Managed) for _, p in before):
        return original(model, *args, **kwargs)
    _refuse_different_sizes(unit, args, kwargs)
    modules = list(dict.fromkeys(m for top in embeddings for m in top.modules()))
    with showing(model, modules, Options(True, False, False, False), _refuse_unfit):
        earlier_ids = {id(p) for _, p in _parameters(embeddings)}
        failure: Exception | None = None
        try:
            result = original(model, *args, **kwargs)
        except Exception as error:
            failure = error
        _raise_everywhere(unit, failure)
        after = _parameters(_embeddings(model))
        # Each rank has drawn new rows from its own generator, so send those of the first rank.
        new_states = [
            TakenTensor(name, p) for name, p in after if STANDS_FOR in p.__dict__ or id(p) not in earlier_ids
        ]
        sync_states(unit.mesh, unit.ranks.device, new_states, unit.name)
    for each in units_of(model):
        settle(each)
    return result


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """Modules whose parameters have a row for each token: all embeddings, and modules that a model returns as such."""
    embeddings: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings[module] = None
        for name in ("get_input_embeddings", "get_output_embeddings"):
            try:
                each = getattr(module, name)()
            except (AttributeError, NotImplementedError):  # as of a vision tower
                continue
            if isinstance(each, nn.Module):
                embeddings[each] = None
    return list(embeddings)


def _parameters(modules: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The parameters, each once, with a name for messages."""
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for top in modules:
        for module_name, module in top.named_modules(prefix=type(top).__name__):
            for name, p in module._parameters.items():
                if p is not None:
                    named.setdefault(id(p), (f"{module_name}.{name}", p))
    return list(named.values())


def _refuse_different_sizes(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    numbers = [each for each in (*args, *kwargs.values()) if each is None or isinstance(each, int)]
    ranks = RankGroup.of_mesh(unit.mesh)
    ranks.check_equal(
        ranks.all_gather(numbers, "states"),
        lambda others, theirs, first: ValueError(
            f"{_METHOD} of {unit.name!r} was called with {first} on rank {ranks.numbers[0]} and with {theirs} on rank "
            f"{others[0]}. Give the same arguments on every rank."
        ),
    )


def _raise_everywhere(unit: Unit, failure: Exception | None) -> None:
    """If the call has failed on a rank, this rank raises its exception, and the others raise an error that names it."""
    for rank, text in RankGroup.of_mesh(unit.mesh).failures_of_others(failure):
        raise RuntimeError(
            f"{_METHOD} of {unit.name!r} failed on rank {rank} ({text}), so the embeddings of the ranks differ now. "
            "Load the model again."
        )


def _refuse_unfit(shown: list[Shown]) -> None:
    for each in shown:
        where = f"{_METHOD}: parameter {each.p.name!r} of unit {each.unit.name!r}"
        if each.p.cut.parallel is not None:
            raise NotImplementedError(
                f"{where} is tensor-parallel, so it cannot be cut again. Resize the embeddings before the model is "
                "parallelised and sharded."
            )
        if each.p.sharded.grad is not None or each.unit.gradients.held:
            raise RuntimeError(
                f"{where} has a gradient, which would have another shape than the resized parameter. Call "
                "zero_grad() before the resize, and build the optimizer after it."
            )
        if each.unit.stepping is not None:
            raise RuntimeError(
                f"An optimizer of sw.optim.in_backward steps {where} in backward. Resize before you build this "
                "optimizer."
            )
