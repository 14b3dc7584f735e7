"""Muon for the hidden matrices and AdamW for everything else, as one optimizer.

``torch.optim.Muon`` and ``torch.optim.AdamW`` do the arithmetic. This file decides which parameter gets which. It does
not know sharding: :func:`fully_shard_optimizer` calls ``shard_needs`` and does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from shardwright.engine.compat import step_without_hooks
from shardwright.optim.needs import Need, newton_schulz_cost
from shardwright.optim.whole.updates import Updates, muon_updates

#: Names of output layers. Modules with a number in their path are not output layers, since they are in repeated blocks.
_OUTPUTS = {
    "classifier",
    "head",
    "heads",
    "lm_head",
    "logits",
    "output",
    "output_layer",
    "output_projection",
    "score",
}
_EMBEDDINGS = {"emb", "wpe", "wte"}  #: also names that contain "embed"


class Muon(Optimizer):
    """Muon (Jordan 2024, kellerjordan.github.io/posts/muon) on hidden matrices, AdamW on all other parameters.

        optimizer = sw.Muon(model.named_parameters(), lr=0.02, adamw=dict(lr=3e-4, betas=(0.9, 0.95)))
        optimizer = sw.fully_shard_optimizer(optimizer)  # for a sharded model

    On one device the result equals that of ``torch.optim.Muon`` and ``torch.optim.AdamW`` side by side. With equal
    gradients a sharded model gets the same result, bit for bit.

    **Which parameter gets which.** Names decide, so pass ``model.named_parameters()``: parameters of two dimensions go
    to Muon, except embeddings (a part of the name holds "embed" or is "emb", "wte" or "wpe") and output layers (a part
    of the name is "head", "lm_head", "output", "classifier" or the like, and none is a number, as it is inside repeated
    blocks). All other parameters go to AdamW. To decide yourself, or without names, pass groups with a key "muon":

        sw.Muon([{"params": matrices, "muon": True}, {"params": others, "muon": False, "weight_decay": 0.0}])

    All ``param_groups`` have this key. A group that you pass without it becomes one or two groups, matrices first.
    Groups with ``muon=True`` have the options of ``torch.optim.Muon``, the other groups those of ``torch.optim.AdamW``.

    Args:
        params: named parameters, parameters, or groups of either.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: of ``torch.optim.Muon``.
            With ``adjust_lr_fn="match_rms_adamw"`` (arXiv 2502.16982) updates are scaled to AdamW's, so that both can
            have the same learning rate and weight decay. By default they are scaled as in Jordan's post.
        adamw: options of ``torch.optim.AdamW`` for the other parameters. Default: torch's defaults.

    Raises:
        ValueError: an option is out of range; a matrix has neither a name nor a group with "muon"; a group has
            ``muon=True`` and a parameter that is not a matrix, or options that both optimizers have.
        TypeError: ``adamw`` has an option that AdamW does not.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        # torch's own classes check the options. The parameters for this check are never stepped.
        muon: Any = torch.optim.Muon  # its lr may be a tensor, unlike its annotation
        matrix = muon(
            [torch.empty(1, 1)], lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn
        )  # fmt: skip
        self._options = {
            True: matrix.defaults,
            False: torch.optim.AdamW([torch.empty(1)], **(adamw or {})).defaults,
        }
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. A group without the key "muon" is divided by the rule above.

        Raises:
            ValueError: as for the constructor.
        """
        own_parameters = param_group["params"]
        entries = [own_parameters] if isinstance(own_parameters, torch.Tensor) else list(own_parameters)
        if "muon" in param_group:
            muon = param_group["muon"]
            if not isinstance(muon, bool):
                raise ValueError(f'The key "muon" of a parameter group must be True or False, got {muon!r}')
            for entry in entries:
                name, p = _named(entry)
                if muon and p.dim() != 2:
                    what = f"parameter {name!r}" if name else "a parameter"
                    raise ValueError(
                        f"Muon is for matrices, and {what} of shape {tuple(p.shape)} is in a group with muon=True. "
                        "Move it to a group with muon=False, which AdamW steps."
                    )
            divided = {muon: entries}
        else:
            divided = {True: [], False: []}
            for entry in entries:
                divided[_is_hidden_matrix(*_named(entry))].append(entry)
            divided = {muon: chosen for muon, chosen in divided.items() if chosen} or {False: []}
            options = sorted(param_group.keys() - {"params"})
            if options and len(divided) > 1:
                raise ValueError(
                    f"A parameter group has {', '.join(options)} and both matrices for Muon and parameters for "
                    'AdamW. Divide it into two groups with the key "muon", True and False, each with separate '
                    "options."
                )
        for muon, chosen in divided.items():
            super().add_param_group({**self._options[muon], **param_group, "params": chosen, "muon": muon})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. A ``closure`` is called first, and its result returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for muon, kind in ((True, torch.optim.Muon), (False, torch.optim.AdamW)):
            rules = self.__dict__.setdefault("_rules", {})  # copies of the optimizer have none
            rule = rules.get(muon) or rules.setdefault(muon, kind([torch.empty(1, 1)]))
            rule.param_groups = [group for group in self.param_groups if group["muon"] is muon]
            rule.state = self.state
            step_without_hooks(kind)(rule)
        return loss

    def shard_needs(self, p: torch.Tensor) -> Need:
        """Return the need of a parameter: "tensor" for matrices, 1 for others. See :func:`fully_shard_optimizer`."""
        return (
            "tensor"
            if any(p is q for group in self.param_groups if group["muon"] for q in group["params"])
            else 1
        )

    def shard_updates(self, p: torch.Tensor) -> Updates | None:
        """Return functions that divide the step on a matrix, so that only its update travels; None for a whole step."""
        return muon_updates(p) if self.shard_needs(p) == "tensor" else None

    def shard_cost(self, p: torch.Tensor) -> float:
        """Return the cost of a step on a matrix, in any unit."""
        return newton_schulz_cost(p)


def _named(entry: Any) -> tuple[str | None, torch.Tensor]:
    return entry if isinstance(entry, tuple) else (None, entry)


def _is_hidden_matrix(name: str | None, p: torch.Tensor) -> bool:
    if p.dim() != 2:
        return False
    if name is None:
        raise ValueError(
            f"A matrix of shape {tuple(p.shape)} has no name, so it may be an embedding or an output layer, which "
            'Muon must not step. Pass model.named_parameters(), or groups with the key "muon", True or False.'
        )
    parts = name.lower().split(".")
    if any("embed" in part or part in _EMBEDDINGS for part in parts):
        return False
    return not _OUTPUTS.intersection(parts) or any(part.isdigit() for part in parts)
