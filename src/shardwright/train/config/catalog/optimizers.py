"""Optimizers that have a name, for `[optimizer] name`: how each is made, and what it needs of parameters.

Nothing here imports torch before an optimizer is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shardwright.engine.extend import ExtensionError, Registry, call, check_signature

if TYPE_CHECKING:
    import torch

    from shardwright.optim import Needs

    Parameters = list[tuple[str, torch.nn.Parameter]]
    Make = Callable[[Parameters, Parameters, "OptimizerSettings"], torch.optim.Optimizer]


class OptimizerSettings(Protocol):
    """The values of `[optimizer]` of which an optimizer is made."""

    @property
    def lr(self) -> float: ...

    @property
    def betas(self) -> tuple[float, float]: ...

    @property
    def eps(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def momentum(self) -> float: ...

    @property
    def ns_steps(self) -> int: ...

    @property
    def options(self) -> Mapping[str, bool | int | float | str]:
        """The options that the configuration sets, without the defaults."""
        ...


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer.

    Attributes:
        name: by which `[optimizer] name` knows it.
        summary: what it does, in a sentence.
        make: makes it of the named parameters that are decayed, of those that are not, and of the section's values.
        needs: what it needs of a parameter in one piece, as ``fully_shard_optimizer`` takes it. None: its class says so
            by ``shard_needs``, or is one of torch's.
        whole: in a word, what must not be cut ("matrices", "blocks"); empty: each element is updated alone.
        in_backward: whether it can step within backward.
        any_gradients: whether it takes gradients in bfloat16.
        options: by key of `[optimizer.options]`, the defaults of what it has beside the section's keys.
        by_layer: whether it does the same for the parameters of each layer, so that a plan of many layers can be made
            from plans of few.
        stays_on_flag: whether its step changes nothing, neither weights nor state, where its attribute ``found_inf`` is
            1, a float32 tensor on the device, as ``torch.amp.GradScaler`` sets it.
    """

    name: str
    summary: str
    make: Make
    needs: Needs | None = None
    whole: str = ""
    in_backward: bool = True
    any_gradients: bool = False
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    by_layer: bool = False
    stays_on_flag: bool = False

    def __post_init__(self) -> None:
        blocks = isinstance(self.needs, int) and not isinstance(self.needs, bool) and self.needs >= 1
        if not blocks and not callable(self.needs) and self.needs not in (None, "tensor"):
            raise ValueError(
                f'NamedOptimizer {self.name!r}: expected needs to be "tensor", a number of elements >= 1, a function '
                f"from a parameter to one of these, or None; found {self.needs!r}"
            )
        if callable(self.needs):
            check_signature(f"NamedOptimizer {self.name!r}: needs", self.needs, "parameter")
        check_signature(f"NamedOptimizer {self.name!r}: make", self.make, "decayed", "others", "settings")

    def build(
        self, decayed: Parameters, others: Parameters, settings: OptimizerSettings
    ) -> torch.optim.Optimizer:
        """Return the optimizer that ``make`` makes.

        Raises:
            ExtensionError: ``make`` raised an error, or returned something other than an optimizer.
        """
        import torch

        owner = f"The function make of optimizer {self.name!r}"
        optimizer = call(owner, self.make, decayed, others, settings)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ExtensionError(
                f"{owner} returned {optimizer!r} ({type(optimizer).__name__}); expected a torch.optim.Optimizer"
            )
        return optimizer

    def options_problem(self, options: Mapping[str, object]) -> str | None:
        """Return the mistake in these values of `[optimizer.options]`, in a line; None without one."""
        for key, value in options.items():
            if key not in self.options:
                names = ", ".join(self.options) or "none"
                return f"options.{key}: optimizer {self.name!r} has no such option; its options: {names}"
            kind = type(self.options[key])
            if type(value) is not kind and not (kind is float and type(value) is int):
                return f"options.{key}: expected a value like {self.options[key]!r}, found {value!r}"
        return None


def _adamw(decayed: Parameters, others: Parameters, settings: OptimizerSettings) -> torch.optim.Optimizer:
    import torch

    groups: list[dict[str, Any]] = [
        {"params": [parameter for _, parameter in decayed]},
        {"params": [parameter for _, parameter in others], "weight_decay": 0.0},
    ]
    # The fused kernel is asked for with every engine, so that losses compare.
    return torch.optim.AdamW(
        groups, settings.lr, settings.betas, settings.eps, settings.weight_decay, fused=True
    )


def _groups(decayed: Parameters, others: Parameters) -> list[dict[str, Any]]:
    """Groups of named parameters. torch refuses a group of no names beside one with names, so none is empty."""
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adamw8bit(decayed: Parameters, others: Parameters, settings: OptimizerSettings) -> torch.optim.Optimizer:
    from shardwright.optim import AdamW8bit

    return AdamW8bit(
        _groups(decayed, others), settings.lr, settings.betas, settings.eps, settings.weight_decay
    )


def _muon(decayed: Parameters, others: Parameters, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Both rules have one rate and one decay, since Muon's updates are scaled to AdamW's."""
    from shardwright.optim import Muon

    return Muon(
        _groups(decayed, others),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        ns_steps=settings.ns_steps,
        adjust_lr_fn="match_rms_adamw",
        adamw={
            "lr": settings.lr,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "fused": True,
        },
    )


optimizers: Registry[NamedOptimizer] = Registry(
    "optimizer",
    "optimizers",
    NamedOptimizer,
    (
        NamedOptimizer("adamw", "AdamW, torch's fused kernel.", _adamw, by_layer=True, stays_on_flag=True),
        NamedOptimizer(
            "adamw8bit", "AdamW with a quarter of the state's memory.", _adamw8bit, whole="blocks", any_gradients=True,
            by_layer=True,
        ),
        NamedOptimizer(
            "muon", ("Muon for the matrices inside blocks, with updates scaled to AdamW's, and AdamW for all other "
                "parameters."),
            _muon, whole="matrices", in_backward=False,
        ),
    ),
)  # fmt: skip
