"""The verdict on one sample with sharded parameters: equal, refused, a bare error, or wrong."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.engine.operations.sharding import cut_alike, like, sharded, whole
from tests.engine.operations.table import WITHOUT_VALUES, Form, Outcome, Sample, rebuilt, results, run

#: Verdicts by letter, the worst last. The last three are given by the parent of the ranks.
VERDICTS = {
    "=": "equal",
    "p": "placement",  # equal, but a gradient is not sharded as its parameter is
    "r": "refused",
    "b": "bare error",
    "d": "differs by rank",
    "h": "hang",
    "c": "crash",
    "W": "wrong",
}
_WAYS_OUT = re.compile(r"full_tensor\(\)|unsharded\(|unshard\(\)|Write `|instead|layout=")
_PARAMETER = re.compile(r"'p\d+' of unit")


class Wrong(Exception):
    """A result that differs from the plain tensors'."""


class Misplaced(Exception):
    """A gradient that is not sharded as its parameter is."""


def judge(sample: Sample, form: Form, layout: str, mesh: Any, kept: dict[str, Any]) -> tuple[str, str]:
    """The letter of the verdict, and a text for all but equal ones.

    ``kept`` has the sample's sharded parameters by layout, from one call to the next. An operation that writes into
    its arguments gets others.
    """
    try:
        _check(sample, form, layout, mesh, kept)
    except Wrong as error:
        return "W", str(error)
    except Misplaced as error:
        return "p", str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return ("r" if _is_named(text, sample) else "b"), text
    return "=", ""


def _is_named(text: str, sample: Sample) -> bool:
    operation = "aten." in text or sample.op.name.rpartition(".")[2] in text
    return operation and bool(_PARAMETER.search(text)) and bool(_WAYS_OUT.search(text))


def _check(sample: Sample, form: Form, layout: str, mesh: Any, kept: dict[str, Any]) -> None:
    expected = sample.expected[form.kind]
    assert expected is not None
    gradient = form.kind == "value"
    tensors, needs = sample.tensors, sample.needs_gradient if gradient else [False] * len(sample.tensors)
    chosen = [i for i in range(len(tensors)) if form.which in ("all", i)]
    arguments: list[Any] = sample.copies(gradient)
    outs: list[Any] = []
    if gradient and not sample.changes_arguments:
        if layout not in kept:
            kept[layout] = sharded(tensors, needs, layout, mesh)
        holder, parameters = kept[layout]
        parameters = [parameters[i] for i in chosen]
    else:
        blank = [torch.zeros_like(t) for t in results(expected.result)] if form.kind == "out" else []
        cut = [tensors[i] for i in chosen] + blank
        holder, parameters = sharded(cut, [needs[i] for i in chosen] + [False] * len(blank), layout, mesh)
        outs = parameters[len(chosen) :]
    for place, parameter in zip(chosen, parameters, strict=False):
        parameter.grad = None
        arguments[place] = parameter
    weight = like if gradient else None
    outcome = run(sample, form.kind, arguments, weight, rebuilt(expected.result, outs) if outs else None)
    with torch.no_grad():
        _compare(sample, form, expected, outcome)
        if outs:
            _equal("out", outs, results(expected.result), sample)
    if layout != "FSDP2":
        for i in chosen if gradient else []:
            found = arguments[i].grad
            if found is not None and not cut_alike(found, arguments[i]):
                raise Misplaced(
                    f"the gradient of argument {i} is {_placed(found)}, and the argument {_placed(arguments[i])}"
                )
    del holder


def _placed(tensor: Any) -> str:
    return f"{type(tensor).__name__} {getattr(tensor, 'placements', getattr(tensor, 'spec', ''))}"


def _compare(sample: Sample, form: Form, expected: Outcome, outcome: Outcome) -> None:
    _equal("result", results(outcome.result), results(expected.result), sample)
    if form.kind == "in place":
        _equal("argument", outcome.arguments, expected.arguments, sample)
    for i, (found, wanted) in enumerate(zip(outcome.gradients, expected.gradients, strict=True)):
        if found is None and wanted is None:
            continue
        shape = outcome.arguments[i].shape
        zeros = torch.zeros(shape, dtype=outcome.arguments[i].dtype)
        _equal(
            f"gradient {i}",
            [zeros if found is None else found],
            [zeros if wanted is None else wanted],
            sample,
        )
    if not torch.equal(outcome.generator, expected.generator):
        raise Wrong("the generator is in another state")


def _equal(name: str, found: list[Any], wanted: list[Any], sample: Sample) -> None:
    if len(found) != len(wanted):
        raise Wrong(f"{name}: {len(found)} values in place of {len(wanted)}")
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, torch.Tensor):
            if one != other and not (one != one and other != other):
                raise Wrong(f"{name}: {one} in place of {other}")
            continue
        if not isinstance(one, torch.Tensor):
            raise Wrong(f"{name}: {type(one).__name__} in place of a tensor")
        one, other = whole(one), other.detach()
        if one.shape != other.shape or one.dtype != other.dtype:
            raise Wrong(
                f"{name}: {one.dtype} {tuple(one.shape)} in place of {other.dtype} {tuple(other.shape)}"
            )
        if sample.op.name in WITHOUT_VALUES or not name:
            continue
        if other.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        # Sums over ranks add in another order. Gradients of some decompositions are large where values are small.
        scale = (
            float(other[other.isfinite()].abs().max())
            if other.dtype.is_floating_point and other.isfinite().any()
            else 1
        )
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-5 * max(scale, 1), equal_nan=True):
            raise Wrong(f"{name}: {_short(one)} in place of {_short(other)}")


def _short(tensor: torch.Tensor) -> str:
    return re.sub(r"\s+", " ", str(tensor.flatten()[:6].tolist())) + f" of shape {tuple(tensor.shape)}"
