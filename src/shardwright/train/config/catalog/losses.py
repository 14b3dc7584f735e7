"""Losses that have a name, for `[train] loss`. Nothing here imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

from shardwright.engine.extend import Registry

#: The value of the key with which a model's own loss is used where it has one, and else the cross-entropy.
AUTO = "auto"
BUILT_IN = (AUTO, "cross_entropy", "z_loss")  #: losses whose functions ``step/losses.py`` has


@dataclass(frozen=True)
class NamedLoss:
    """A loss of tokens.

    Attributes:
        name: by which `[train] loss` knows it.
        summary: what it is, in a sentence.
        function: from logits [T, V] (float32, whole also where tensor parallelism cuts them) and targets [T] (int64) to
            the loss of each token, float [T]. With `train.loss_chunks` it gets the tokens of one chunk. Values of
            `[train] loss_arguments` are further arguments, by name. None: a loss of this package, which
            ``step/losses.py`` knows.
        arguments: for a loss of this package, by name, the default of an argument and its least and largest value.
    """

    name: str
    summary: str
    function: Callable[..., Any] | None = None
    arguments: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.function is None and self.name not in BUILT_IN:
            raise ValueError(
                f"NamedLoss {self.name!r}: expected a function of logits and targets, found None"
            )

    def arguments_problem(self, values: Mapping[str, object]) -> str | None:
        """Return the mistake in these values of `[train] loss_arguments`, in a line; None without one."""
        if self.function is not None:
            try:
                inspect.signature(self.function).bind("logits", "targets", **values)
            except TypeError as error:
                return f"loss_arguments: the loss {self.name!r} cannot be called with them: {error}"
            except ValueError:
                return None  # a function written in C, without a readable signature
            return None
        for key, value in values.items():
            if key not in self.arguments:
                names = ", ".join(self.arguments) or "none"
                return (
                    f"loss_arguments.{key}: loss {self.name!r} has no such argument; its arguments: {names}"
                )
            default, least, most = self.arguments[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                return (
                    f"loss_arguments.{key}: expected a number from {least:g} to {most:g}, such as "
                    f"{default or most / 10:g}, found {value!r}"
                )
        return None


class LossRegistry(Registry[NamedLoss]):
    """Losses by name. At an import path there may also be the function itself."""

    def _imported(self, name: str, point: EntryPoint) -> NamedLoss:
        value = self._load(name, point)
        if callable(value) and not isinstance(value, type | NamedLoss):
            summary = (inspect.getdoc(value) or "A function of the user.").partition("\n")[0]
            return NamedLoss(name, summary, value)
        return super()._imported(name, point)


losses = LossRegistry(
    "loss",
    "losses",
    NamedLoss,
    (
        NamedLoss(AUTO, "The model's own loss where it has one, else cross_entropy."),
        NamedLoss(
            "cross_entropy", "The cross-entropy of each token with the next one.",
            arguments={"label_smoothing": (0.0, 0.0, 1.0)},
        ),
        NamedLoss(
            "z_loss", "Cross-entropy, and weight times the squared logarithm of the softmax's denominator.",
            arguments={"weight": (1e-4, 0.0, 1.0)},
        ),
    ),
)  # fmt: skip
