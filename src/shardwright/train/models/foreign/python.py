"""A user's own model, made by a function at an import path, as a model of the trainer.

The function needs to return only a module whose forward turns token numbers into logits. The trainer
uses other methods of the model if it has them, and finds the rest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwright.context import Split, context_parallel
from shardwright.engine.extend import ExtensionError, call, import_value
from shardwright.train.config.shapes.foreign import PythonShape
from shardwright.train.errors import UserError, as_user_errors, did_you_mean
from shardwright.train.models.foreign.module import ForeignModel
from shardwright.train.models.foreign.units import Units, find_units
from shardwright.train.models.language_model import multiplied

EXPECTED = (
    "expected a function that returns a torch.nn.Module with forward(tokens): int64 [B, S] to float logits [B, S, V]. "
    "Its layers are in one torch.nn.ModuleList, or it has blocks(), a list of modules. It may have head(), a list of "
    "modules, and loss(batch), the mean loss over the targets of a batch"
)


class PythonModel(ForeignModel):
    """A user's model. Its parameters have the user's names after "model."."""

    draws = True
    whole_graph = False

    def __init__(self, shape: PythonShape) -> None:
        """Build the model, on the default device.

        Raises:
            UserError: the function cannot be imported or called, or the model lacks something. One error says what a
                model must offer.
        """
        super().__init__()
        self.config = shape
        self.model = _built(shape)
        problems = _problems(self.model)
        if problems:
            raise _refusal(shape, f"found {type(self.model).__name__} {'; '.join(problems)}")
        self.has_loss = _offered(self.model, "loss") is not None
        self.takes_positions = _takes_positions(self.model)
        self.units = _units(self.model, shape)
        self.tied = self.units.tied
        self._embedding = [m for m in self.model.modules() if isinstance(m, nn.Embedding)][:1]

    def forward(
        self,
        tokens_BS: Tensor,
        extras: bool = False,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        batch: Any = None,
    ) -> Any:
        """Logits [B, S, V] (or what the user's forward returns), or with a batch the user's loss, summed over its
        targets, 0-d."""
        if documents is not None:
            raise ValueError("this model does not separate documents; pass samples of one document each")
        if batch is not None:
            return self._loss(batch)
        takes = positions is not None and self.takes_positions
        logits = self.model(tokens_BS, **({"positions": positions} if takes else {}))
        return logits if isinstance(logits, Tensor) else getattr(logits, "logits", logits)

    def _loss(self, batch: Any) -> Tensor:
        # A mean over no target is not a number, nor is its gradient. Such a micro-batch gets targets and counts for
        # nothing. The host does not wait for the count.
        counted = (batch.targets >= 0).any()
        targets_BS = torch.where(counted, batch.targets, batch.inputs)
        loss = cast(Any, self.model).loss(replace(batch, targets=targets_BS))
        return _summed(self.config, loss, targets_BS) * counted

    def flops_per_token(self, seq_len: int) -> int:
        """Six for each parameter, without an embedding that is only looked up."""
        return 6 * multiplied(self.model, self._embedding[0] if self._embedding else None, self.tied)


def divide_samples(model: PythonModel, split: Split) -> None:
    """Let the ranks of a split divide the samples of a model."""
    with as_user_errors(ValueError, prefix="parallel.context: "):
        context_parallel(model.model, split)


def check(shape: PythonShape, config: object) -> None:
    """Refuse a job that the model cannot run. The model is built on the meta device for this.

    Raises:
        UserError: the model cannot be built, or lacks something.
    """
    with torch.device("meta"):
        PythonModel(shape)


def fingerprints(shape: PythonShape) -> dict[str, str]:
    """Return the digest of the file of `model.target`, under its name in messages. Empty if the file is not found;
    building the model says so."""
    module = shape.target.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return {}
        return {f"the file of {module}": hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()}
    except (ImportError, OSError, ValueError):
        return {}


def _refusal(shape: PythonShape, found: str) -> UserError:
    # The mistakes come first: the rest is the same for all of them.
    return UserError(f"model.target: {found} at {shape.target!r}; {EXPECTED}. See docs/models.md")


def _built(shape: PythonShape) -> nn.Module:
    with as_user_errors(ValueError):
        function = import_value("model.target", shape.target)
    if not callable(function):
        raise _refusal(shape, f"found {type(function).__name__}")
    arguments = _arguments(function, shape)
    with as_user_errors(ExtensionError):
        model = call(f"model.target: {shape.target!r}", lambda: function(**arguments))
    if not isinstance(model, nn.Module):
        raise _refusal(shape, f"found a function that returns {type(model).__name__}")
    return model


def _arguments(function: Callable[..., Any], shape: PythonShape) -> dict[str, Any]:
    """Return the keyword arguments of the user's function.

    Raises:
        UserError: it does not have one of `model.arguments`, or needs another one.
    """
    arguments: dict[str, Any] = dict(shape.arguments)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return arguments
    sizes = {"vocab_size": shape.vocab_size, "max_seq_len": shape.max_seq_len}
    arguments |= {
        key: size for key, size in sizes.items() if key in signature.parameters and size is not None
    }
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"model.arguments: {shape.target}{signature} cannot be called with "
            f"{', '.join(arguments) or 'no arguments'}: {error}{_way_out(signature, shape)}"
        ) from None
    return arguments


def _way_out(signature: inspect.Signature, shape: PythonShape) -> str:
    """Return what to change so that the user's function can be called, as the end of a message."""
    length = signature.parameters.get("max_seq_len")
    if length is not None and length.default is length.empty and shape.max_seq_len is None:
        return "; set model.max_seq_len, the longest sequence in tokens, which has no default"
    unknown = [key for key in shape.arguments if key not in signature.parameters]
    near = did_you_mean(unknown[0], list(signature.parameters)) if unknown else ""
    return near or "; correct [model.arguments]"


def _problems(model: nn.Module) -> list[str]:
    """Properties of a model that the trainer cannot use, in words."""
    problems = []
    if (
        type(model).forward is nn.Module.forward
    ):  # the placeholder of nn.Module, which raises NotImplementedError
        problems.append("without a forward")
    else:
        problems += _misfit("forward", model.forward, "tokens")
    if (loss := _offered(model, "loss")) is not None:
        problems += _misfit("loss", loss, "batch")
    for name in ("blocks", "head"):
        function = _offered(model, name)
        if function is None:
            continue
        misfits = _misfit(name, function)
        if misfits:
            problems += misfits
            continue
        own = set(model.modules())
        modules = function()
        if not isinstance(modules, list | tuple) or not modules or not all(m in own for m in modules):
            problems.append(
                f"whose {name}() returns {_in_words(modules)}, not a list of modules of the model"
            )
    if (output := _offered(model, "output_layer")) is not None:
        misfits = _misfit("output_layer", output)
        if not misfits and output() not in set(model.modules()):
            misfits = [f"whose output_layer() returns {_in_words(output())}, not a module of the model"]
        problems += misfits
    return problems


def _takes_positions(model: nn.Module) -> bool:
    try:
        return "positions" in inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False


def _misfit(name: str, function: Any, *arguments: str) -> list[str]:
    if not callable(function):
        return [f"whose {name} is {type(function).__name__}, not a function"]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return [f"whose {name}{inspect.signature(function)} does not take ({', '.join(arguments)}): {error}"]
    except ValueError:
        pass
    return []


def _in_words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(dict.fromkeys(type(each).__name__ for each in value)) or 'nothing'}"
    return type(value).__name__


def _offered(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a method that the model offers. A module of that name is a part of the model."""
    value = getattr(model, name, None)
    return None if value is None or isinstance(value, nn.Module) else value


def _units(model: nn.Module, shape: PythonShape) -> Units:
    blocks, head = _offered(model, "blocks"), _offered(model, "head")
    own = list(blocks()) if blocks is not None and not shape.blocks else None
    output = _offered(model, "output_layer")
    units = find_units(
        model,
        shape.blocks,
        output=output() if output is not None else None,
        blocks=own,
        way=", or give the model a method blocks() that returns its layers as a list",
    )
    return units if head is None else replace(units, head=list(head()))


def _summed(shape: PythonShape, loss: Any, targets_BS: Tensor) -> Tensor:
    """Return the sum over all targets of a loss: a mean over them, 0-d, or one value for each.

    Raises:
        ExtensionError: it is neither.
    """
    if isinstance(loss, Tensor) and loss.is_floating_point():
        loss = loss.float()  # the product with the count would be rounded in bfloat16
        if loss.ndim == 0:
            return loss * (targets_BS >= 0).sum()
        if loss.numel() == targets_BS.numel():
            return loss.sum()
    shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ExtensionError(
        f"loss(batch) of the model of {shape.target!r} returned {shown} for targets of shape {list(targets_BS.shape)}; "
        "expected the mean loss over the targets that are not -100, a float tensor without dimensions, or the loss of "
        "each target"
    )
