"""The methods that the trainer needs from a model. Nothing about sharding, processes or devices may enter this file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: The members that a model needs, beside those of `nn.Module`.
NEEDED = (
    "blocks",
    "head",
    "tied",
    "num_params",
    "flops_per_token",
    "auxiliary",
    "auxiliary_sums",
    "separates",
    "draws",
    "float32_names",
    "foreign",
    "has_loss",
    "whole_graph",
    "read_weights",
)


class LanguageModel(nn.Module):
    """A causal language model: token numbers [B, S] (int64) in, logits [B, S, V] (float) out.

    A subclass has `blocks`, `head` and a forward. A module of another class may be used too, if it has every member in
    `NEEDED`. `missing_members` names what a model lacks.

    ``forward(tokens)`` returns the logits. ``forward(tokens, extras=True)`` returns a pair of logits and extras, if the
    model has `auxiliary` losses. ``forward(tokens, documents=..., positions=...)`` keeps the documents of a sample
    apart, if the model `separates`.
    """

    #: Members beside `NEEDED` that a class asks of its subclasses.
    parts: tuple[str, ...] = ()

    #: Whether embedding and output layer are one matrix.
    tied: bool = False

    #: The weight of each loss beside the cross-entropy.
    auxiliary: Mapping[str, float] = {}

    #: The meaning of a loss in `auxiliary`, in a few words. The run prints it before the first step.
    meanings: Mapping[str, str] = {}

    #: Whether forward keeps the documents of a sample apart. Samples of several documents need a model that does.
    separates: bool = False

    #: Whether forward draws random numbers in training, as for dropout.
    draws: bool = False

    #: Whether the code of the model is not of this package. The trainer then checks that no token sees a later one.
    foreign: bool = False

    #: Whether ``forward(tokens, batch=batch)`` returns the model's own loss in place of logits: summed over the targets
    #: that are not IGNORED, 0-d.
    has_loss: bool = False

    #: Names of the parameters that are computed with in float32, whatever the precision of the others is.
    float32_names: Collection[str] = ()

    #: Whether `flops_per_token` leaves out the gradients of frozen weights. Else those of linear layers are subtracted.
    counts_frozen: bool = False

    #: Whether torch.compile makes one graph of a block. False: a graph may have breaks.
    whole_graph: bool = True

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """Return the parts that may be gathered and freed one at a time, in the order in which forward runs them."""

    @abstractmethod
    def head(self) -> list[nn.Module]:
        """Return the parts that forward uses last, and the embedding if it has the same matrix."""

    def output_layer(self) -> nn.Module | None:
        """Return the module whose result are the logits, before soft caps and scales, for `train.loss_chunks`. None:
        not known."""
        return None

    def num_params(self) -> int:
        """Return the number of parameters; a tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward for each trained token. Here six for each parameter."""
        return 6 * self.num_params()

    @staticmethod
    def auxiliary_sums(extras: Any, targets_BS: Tensor) -> dict[str, Tensor]:
        """Return the losses in `auxiliary`, from the extras of forward; summed over the trained tokens, those whose
        target is not -100, so that division by their number gives a mean."""
        return {}

    def read_weights(self) -> None:
        """Read stored weights, if the model begins with any: into shards, too. Every rank calls it."""


def missing_members(model: object) -> list[str]:
    """Return the names of members that a model lacks; empty for a language model."""
    if not isinstance(model, nn.Module):
        return ["torch.nn.Module"]
    # Not hasattr, which would evaluate properties.
    there = {*dir(type(model)), *vars(model), *model._modules, *model._parameters, *model._buffers}
    there -= {name for name in ("blocks", "head") if _is_abstract(type(model), name)}
    if type(model).forward is nn.Module.forward:  # the placeholder of nn.Module
        there.discard("forward")
    return [name for name in ("forward", *NEEDED, *getattr(model, "parts", ())) if name not in there]


def _is_abstract(owner: type, name: str) -> bool:
    """Return whether a class lacks a method that its base class declares. nn.Module has no metaclass that looks for
    it."""
    return getattr(getattr(owner, name, None), "__isabstractmethod__", False)


def multiplied(model: nn.Module, embedding: nn.Module | None, tied: bool) -> int:
    """Parameters that a token is multiplied with: all except an embedding that is only looked up."""
    looked_up = 0 if tied or embedding is None else sum(p.numel() for p in embedding.parameters())
    return sum(p.numel() for p in model.parameters()) - looked_up


def draws_numbers(model: nn.Module) -> bool:
    """Return whether a module of the model is a dropout that is not off."""
    dropouts = (nn.Dropout, nn.AlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
    return any(isinstance(module, dropouts) and module.p > 0 for module in model.modules())


@torch.no_grad()
def sees_later_tokens(model: nn.Module, tokens_1S: Tensor, vocab_size: int) -> bool:
    """Return whether a change of the last token changes logits before it. The model, in evaluation, runs twice.

    Differences are compared with the one at the last token. Rounding is a millionth of it in float32.
    """
    others_1S = tokens_1S.clone()
    others_1S[0, -1] = (others_1S[0, -1] + 1) % vocab_size
    one, other = model(tokens_1S), model(others_1S)
    rounding = 1e-4 if one.dtype == torch.float32 else 0.05
    difference_S = (one.float() - other.float()).abs().amax(-1)[0]
    return bool((difference_S[:-1].max() > rounding * difference_S[-1]).item())
